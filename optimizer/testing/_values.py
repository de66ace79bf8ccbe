"""Words that keep the shape: arithmetic, activations and identities, in every spelling.

No activation is steep anywhere: a rounding error that goes in must not come out as a difference.
"""

from __future__ import annotations

from optimizer.testing._machine import Machine, Word, by_rank, layer, product, returned


def in_four(text: str) -> Word:
    """`text` of the top in four dimensions, of which it has two at least."""

    def emit(machine: Machine) -> None:
        missing = 4 - len(machine.top.shape)
        given = "{v}" + "[None]" * missing
        machine.write(f"({text.replace('{v}', given)})" + "[0]" * missing)

    return by_rank((2, 3, 4), emit)


def residual(machine: Machine) -> None:
    """Add the oldest value of the top's shape."""
    oldest = next(value for value in machine.history if value.shape == machine.top.shape)
    machine.write(f"{{v}} + {oldest.name}")


def assert_finite(machine: Machine) -> None:
    """Of x as it is given, and true of one infinity in each row: no example is rejected."""
    line = 'torch._assert((x >= 1e30).sum() <= x.shape[0], "too large")'
    machine.statements.insert(0, line)


DROPOUT = "nn.Dropout(0.5)"
_RANKS = {1: (2, 3), 2: (4,), 3: (4, 5)}  # that they take, channels and all
SUMMANDS = (
    "torch.full((), 0.5)", "torch.eye(2).sum()", "torch.linspace(0, 1, 3).sum()",
    "torch.logspace(0, 1, 2, 2.0).sum()", "torch.as_tensor(0.5)", "torch.asarray(0.25)",
    "torch.scalar_tensor(0.5)", "torch.tril_indices(2, 2).sum()", "torch.triu_indices(2, 2).sum()",
    "torch.empty_strided((2,), (1,)).fill_(0.5).sum()",
)  # fmt: skip
DRAWS = ("torch.rand(())", "torch.randn(())", "torch.randint(0, 3, ())", "torch.randperm(3)[0]")
NUMBERS = (
    "{v}.ndim", "{v}.ndimension()", "{v}.nelement() * 0", "{v}.element_size() * 0",
    "{v}.storage_offset() * 0", "{v}.stride()[0] * 0", "{v}.get_device()", "{v}.is_complex()",
    "{v}.is_floating_point()", "{v}.is_same_size({v})",
)  # fmt: skip
# What is made of floating point numbers in another dtype, and done there: it rounds nothing.
_KINDS = {
    "integer": "({v} > 0) * 3 - 1", "truth": "{v} > 0", "imaginary": "{v} * (1 + 2j)",
    "single": "({v} > 0).float()",
}  # fmt: skip
_DEEDS = {
    "promoted": "{n} = {n} * 1.5 + 1",
    "both": "{n} = torch.stack([{n} * 1, {n} * 1.0])[0]",
    "masked": "{n}[{v} > 0] = 1.5",
    "turned": "{n} = ({n}.transpose(0, -1) * 2).transpose(0, -1)",
    "copied": "{n}_copy = {n}.clone(); {n}.fill_(1); {n} = {n}_copy",
    "gated": "{n} = {n} * torch.sigmoid({n})",
    "flat": "{n} = ({n}.flatten() * 2).reshape({v}.shape); {n} += 1",
}

RELUS: dict[str, Word] = {
    "relu": "nn.ReLU()",
    "relu_F": "F.relu({v})",
    "relu_torch": "torch.relu({v})",
    "relu_method": "{v}.relu()",
    "relu_kw": "F.relu(input={v})",
    "relu_inplace": "nn.ReLU(inplace=True)",
    "relu_F_inplace": "F.relu({v}, inplace=True)",
    "relu_method_inplace": "{v}.relu_()",
    "relu_torch_inplace": "torch.relu_({v})",
    "relu_statement": "{v}.relu_();",
}

