"""Words that call a layer with weights or statistics, and what is computed of them alone."""

from __future__ import annotations

from optimizer.testing._classes import KEPT, PYTHON
from optimizer.testing._machine import CALL, KEYWORD, Emit, Machine, Word, by_rank, layer, returned

MATRIX_PRODUCT = "{v} @ self.{m}.weight + self.{m}.bias"
NORM = "F.batch_norm({v}, self.{m}.running_mean, self.{m}.running_var, "
ADDMM = "torch.addmm(self.{m}.bias, {v}, self.{m}.weight.t()%s)"


def linear(call: str = CALL, ranks: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Emit:
    """A Linear that keeps the number of features, called so where the top has one of `ranks`."""
    square = "nn.Linear({last}, {last})"
    return by_rank(ranks, layer(square, call), square)


def addmm_other(size: str) -> Emit:
    """A product of matrices to which the model adds what is no bias, but of this size."""
    members = f"self.{{m}} = nn.Linear({{last}}, {{last}}); self.{{m}}_added = Constant({size})"
    text = "torch.addmm(self.{m}_added.weight, {v}, self.{m}.weight.t())"
    return by_rank((2,), lambda machine: machine.write(text, members=members))


def conv(options: str, call: str = CALL, *, out: str = "{c}") -> Emit:
    """A Conv; a Linear where there is no dimension to slide along."""
    bias = ", bias=False" * ("bias=False" in options)
    flat = f"nn.Linear({{last}}, {out.replace('{c}', '{last}').replace('{wide}', '{last}')}{bias})"
    sliding = layer(f"nn.Conv{{d}}d({{c}}, {out}, {options})", call)
    return by_rank((1, 2), layer(flat, CALL if "F.conv" in call else call), sliding)


def conv_t(options: str, *, out: str = "{more}", call: str = CALL) -> Emit:
    """A ConvTranspose, which makes an odd number of channels of an even one."""
    return by_rank((3, 4, 5), layer(f"nn.ConvTranspose{{d}}d({{c}}, {out}, {options})", call))


def batchnorm(options: str = ", eps=0.5", call: str = CALL, *, training: bool = False) -> Emit:
    """A BatchNorm over dimension 1, of the dimension that the top's rank asks for."""
    return layer(f"nn.BatchNorm{{d}}d({{c}}{options})", call, training=training)


def held(text: str, *, buffer: bool = False, before: str = "", after: str = "") -> Emit:
    """Add `text`, in which `{c}` is a new parameter or buffer, to the top.

    `before` and `after` are statements around it; in `after`, `{n}` is its value.
    """
    made = "self.register_buffer('{m}', %s)" if buffer else "self.{m} = nn.Parameter(%s)"
    lines = f"{before}{{n}} = {text}; {after}{{v}} + {{n}}".replace("{c}", "self.{m}")
    members = made % "torch.zeros({last})"
    return lambda machine: machine.write(lines, members=members)


def single(hold: str, spelling: str) -> Emit:
    """A Linear in float32 of what is above zero, which rounds nothing, times the model's own."""
    made = f"self.{{m}} = single_linear({{last}}, {hold})"
    members = f"{made}; self.{{m}}_scale = nn.Parameter(torch.zeros({{last}}))"

    def emit(machine: Machine) -> None:
        if machine.top.shape[-1]:
            machine.write(f"{spelling} * self.{{m}}_scale", members=members)

    return emit


def branches(machine: Machine) -> None:
    """The top, what a convolution and what one for each channel makes of it, added."""
    first = machine.top
    conv("3, padding=1")(machine)
    dense, machine.stack[-1] = machine.top, first
    conv("3, padding=1, groups={groups}")(machine)
    if dense is not first and machine.top is not first:
        machine.write(f"{dense.name} + {{v}} + {first.name}")


def residuals(machine: Machine) -> None:
    """Two Linear layers, each added to what it reads."""
    for _ in range(2):
        before = machine.top
        linear()(machine)
        machine.write(f"{{v}} + {before.name}")


def widen(machine: Machine) -> None:
    """Four numbers in the place of the first one of each row."""
    if machine.top.shape[-1] != 1:
        machine.write("{v}[..., :1]")
    layer("Constant(4)", "{v} * self.{m}.weight")(machine)


LAYERS: dict[str, Word] = {
    "linear": "nn.Linear({last}, {last})",
    "linear1": "nn.Linear({last}, 1)",
    "linear4": "nn.Linear({last}, 4)",
    "linear_nobias": "nn.Linear({last}, {last}, bias=False)",
    "linear_kw": linear(KEYWORD),
    "linear_F_nobias": layer("nn.Linear({last}, 4)", "F.linear({v}, self.{m}.weight)"),
    "linear_F_vector": layer("Constant({last})", "F.linear({v}, self.{m}.weight)[..., None] + {v}"),
    "linear_matmul": linear("{v} @ self.{m}.weight.t() + self.{m}.bias"),
    "linear_addmm": linear(ADDMM % "", ranks=(2,)),
    "linear_cast": linear("self.{m}({v}.to(self.{m}.weight.dtype))"),
    "linear_subclass": layer("Doubled({last}, {last})"),
    "linear_opaque": layer("Branching({last}, {last})"),
    "scale": layer("Constant({channels})"),
    "scale_image": layer("Constant({channels})", "({v} > 0).byte() * self.{m}.weight"),
    "offset_image": layer("Constant({channels})", "({v} > 0).byte() - self.{m}.weight"),
    "scale_last": layer("Constant({last})", "{v}.mul(self.{m}.weight)"),
    "scale_everywhere": layer("Constant({rest})", "{v} * self.{m}.weight"),
    "offset": layer("Constant({channels})", "self.{m}.weight - {v}"),
    "offset_row": layer("Constant(1, {last})", "{v} + self.{m}.weight"),
    "block": by_rank(
        (1, 2),
        "nn.Sequential(nn.Linear({c}, {c}), nn.BatchNorm1d({c}, eps=0.5), nn.ReLU())",
        "nn.Sequential(nn.Conv{d}d({c}, {c}, 1), nn.BatchNorm{d}d({c}, eps=0.5), nn.ReLU())",
    ),
    "sliced": layer("nn.Sequential(nn.Linear({last}, 4), nn.ReLU())", "self.{m}[:1]({v})"),
    "linear_mm": linear("torch.mm({v}, self.{m}.weight.t()) + self.{m}.bias", ranks=(2,)),
    "linear_mm_method": linear("{v}.mm(self.{m}.weight.t()) + self.{m}.bias", ranks=(2,)),
    "linear_matmul_method": linear("{v}.matmul(self.{m}.weight.t()) + self.{m}.bias"),
    "linear_addmm_method": linear("self.{m}.bias.addmm({v}, self.{m}.weight.t())", ranks=(2,)),
}

# 0.5 and the like keep var + eps = 4 ** k exact; the last one is near torch's default.
NORMS: dict[str, Word] = {
    "bn": batchnorm(),
    "bn_eighth": batchnorm(", eps=0.125"),
    "bn_small": batchnorm(f", eps={2.0**-10}"),
    "bn_tiny": batchnorm(f", eps={2.0**-17}"),
    "bn_plain": batchnorm(", eps=0.125, affine=False"),
    "bn_nostats": batchnorm(", eps=0.5, track_running_stats=False"),
    "bn_nostats_plain": batchnorm(", eps=0.5, affine=False, track_running_stats=False"),
    "bn_train": batchnorm(training=True),
    "bn_train_mean": batchnorm(", eps=0.5, momentum=None", training=True),
    "bn_kw": batchnorm(", eps=0.125", KEYWORD),
    "bn_F": batchnorm(call=NORM + "self.{m}.weight, eps=self.{m}.eps)"),
    "layernorm": "nn.LayerNorm({last}, eps=0.5)",
    "layernorm_plain": "nn.LayerNorm({last}, elementwise_affine=False)",
    "rmsnorm": "nn.RMSNorm({last}, eps=0.5)",
    "groupnorm": "nn.GroupNorm(1, {c}, eps=0.5)",
    "instancenorm": by_rank((3, 4, 5), "nn.InstanceNorm{d}d({c}, affine=True, eps=0.5)"),
}

_MANY = "{1..2}, padding={0..1}, dilation={1..2}, groups={groups}"
CONVOLUTIONS: dict[str, Word] = {
    "conv": conv("1"),
    "conv4": conv("1", out="4"),
    "conv_nobias": conv("1, bias=False"),
    "conv_k3": conv("3, padding=1"),
    "conv_valid": conv("2"),
    "conv_stride": conv("2, stride=2"),
    "conv_pointwise_stride": conv("1, stride=2"),
    "conv_pointwise_padded": conv("1, padding=1"),
    "conv_pointwise_unbatched": by_rank(
        (1,), "nn.Linear({last}, {last})", "nn.Conv{d0}d({c0}, {c0}, 1)"
    ),
    "conv_same": conv("3, padding='same'"),
    "conv_reflect": conv("3, padding=1, padding_mode='reflect'"),
    "conv_replicate": conv("3, padding=1, padding_mode='replicate'"),
    "conv_circular": conv("2, padding=1, padding_mode='circular'"),
    "conv_groups": conv("1, groups={groups}"),
    "conv_groups_k3": conv("3, padding=1, groups={groups}, bias=False"),
    "conv_depthwise": conv("3, padding=1, groups={c}", out="{wide}"),
    "conv_kw": conv("1", KEYWORD),
    "conv_F": conv("1", "F.conv{d}d({v}, self.{m}.weight, self.{m}.bias)"),
    "conv_unbatched": by_rank((1,), "nn.Linear({last}, {last})", "nn.Conv{d0}d({c0}, {c0}, 2)"),
    "conv_uneven": conv("{1..3}, stride={1..2}, padding={0..1}"),
    "conv_many": conv(_MANY),
    "conv_t": conv_t("2"),
    "conv_t_groups": conv_t("1, groups={pairs}", out="{paired}"),
    "conv_t_stride": conv_t("3, stride=2, padding=1, output_padding=1, bias=False"),
    "conv_t_F": conv_t("2", call="F.conv_transpose{d}d({v}, self.{m}.weight, self.{m}.bias)"),
    "conv_t_many": conv_t(
        "2, stride=2, padding=1, output_padding=1, groups={pairs}, dilation=2", out="{paired}"
    ),
}

# What a pass that takes a weight for a constant, or one spelling for another, would get wrong.
RARE_LAYERS: dict[str, Word] = {
    "widen": widen,
    "conv_written": conv("1", "self.{m}.weight.mul_(2.0); self.{m}({v})"),
    "conv_written_later": conv("1", "{n} = self.{m}({v}); self.{m}.weight.mul_(2.0); {n} * 1.0"),
    "bn_written": batchnorm(call="self.{m}.running_mean.add_(1.0); self.{m}({v})"),
    "bn_trained": batchnorm(call=f"{{n}} = {CALL}; {NORM.replace('{v}', '{n}')}training=True)"),
    "scale_written": layer(
        "Constant({last})", "self.{m}.weight.mul_(2.0); {v}.mul(self.{m}.weight)"
    ),
    "matmul_vector": layer("Constant({last})", "({v} @ self.{m}.weight).unsqueeze(-1) + {v}"),
    "scale_integers": lambda machine: machine.write(
        "{v} * self.{m}",
        members="self.register_buffer('{m}', torch.arange(1, {more}).reshape(-1, {ones}))",
    ),
    "matmul_square": linear(MATRIX_PRODUCT),
    "matmul_same": linear("{v} @ self.{m}.weight.permute(0, 1)"),
    "matmul_written": linear("self.{m}.weight.mul_(2.0); " + MATRIX_PRODUCT),
    "addmm_scaled": linear(ADDMM % ", alpha=2.0, beta=0.5", ranks=(2,)),
    "addmm_number": addmm_other("1"),
    "addmm_row": addmm_other("1, {last}"),
    "bn_F_train_bare": batchnorm(call=NORM + "training=True)", training=True),
    "bn_F_by_size": batchnorm(call=NORM + "training={v}.shape[0] > 4)", training=True),
}

_LITERAL = "{n} = torch.tensor([0.5, 2.0]); "
CONSTANTS: dict[str, Word] = {
    "constant": held("torch.relu({c}) * 2.0"),
    "constant_buffer": held("0.5 * {c}.abs()", buffer=True),
    "constant_view": by_rank((2, 3, 4, 5), held("{c}.unsqueeze(0)")),
    "constant_expanded": held("(2.0 * {c}).expand(3, -1)[1]"),
    "constant_counter": held("{c} * 2.0", buffer=True, before="{c}.add_(1.0); "),
    "constant_counter_later": held("{c} * 2.0", buffer=True, after="{c}.add_(1.0); "),
    "constant_item": held("{c}[0].item()", buffer=True, before="{c}.add_(1.0); "),
    "constant_written": held("{c} * 2.0", after="{n}.add_(1.0); "),
    "constant_contiguous_written": held("{c}.abs().contiguous()", after="{n}.mul_(2.0); "),
    "constant_inplace": held("({c} * 2.0).relu_()"),
    "constant_large": held("(2.0 * {c}).expand(262144, -1)[{v}.size(0)]"),
    "constant_literal": returned(_LITERAL),
    "constant_literal_written": returned(_LITERAL + "{n}.mul_(2.0); {n} = {n} + 1.0;"),
    # A float32 tensor that is no buffer, so that no cast reaches it.
    "constant_plain": lambda machine: machine.write(
        "{v} + F.linear(self.{m}, self.{m})", members="self.{m} = torch.full(({last},), 0.5)"
    ),
    "constant_random": held("F.dropout({c}, 0.5, True)"),
    "constant_double": returned(
        "{n} = self.{m}.double() / 3.0 * 2.0;", "self.{m} = nn.Parameter(torch.zeros({last}))"
    ),
    "constant_returned": returned(
        "{n} = self.{m}.relu(); {v} + {n}", "self.{m} = nn.Parameter(torch.zeros({last}))"
    ),
}

_WRITTEN_PART = "{n} = self.{m}({v}); {n}[0].mul_(2.0); {n}[1].add_(1.0); {v} + {n}[0] * {n}[1]"
CLASSES: dict[str, Word] = {
    # The model's forward tells arguments given by keyword from others.
    "decorated": lambda machine: setattr(machine, "decorator", "    @doubled_by_keyword\n"),
    "draw_normal": "{v} + torch.normal(0.0, 1.0, ())",
    "linear_keyed": layer("Keyed({last}, {last})"),
    "linear_keyed_kw": layer("Keyed({last}, {last})", KEYWORD),
    "linear_held": layer("Held({last}, {last})"),
    "py_hides_written": layer("Py_hides()", _WRITTEN_PART),
    "unknown_py_hides_written": layer("Unknown_Py_hides()", _WRITTEN_PART),
    **{name.lower(): layer(f"{name}()") for name in KEPT | PYTHON if "hides" not in name},
    "linear_grandchild": layer("Grandparent({last}, {last})"),
    "linear_single": single("nn.Module.register_buffer", "self.{m}(({v} > 0).float())"),
    "linear_plain": single("setattr", "self.{m}(({v} > 0).float()).relu()"),
    "numpy_scale": "{v} * np.float64(0.5)",
    "numpy_shift": "{v} + np.float32(2.0)",
    "zero_over_zero": "{v} + (({v} - {v}) / ({v} - {v})).nan_to_num(0.0)",
    "blank_deviation": by_rank(
        (2, 3, 4, 5), "{n} = {v} - {v}; {n} / {n}.std(-1, keepdim=True, correction=0)"
    ),
    "log_negative": "({v}.abs() + 1.0).log() + ({v}.clamp(-1.0, 0.0) - 1.0).log()",
    "branches": by_rank((3, 4, 5), branches),
    "residuals": residuals,
    "attention_alone": layer(
        "nn.MultiheadAttention({last}, 1, batch_first=True)",
        "{n}, w = self.{m}({v}, {v}, {v}, need_weights=False); {n} if w is None else {v}",
    ),
    "report": lambda machine: machine.write(
        "self.report_1(self.report({v}))",
        members="self.report = nn.LeakyReLU(0.5); self.report_1 = nn.LeakyReLU(0.25)",
    ),
}