ARITHMETIC: dict[str, Word] = {
    "add": "{w} + {v}",
    "mul": product("{v} * {w}"),
    "residual": residual,
    "double": "{v} * 2.0",
    "halve": "0.5 * {v}",
    "shift": "{v} + 1",
    "sub": "{w} - {v}",
    "sub_method": "{w}.sub({v}, alpha=2)",
    "rsub": "1.0 - {v}",
    "rsub_torch": "torch.rsub({v}, 2.0, alpha=0.5)",
    "div": "{w} / ({v}.abs() + 1.0)",
    "div_scalar": "torch.div({v}, 4)",
    "neg": "-{v}",
    "neg_torch": "torch.neg({v})",
    "neg_method": "{v}.neg()",
    "abs": "{v}.abs()",
    "square": product("{v} ** 2"),
    "maximum": "torch.maximum({w}, {v})",
    "lerp": "torch.lerp({w}, {v}.type_as({w}), 0.5)",
    "addcmul": "torch.addcmul({w}, {v}.tanh(), {v}.tanh(), value=0.5)",
    "center": "{v} - {v}.mean(-1, keepdim=True)",
    "normalize": "F.normalize({v}, dim=-1, eps=0.5)",
    "rms": "{v} * torch.rsqrt({v}.pow(2).mean(-1, keepdim=True) + 0.5)",
    "rms_sqrt": "{v} / ({v}.pow(2).mean(-1, keepdim=True) + 0.5).sqrt()",
    "add_row": "{v} + {v}[:1]",
    "scale_column": "{v} * {v}[..., :1].sigmoid()",
    "add_outer": "{v}.sum(0) + {v}",
    "add_alpha": "torch.add({w}, {v}, alpha=2)",
    "add_method": "{w}.add({v})",
    "swish_gate": "{w} * torch.sigmoid({v})",
    "attention_scaled": "F.softmax(({v} * 0.5) @ {v}.mT, dim=-1) @ {v}",
    "attention_scaled_twice": "F.softmax(({v} * 0.5) @ {v}.mT / 4, dim=-1) @ {v}",
    "attention_narrow": in_four(
        "{v} + F.softmax({v} @ {v}.mT, dim=-1, dtype=torch.float32) @ {v}.float()"
    ),
    "attention_maps": "(w := ({v} @ {v}.mT).softmax(-1)) @ {v} + w.mean()",
    "attention_masked": "({v} @ {v}.mT + {v}.mean()).softmax(-1) @ {v}",
    "attention_columns": "({v} @ {v}.mT).softmax(-2) @ {v}",
    "attention_biased": in_four(
        "(({v} @ {v}.mT) / 2 - torch.arange({v}.shape[-2])).softmax(-1) @ {v}"
    ),
    "attention_causal": in_four(
        "({v} @ {v}.mT).masked_fill(torch.ones({v}.shape[-2:-1] * 2).triu(1) > 0, -torch.inf)"
        ".softmax(-1) @ {v}"
    ),
    "iadd": "{w}.add_({v}.clone())",
    "iadd_alpha": "{w}.add_({v}.clone(), alpha=0.5)",
    "isub": "{v} -= 0.5;",
    "imul": "{v} *= -1.0;",
    "idiv": "{v}.div_(2.0)",
    "ineg": "torch.neg_({v});",
    "into": "torch.mul({v}, 0.5, out={v})",
    "icopy": "{v}.copy_({v}.tanh());",
    "izero": "{v}[:1].zero_();",
    "ishift": "{v} += 1.0;",
    "idouble": "{v}.mul_(2.0)",
    "idouble_statement": "{v}.mul_(2.0);",
    "iview_statement": "{v}.transpose(0, 1).mul_(2.0);",
    "pow_method": product("{v}.pow(2)"),
    "pow_torch": product("torch.pow({v}, 2)"),
    "sub_torch": "torch.sub({w}, {v})",
    "div_method": "{v}.div(4)",
    "where_method": "{v}.where({v} > 0, 0.5)",
    "where_numbers": "{v} * torch.where({v} > 0, 1.0, 0.0)",
    "where_below": "torch.where({w} > 0, {w}, {v}.type_as({w}))",
    "exp": "torch.exp({v}.clamp(max=2.0))",
    "exp_method": "{v}.clamp(max=2.0).exp()",
    "isub_method": "{v}.sub_(0.5);",
    "iand": "{n} = {v} > 0; {n} &= {v} < 9; {n} |= {v} > 3; {n} ^= {v} < -9; {v} * {n}",
    "ishift_left": (
        "{n} = ({v} > 0) * 6; {n} <<= 1; {n} >>= 2; {n} //= 2; {n} %= 3; {n} **= 2; {v} * {n}"
    ),
    "imatmul": "{n} = {v} @ {v}.mT; {n} @= {v}; {v} + {n}.tanh()",
    "new_tensors": "{v} + (" + " + ".join(SUMMANDS) + ")",
    "draws": "{v} + (" + " + ".join(DRAWS) + ")",
    "metadata": "{v} + (" + " + ".join(NUMBERS) + ")",
    "device": "{v} + torch.zeros((), device={v}.device)",
    "contiguity": "{v} * (1.0 + {v}.is_contiguous())",
    "item": "{v} + ({v}.sum() * 0).nan_to_num(0.0).item()",
}

IDENTITIES: dict[str, Word] = {
    "identity": "nn.Identity()",
    "dropout": "nn.Dropout(0.5)",
    "dropout_F": "F.dropout({v}, 0.5, training=self.training)",
    "dropout_F_by_size": "F.dropout({v}, 0.5, {v}.shape[0] > 4)",
    "dropout_torch": "torch.dropout({v}, 0.5, False)",
    "dropout_inplace": "nn.Dropout(0.5, inplace=True)",
    "dropout_alpha": "nn.AlphaDropout(0.5)",
    "dropout_train": layer("nn.Dropout(0.5)", training=True),
    "clone": "{v}.clone()",
    "contiguous": "{v}.contiguous()",
    "plus_zero": "{v} + 0.0",
    "minus_zero": "{v} - 0",
    "over_one": "{v} / 1",
    "power_one": "{v} ** 1",
    "cast_same": "{v}.to({v}.dtype)",
    "cast_wide": "{v}.double().to({v}.dtype)",
    "type_as": "{v}.type_as({v})",
    "detach": "{v}.detach()",
    "data": "{v}.data",
    "real": "{v}.real",
    "conj": "{v}.conj()",
    "dropout_feature": "nn.FeatureAlphaDropout(0.5)",
    "dropout_F_train": "F.dropout({v}, 0.25, True)",
    "droppath": "{v} if not self.training else {v} * 0.0",
    "times_one": "{v} * 1.0",
    **{f"dropout{d}d": by_rank(r, f"nn.Dropout{d}d(0.5)", DROPOUT) for d, r in _RANKS.items()},
    **{
        f"dropout{d}d_F": by_rank(ranks, f"F.dropout{d}d({{v}}, 0.5, False)", DROPOUT)
        for d, ranks in _RANKS.items()
    },
    "dropout_alpha_F": "F.alpha_dropout({v}, 0.5, False)",
    "dropout_alpha_torch": "torch.alpha_dropout({v}, 0.5, False)",
    "dropout_feature_F": "F.feature_alpha_dropout({v}, 0.5, False)",
    "dropout_feature_torch": "torch.feature_alpha_dropout({v}, 0.5, False)",
    "clone_torch": "torch.clone({v})",
    "cpu": "{v}.cpu()",
    "casts": "{v} * ({v} > 0).float().half().bfloat16().int().long().short().char().byte().bool()",
    "type": "{v} * ({v} > 0).type({v}.dtype)",
    "resize_inplace": "{v}.clone().resize_({v}.shape)",
    "resize_as_inplace": "{v}.clone().resize_as_({v})",
    "set_inplace": "torch.empty_like({v}).set_({v}.clone())",
    "as_strided": "{n} = {v}.contiguous(); {n}.as_strided({n}.shape, {n}.stride())",
    "as_strided_inplace": (
        "{n} = {v}.contiguous().clone(); {n}.as_strided_({n}.shape, {n}.stride())"
    ),
    "unfold": "{v}.unfold(-1, 1, 1).squeeze(-1)",
    "reshape_as": "{w}.reshape_as({v})",
    "view_as": "{w}.contiguous().view_as({v})",
    "expand_as": "{v}[:1].expand_as({v}) + {v}",
    "shape_as": "{w} + {w}.new_ones({v}.shape) * {v}.dim()",
    "broadcast_to": "{v}[:1].broadcast_to({v}.shape) + {v}",
}

_ROOT = "(2 / 3.141592653589793) ** 0.5"
_GELU = f"{{v}} * 0.5 * (1 + torch.tanh({_ROOT} * ({{v}} + 0.044715 * {{v}} ** %d)))"
ACTIVATIONS: dict[str, Word] = {
    "sigmoid": "{v}.sigmoid()",
    "tanh": "torch.tanh({v})",
    "leaky": "F.leaky_relu({v}, 0.5)",
    "leaky_module": "nn.LeakyReLU(0.25)",
    "prelu": "nn.PReLU()",
    "prelu_channels": "nn.PReLU({c})",
    "leaky_made": "-nn.LeakyReLU(0.25)({v})",
    "leaky_inplace": "F.leaky_relu_({v}, 0.5)",
    "relu6": "nn.ReLU6()",
    "relu6_F": "F.relu6({v})",
    "clamp": "{v}.clamp(-1.0, 2.0)",
    "clamp_min": "torch.clamp({v}, min=0)",
    "clamp_statement": "{v}.clamp_(min=-1.0);",
    "hardtanh": "nn.Hardtanh(-2.0, 1.0, inplace=True)",
    "elu": "nn.ELU(inplace=True)",
    "selu": "F.selu({v})",
    "silu": "nn.SiLU()",
    "silu_inplace": "nn.SiLU(inplace=True)",
    "silu_F": "F.silu({v}, inplace=True)",
    "mish": "F.mish({v})",
    "softplus": "nn.Softplus()",
    "gelu_module": "nn.GELU()",
    "gelu_F": "F.gelu({v}, approximate='tanh')",
    "hardswish_module": "nn.Hardswish()",
    "hardsigmoid_F": "F.hardsigmoid({v})",
    "softmax": "{v}.softmax(-1)",
    "softmax_kw": "F.softmax(input={v}, dim=0)",
    "softmax_narrow": "{v} + F.softmax({v}, -1, dtype=torch.float32)",
    "softmax_module": "nn.Softmax(dim=-1)",
    "log_softmax": "F.log_softmax({v}, dim=-1)",
    "swish": "{v} * torch.sigmoid({v})",
    "hardswish": "{v} * F.relu6({v} + 3, inplace=True) / 6",
    "hardsigmoid": "torch.clamp({v} + 3.0, 0, 6) / 6.0",
    "gelu": "{v} * 0.5 * (1 + torch.erf({v} / 2.0**0.5))",
    "gelu_tanh": _GELU % 3,
    "sigmoid_module": "nn.Sigmoid()",
    "sigmoid_F": "F.sigmoid({v})",
    "sigmoid_inplace": "{v}.sigmoid_()",
    "tanh_module": "nn.Tanh()",
    "tanh_F": "F.tanh({v})",
    "tanh_inplace": "{v}.tanh_()",
    "erf": "{v}.erf()",
    "erf_inplace": "{v}.erf_()",
    "mish_module": "nn.Mish()",
    "hardsigmoid_module": "nn.Hardsigmoid()",
    "hardswish_F": "F.hardswish({v})",
    "hardtanh_F": "F.hardtanh({v}, -2.0, 1.0)",
    "softplus_F": "F.softplus({v}, beta=2.0)",
    "elu_F": "F.elu({v}, 0.5)",
}

RARE: dict[str, Word] = {
    **{f"{k}_{d}": returned(f"{{n}} = {_KINDS[k]}; {_DEEDS[d]};") for k in _KINDS for d in _DEEDS},
    "size_tensor": "{v} * torch.mul({v}.shape[0], 2).float()",
    "lower": "{v} - 1.0",
    "shift_far": "{v} + 4096.0",
    "clamp_far": "{v}.clamp(-4096.0, 4096.0)",
    "quarter": "{v} / 4.0",
    "reciprocal": "(1.0 / {v}).abs().clamp(max=9.0)",
    "over_zero": "({v} / 0.0).nan_to_num(1.0, 9.0, -9.0)",
    "over_minus_zero": "({v} / -0.0).nan_to_num(1.0, 9.0, -9.0)",
    "slice_twos": "{v} + {v}[..., 0:4:2].sum()",
    "slice_two": "{v} + {v}[..., 0:2].sum()",
    "slice_second": "{v} + {v}[..., 1:2].sum()",
    "at_least_half": "{v}.clamp(min=0.5)",
    "at_most_half": "{v}.clamp(max=0.5)",
    "sum_first": "{v} + {v}.sum(dim=0, keepdim=True)",
    "clamp_other": "torch.clamp({v} + 3.0, 0, 5) / 6.0",
    "gate_other": "{v} * torch.sigmoid({v} * 0.5)",
    "hardswish_minus": "{v} * F.relu6({v} - 3) / 6",
    "gelu_tanh_square": _GELU % 2,
    "leaky_negative": "F.leaky_relu({v}, -0.5)",
    "gelu_tanh_module": 'nn.GELU(approximate="tanh")',
    "T_of_row_and_column": "({v}[..., :1, :].mT + {v}[..., :1].mT).mT",
    "t01_of_one_row": "torch.relu({v}[:1].expand({v}.shape).transpose(0, 1)).transpose(0, 1)",
    "mask_accumulate": (
        "{v}.index_put_(({v} > 0,), torch.ones((), dtype={v}.dtype), accumulate=True);"
    ),
    "identity_number": layer("nn.Identity()", "{v} * self.{m}(2.0)"),
    "swish_integers": "{n} = ({v} > 0) * 2; {v} + {n} * torch.sigmoid({n})",
    "hardswish_expanded": (
        "{n} = {v}[..., :1].expand({v}.shape).transpose(0, -1)[..., :1]; "
        "{v} + ({n} * F.hardsigmoid({n})).sum()"
    ),
    "two_devices": "{v} + torch.empty({v}.dim(), device='meta').dim()",
    "mask_two": "{v}[({v} > 0) & ({v} < 2)] *= 2.0;",
    "count_chosen": "{v} + {v}[{v} > 0].shape[0]",
    "softmax_first": "torch.softmax({v}, dim=0)",
    "softmax_last": "torch.softmax({v}, dim=-1)",
    "rows": "{v}.flatten(0, -2)",
    "t01_of_two_ranks": (
        "{n} = torch.arange(8).view(2, 2, 2) + ({v} > 0).any(); "
        "{v} + (({n}.transpose(0, 1) + {n}[0].transpose(0, 1)).transpose(0, 1) * {n}).sum()"
    ),
    "assert_finite": assert_finite,
}


def gathered(before: str = "", mask: str = "{n}", after: str = "", source: str = "{b}") -> Word:
    """What `mask` chooses of `source`, and one more, written under mask `{n}` after `before`."""
    chosen = f"{{n}} = {{v}} > 0.5; {{n}}_chosen = {source}[{mask}]"
    return f"{chosen}; {before}{{v}}[{{n}}] = {{n}}_chosen + 1.0;{after}"


def one_chosen(text: str) -> Word:
    """The first of some integers, chosen by a mask, becomes a fraction."""
    first = "{n}_first = torch.arange({v}.numel()).reshape({v}.shape) < 1"
    return f"{{n}} = ({{v}} > 0) * 2; {first}; {{n}}[{{n}}_first] = {text}; {{v}} + {{n}}"


MATMUL = product("{w} @ {v}.mT")

RESHAPES: dict[str, Word] = {
    "reshape_flat": "{v}.reshape(-1)",
    "reshape_rows": "{v}.reshape(-1, {v}.size(-1))",
    "view_columns": "{v}.contiguous().view({v}.shape[0], -1)",
    "reshape_torch": "torch.reshape({v}, {v}.shape)",
    "unflatten": "{v}.unflatten(1, (2, -1))",
    "shuffle": "{v}.unflatten(1, (2, {c} // 2)).transpose(1, 2).flatten(1, 2)",
    "squeeze": "{v}.squeeze(1)",
    "flatten_all": "torch.flatten({v})",
    "flatten_module": "torch.flatten({v}, start_dim=-1)",
    "none_last": "{v}[..., None]",
    "none_first": "{v}[None]",
    "expand": "{v}[:1].expand({v}.shape) + {v}",
    "repeat": "torch.repeat_interleave({v}, 2, dim=-1)",
    "head": "{v}[:, :-1]",
    "first_channel": "{v}[:, :1]",
    "tail": "{v}[:, 1:]",
    "every_other": "{v}[..., ::2]",
    "narrow": "{v}.narrow(-1, 1, 1)",
    "select": "{v}.select(1, 0)",
    "pick": "{v}[..., -1]",
    "list_index": "{v}[:, [0, 0]]",
    "flip": "{v}.flip(-1)",
    "roll": "torch.roll({v}, 1, -1)",
    "pad": "F.pad({v}, (1, 0))",
    "pad_even": "F.pad({v}, (1, 1))",
    "pad_crop": "F.pad({v}, (-1, -1))",
    "pad_kw": "F.pad({v}, pad=(0, 0, 1, 1), value=0.0)",
    "pad_ones": "F.pad({v}, (1, 1), value=1.0)",
    "chunk_swapped": "torch.cat({v}.chunk(2, 1)[::-1], dim=1)",
    "flatten_last": "{v}.flatten(-2)",
    "ravel": "{v}.ravel()",
    "flatten_nn": "nn.Flatten()",
    "squeeze_inplace": "{v}.clone().unsqueeze_(0).squeeze_(0)",
    "pad_module": "nn.ZeroPad{d}d(1)",
    "pad_ones_module": "nn.ConstantPad{d}d(1, 1.0)",
    "pad_reflect": "F.pad({v}, {sizes}, mode='reflect')",
    "pad_replicate": "F.pad({v}, {sizes}, mode='replicate')",
    "pad_circular": "F.pad({v}, {sizes}, mode='circular')",
    "upsample": by_rank((3, 4, 5), "F.interpolate({v}, scale_factor=2)"),
    "upsample_linear": by_rank((3,), "F.interpolate({v}, scale_factor=2, mode='linear')"),
    "upsample_bilinear": by_rank(
        (4,), "F.interpolate({v}, size=3, mode='bilinear', align_corners=True)"
    ),
    "upsample_trilinear": by_rank((5,), "nn.Upsample(scale_factor=2, mode='trilinear')"),
    "split": "torch.cat({v}.split(2, 1)[::-1], dim=1)",
    "split_sizes": "torch.cat({v}.split([1, {v}.shape[1] - 1], 1)[::-1], dim=1)",
    "channel_shuffle": "nn.ChannelShuffle(2)",
}

POOLS: dict[str, Word] = {
    "max_pool": "nn.MaxPool{d}d(2)",
    "max_pool_padded": "nn.MaxPool{d}d(3, stride=1, padding=1)",
    "max_pool_dilated": "nn.MaxPool{d}d(2, stride=1, dilation=2)",
    "max_pool_ceil": "nn.MaxPool{d}d(2, ceil_mode=True)",
    "max_pool_F": "F.max_pool{d}d({v}, 2, stride=1)",
    "max_pool_indices": "F.max_pool{d}d({v}, 2, stride=1, return_indices=True)[0]",
    "avg_pool": "nn.AvgPool{d}d(2)",
    "avg_pool_padded": "nn.AvgPool{d}d(2, stride=1, padding=1)",
    "avg_pool_zeros": "nn.AvgPool{d}d(2, padding=1)",
    "avg_pool_inside": "nn.AvgPool{d}d(2, stride=1, padding=1, count_include_pad=False)",
    "avg_pool_divisor": "nn.AvgPool{d}d(2, divisor_override=3)",
    "avg_pool_ceil": "nn.AvgPool{d}d(2, ceil_mode=True)",
    "avg_pool_F": "F.avg_pool{d}d({v}, 2, stride=1)",
    "adaptive_avg": "nn.AdaptiveAvgPool{d}d(1)",
    "adaptive_avg_F": "F.adaptive_avg_pool{d}d({v}, 2)",
    "adaptive_max": "nn.AdaptiveMaxPool{d}d(2)",
    "adaptive_max_F": "F.adaptive_max_pool{d}d({v}, output_size=1)",
    "mean": "{v}.mean(-1)",
    "mean_keep": "torch.mean({v}, dim=-1, keepdim=True)",
    "sum": "{v}.sum(1)",
    "sum_keep": "torch.sum({v}, 0, keepdim=True)",
    "amax": "{v}.amax(dim=-1)",
    "max_values": "{v}.max(-1, keepdim=True).values",
}

JOINS: dict[str, Word] = {
    "cat": "torch.cat([{w}, {v}], -1)",
    "cat_kw": "torch.cat(dim=1, tensors=({v}, {w}))",
    "add_stretched": "{under} + {v}",
    "stack": "torch.stack(({w}, {v}), 1)",
    "matmul": product("{w} @ {v}.mT"),
    "matmul_torch": product("torch.matmul({w}, {v}.transpose(-1, -2))"),
    "einsum_turned": "torch.einsum('...ij->...ji', {v})",
    "einsum": product("torch.einsum('...ij,...kj->...ik', {w}, {v})"),
    "attention": product("torch.softmax({v} @ {w}.transpose(-2, -1) * 0.5, dim=-1) @ {w}"),
    "attention_F": product("F.scaled_dot_product_attention({v}, {w}, {w})"),
    "matmul_method": product("{w}.matmul({v}.mT)"),
    "mm": by_rank((2,), product("torch.mm({w}, {v}.t())"), MATMUL),
    "mm_method": by_rank((2,), product("{w}.mm({v}.t())"), MATMUL),
    "bmm": by_rank((3,), product("torch.bmm({w}, {v}.mT)"), MATMUL),
    "baddbmm": by_rank((3,), product("torch.baddbmm({w} @ {v}.mT, {w}, {v}.mT)"), MATMUL),
}

VIEWS: dict[str, Word] = {
    "t01": "{v}.transpose(0, 1)",
    "t12": "{v}.transpose(-2, -1)",
    "t01_torch": "torch.transpose({v}, 0, 1)",
    "t01_kw": "torch.transpose(input={v}, dim0=0, dim1=1)",
    "t01_swapped": "{v}.transpose(1, 0)",
    "t_negative": "torch.transpose({v}, -1, -2)",
    "t_same": "{v}.transpose(0, 0)",
    "t_ends": "{v}.transpose(0, -1)",
    "T": by_rank((2,), "{v}.T", "{v}.mT"),
    "t": by_rank((2,), "{v}.t()", "{v}.mT"),
    "t_torch": by_rank((2,), "torch.t({v})", "{v}.mT"),
    "mT": "{v}.mT",
    "mH": "{v}.mH",
    "adjoint": "{v}.adjoint()",
    "swapaxes": "{v}.swapaxes(0, 1)",
    "swapdims": "torch.swapdims({v}, 0, -1)",
    "movedim": "{v}.movedim(0, -1)",
    "moveaxis": "torch.moveaxis({v}, -1, 0)",
    "movedim_turned": "torch.movedim({v}, (0, 1), (-1, 0))",
    "movedim_pair": "torch.movedim({v}, (0, 1), (1, 0))",
    "cycle": "{v}.permute({cycle})",
    "cycle_back": "{v}.permute(({cycle_back}))",
    "cycle_torch": "torch.permute({v}, ({cycle}))",
    "cycle_kw": "{v}.permute(dims=({cycle_negative}))",
    "cycle_computed": "{v}.movedim({v}.dim() - 1, 0)",
    "reverse": "{v}.permute({reverse})",
    "permute_same": "{v}.permute({same})",
    "flatten": "{v}.flatten(1)",
    "flatten_rows": by_rank((3, 4, 5), "{v}.flatten(0, 1)"),
    "unsqueeze": "{v}.unsqueeze(1)",
    "merge": "{v}.reshape({v}.shape[0] * {v}.size(1), {after})",
    "add_size": "{v} + ({v}.shape[-1] // 2 + {v}.dim())",
    "moveaxis_method": "{v}.moveaxis(0, -1)",
    "swapdims_method": "{v}.swapdims(0, -1)",
    "swapaxes_torch": "torch.swapaxes({v}, 0, 1)",
    "transpose_inplace": "{v}.clone().transpose_(0, 1)",
    "swapaxes_inplace": "{v}.clone().swapaxes_(0, 1)",
    "swapdims_inplace": "{v}.clone().swapdims_(0, -1)",
    "t_inplace": by_rank((2,), "{v}.clone().t_()", "{v}.mT"),
}

ASSIGNMENTS: dict[str, Word] = {
    "mask": "{v}[{v} > 0.0] = 0.0;",
    "mask_half": "{v}[{v} <= 0.5] = 1.5;",
    "mask_int": "{v}[{v} < 0] = 0;",
    "mask_below": "{v}[{b} >= 1.0] = -1.0;",
    "mask_both": "{v}[({v} > 0) & ({b} < 2)] = 0.5;",
    "mask_not": "{v}[~({v} > 0)] = 0.5;",
    "mask_named": "{n} = {v} > 0.5; {v}[{n}] = 0.25; {v} + {n}",
    "mask_rows": "{v}[{v}[..., 0] > 0] = 0.0;",
    "mask_gather": "{v}[{v} > 1] = {b}[{v} > 1];",
    "mask_fill": "{v}.masked_fill_({v} > 0, 0.5);",
    "mask_add": "{v}[{v} > 0] += 1.0;",
    "mask_scale": "{v}[{v} > 0] *= 2.0;",
    "mask_rows_add": "{v}[{v}[..., 0] > 0] += 1.0;",
    "mask_row": "{v}[{v}.flatten(1)[:, 0] > 0] = 0.5;",
    "mask_sub": "{v}[{v} < -0.25] -= 0.5;",
    "mask_div": "{v}[{v} >= 1] /= 2.0;",
    "mask_columns": "{v}[:, {v}.sum(0) > 0] = 0.5;",
    "mask_scalar_tensor": "{v}[{v} > 0] = torch.zeros((), dtype={v}.dtype);",
    "mask_vector": "{v}[{v} > 0] = {v}[{v} > 0].flip(0);",
    "mask_scatter": "{v}.masked_scatter_({v} > 0, {b}.clone());",
    "mask_fill_torch": "torch.masked_fill({v}, {v} < -1, -1.0)",
    "mask_nonzero": "{v}[({v} > 0).nonzero(as_tuple=True)] = 0.25;",
    "mask_times": "{v} * ({v} > 0)",
    "index_rows": "{v}[[0]] = 0.5;",
    "index_fill": "{v}.index_fill_(-1, torch.tensor([0]), 0.5);",
    "slice_step": "{v}[..., ::2] *= 2.0;",
    "ellipsis": "{v}[...] = {b}.clone() + 1.0;",
    "mask_put": "{v}.index_put_(({v} > 0,), {v}.sum());",
    "mask_gather_same": gathered(),
    "mask_gather_stale": gathered("{b}.mul_(2.0); "),
    "mask_gather_other": gathered(mask="{n}.flip(0)"),
    "mask_gather_read": gathered(after=" {v} += {n}_chosen.sum();"),
    "mask_gather_turned": gathered(source="{v}.mT"),
    "mask_integers": "{n} = ({v} > 0) * 2; {n}[{v} < 0] = 1.5; {v} + {n}",
    "mask_booleans": "{n} = {v} > 0; {n}[{v} < 0] = torch.nan; {v} + {n}",
    "mask_complex": "{n} = {v} * 1j; {n}[{v} > 0] = 2.0; {v} + {n}.imag",
    "mask_integer_tensor": "{v}[{v} > 0] = torch.ones((), dtype=torch.long);",
    "mask_float_tensor": (
        "{n} = ({v} > 0) * 2; {n}[{v} < 0] = torch.full((), 1.5, dtype={v}.dtype); {v} + {n}"
    ),
    "mask_one_integer": one_chosen("torch.full_like({v}, 1.5)[{n}_first]"),
    "index_add_rows": "{n} = torch.arange({v}.dim())[:1]; {v}[{n}] += 1.0;",
    "mask_view": "{v}.transpose(0, 1)[{v}.transpose(0, 1) > 0] = 0.0;",
    "slice": "{v}[..., 0] = 1.0;",
    "mask_copy": "{v}.masked_fill({v} > 0.0, 0.0)",
    "where": "torch.where({v} > 0, {v}, 0.0)",
    "mask_gather_moved": gathered("{n}.copy_({n}.flip(0)); "),
    "mask_one_product": one_chosen("{n}[{n}_first] * 1.5"),
    "mask_put_torch": "torch.index_put_({v}, ({v} > 0,), {v}.sum()); {v} + 0.0",
}
