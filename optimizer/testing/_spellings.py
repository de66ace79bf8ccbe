"""Tokens for what passes name and the other families do not spell.

`tests/test_named_operations.py` finds what is missing here.
"""

from __future__ import annotations

from math import prod

from optimizer.testing._elementwise import binary, broadcast, expression, member, statement
from optimizer.testing._layers import linear
from optimizer.testing._machine import MAX_DEGREE, Emit, Machine, Shape, fits, ranked
from optimizer.testing._shapes import joined, reshaped
from optimizer.testing._views import gathered, matrix_only, permutation


def square(text: str) -> Emit:
    """`text`, which squares the top."""

    def emit(machine: Machine) -> None:
        if 2 * machine.top.degree <= MAX_DEGREE:
            machine.replace(text, degree=2 * machine.top.degree)

    return emit


def of_ranks(ranks: tuple[int, ...], emit: Emit, other: Emit) -> Emit:
    """`emit` where the top has as many dimensions as one of `ranks`, else `other`."""

    def chosen(machine: Machine) -> None:
        (emit if len(machine.top.shape) in ranks else other)(machine)

    return chosen


def padding(text: str, *, smallest: int = 0) -> Emit:
    """One more on both sides of the last dimensions, `{d}` of them: all but the first two.

    In `text`, `{sizes}` is a tuple of ones for all sides. Nothing where a size is below `smallest`.
    """

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        dimensions = max(1, len(shape) - 2)
        target = (*shape[:-dimensions], *(size + 2 for size in shape[-dimensions:]))
        if len(shape) < 2 or not fits(target) or min(shape) < smallest:
            return
        filled = text.replace("{d}", str(dimensions)).replace("{sizes}", str((1, 1) * dimensions))
        if not filled.startswith("nn."):
            machine.replace(filled, target)
            return

        def result(other: Shape) -> Shape | None:
            return target if other == shape else None

        machine.call(machine.add("pad", filled, result))

    return emit


def flattened(machine: Machine) -> None:
    shape = machine.top.shape

    def result(other: Shape) -> Shape | None:
        return (other[0], prod(other[1:])) if other == shape else None

    machine.call(machine.add("flatten", "nn.Flatten()", result))


def _swapped(rank: int) -> list[int]:
    return [1, 0, *range(2, rank)]


def _ends(rank: int) -> list[int]:
    return [rank - 1, *range(1, rank - 1), 0]


def _cycled(rank: int) -> list[int]:
    return [*range(1, rank), 0]


def _scores(shape: Shape) -> Shape:
    return (*shape[:-1], shape[-2])


DROPOUT = member("dropout", "nn.Dropout(0.5)")
MATMUL = ranked(2, joined("{w} @ {v}.mT", _scores, product=True))
SUMMANDS = (
    "torch.full((), 0.5)", "torch.eye(2).sum()", "torch.linspace(0, 1, 3).sum()",
    "torch.logspace(0, 1, 2, 2.0).sum()", "torch.as_tensor(0.5)", "torch.asarray(0.25)",
    "torch.scalar_tensor(0.5)", "torch.tril_indices(2, 2).sum()", "torch.triu_indices(2, 2).sum()",
    "torch.empty_strided((2,), (1,)).fill_(0.5).sum()",
)  # fmt: skip
DRAWS = (
    "torch.rand(())", "torch.randn(())", "torch.randint(0, 3, ())", "torch.randperm(3)[0]",
)  # fmt: skip
NUMBERS = (
    "{v}.ndim", "{v}.ndimension()", "{v}.nelement() * 0", "{v}.element_size() * 0",
    "{v}.storage_offset() * 0", "{v}.stride()[0] * 0", "{v}.get_device()", "{v}.is_complex()",
    "{v}.is_floating_point()", "{v}.is_same_size({v})",
)  # fmt: skip

MORE_ARITHMETIC: dict[str, Emit] = {
    "pow_method": square("{v}.pow(2)"),
    "pow_torch": square("torch.pow({v}, 2)"),
    "sub_torch": binary("torch.sub({w}, {v})"),
    "div_method": expression("{v}.div(4)"),
    "where_method": expression("{v}.where({v} > 0, 0.5)"),
    "where_numbers": expression("{v} * torch.where({v} > 0, 1.0, 0.0)"),
    "where_below": binary("torch.where({w} > 0, {w}, {v}.type_as({w}))"),
    "exp": expression("torch.exp({v}.clamp(max=2.0))"),
    "exp_method": expression("{v}.clamp(max=2.0).exp()"),
    "isub_method": statement("{v}.sub_(0.5)"),
    "iand": expression(
        "{v} * {n}", "{n} = {v} > 0", "{n} &= {v} < 9", "{n} |= {v} > 3", "{n} ^= {v} < -9"
    ),
    "ishift_left": expression(
        "{v} * {n}",
        "{n} = ({v} > 0) * 6", "{n} <<= 1", "{n} >>= 2", "{n} //= 2", "{n} %= 3", "{n} **= 2",
    ),
    "imatmul": ranked(2, expression("{v} + {n}.tanh()", "{n} = {v} @ {v}.mT", "{n} @= {v}")),
    "new_tensors": expression("{v} + (" + " + ".join(SUMMANDS) + ")"),
    "draws": expression("{v} + (" + " + ".join(DRAWS) + ")"),
    "metadata": expression("{v} + (" + " + ".join(NUMBERS) + ")"),
    "device": expression("{v} + torch.zeros((), device={v}.device)"),
    "contiguity": expression("{v} * (1.0 + {v}.is_contiguous())"),
    "item": expression("{v} + ({v}.sum() * 0).nan_to_num(0.0).item()"),
}  # fmt: skip

MORE_ACTIVATIONS: dict[str, Emit] = {
    "sigmoid_module": member("sigmoid", "nn.Sigmoid()"),
    "sigmoid_F": expression("F.sigmoid({v})"),
    "sigmoid_inplace": expression("{v}.sigmoid_()"),
    "tanh_module": member("tanh", "nn.Tanh()"),
    "tanh_F": expression("F.tanh({v})"),
    "tanh_inplace": expression("{v}.tanh_()"),
    "erf": expression("{v}.erf()"),
    "erf_inplace": expression("{v}.erf_()"),
    "mish_module": member("mish", "nn.Mish()"),
    "hardsigmoid_module": member("hardsigmoid", "nn.Hardsigmoid()"),
    "hardswish_F": expression("F.hardswish({v})"),
    "hardtanh_F": expression("F.hardtanh({v}, -2.0, 1.0)"),
    "softplus_F": expression("F.softplus({v}, beta=2.0)"),
    "elu_F": expression("F.elu({v}, 0.5)"),
}

MORE_IDENTITIES: dict[str, Emit] = {
    "dropout1d": of_ranks((2, 3), member("dropout", "nn.Dropout1d(0.5)"), DROPOUT),
    "dropout2d": of_ranks((4,), member("dropout", "nn.Dropout2d(0.5)"), DROPOUT),
    "dropout3d": of_ranks((4, 5), member("dropout", "nn.Dropout3d(0.5)"), DROPOUT),
    "dropout1d_F": of_ranks((2, 3), expression("F.dropout1d({v}, 0.5, False)"), DROPOUT),
    "dropout2d_F": of_ranks((4,), expression("F.dropout2d({v}, 0.5, False)"), DROPOUT),
    "dropout3d_F": of_ranks((4, 5), expression("F.dropout3d({v}, 0.5, False)"), DROPOUT),
    "dropout_alpha_F": expression("F.alpha_dropout({v}, 0.5, False)"),
    "dropout_alpha_torch": expression("torch.alpha_dropout({v}, 0.5, False)"),
    "dropout_feature_F": expression("F.feature_alpha_dropout({v}, 0.5, False)"),
    "dropout_feature_torch": expression("torch.feature_alpha_dropout({v}, 0.5, False)"),
    "clone_torch": expression("torch.clone({v})"),
    "cpu": expression("{v}.cpu()"),
    "casts": expression("{v} * ({v} > 0).float().half().bfloat16().int().long().short().bool()"),
    "type": expression("{v} * ({v} > 0).type({v}.dtype)"),
    "resize_inplace": expression("{v}.clone().resize_({v}.shape)"),
    "resize_as_inplace": expression("{v}.clone().resize_as_({v})"),
    "set_inplace": expression("torch.empty_like({v}).set_({v}.clone())"),
    "as_strided": expression("{n}.as_strided({n}.shape, {n}.stride())", "{n} = {v}.contiguous()"),
    "as_strided_inplace": expression(
        "{n}.as_strided_({n}.shape, {n}.stride())", "{n} = {v}.contiguous().clone()"
    ),
    "unfold": broadcast("{v}.unfold(-1, 1, 1).squeeze(-1)"),
    "reshape_as": binary("{w}.reshape_as({v})"),
    "view_as": binary("{w}.contiguous().view_as({v})"),
    "expand_as": broadcast("{v}[:1].expand_as({v}) + {v}"),
    "shape_as": binary("{w} + {w}.new_ones({v}.shape) * {v}.dim()"),
    "broadcast_to": broadcast("{v}[:1].broadcast_to({v}.shape) + {v}"),
}

MORE_SHAPES: dict[str, Emit] = {
    "flatten_method": reshaped("{v}.flatten()", lambda shape: (prod(shape),)),
    "flatten_last": ranked(
        2, reshaped("{v}.flatten(-2)", lambda shape: (*shape[:-2], prod(shape[-2:])))
    ),
    "ravel": reshaped("{v}.ravel()", lambda shape: (prod(shape),)),
    "flatten_nn": ranked(2, flattened),
    "squeeze_inplace": expression("{v}.clone().unsqueeze_(0).squeeze_(0)"),
    "pad_module": padding("nn.ZeroPad{d}d(1)"),
    "pad_constant_module": padding("nn.ConstantPad{d}d(1, 0.0)"),
    "pad_ones_module": padding("nn.ConstantPad{d}d(1, 1.0)"),
    "pad_reflect": padding("F.pad({v}, {sizes}, mode='reflect')", smallest=2),
    "pad_replicate": padding("F.pad({v}, {sizes}, mode='replicate')", smallest=1),
    "pad_circular": padding("F.pad({v}, {sizes}, mode='circular')", smallest=1),
}

MORE_VIEWS: dict[str, Emit] = {
    "moveaxis_method": permutation("{v}.moveaxis(0, -1)", _cycled),
    "swapdims_method": permutation("{v}.swapdims(0, -1)", _ends),
    "swapaxes_torch": permutation("torch.swapaxes({v}, 0, 1)", _swapped),
    "transpose_inplace": permutation("{v}.clone().transpose_(0, 1)", _swapped),
    "swapaxes_inplace": permutation("{v}.clone().swapaxes_(0, 1)", _swapped),
    "swapdims_inplace": permutation("{v}.clone().swapdims_(0, -1)", _ends),
    "t_inplace": matrix_only("{v}.clone().t_()"),
}

MORE_JOINS: dict[str, Emit] = {
    "matmul_method": ranked(2, joined("{w}.matmul({v}.mT)", _scores, product=True)),
    "mm": of_ranks((2,), joined("torch.mm({w}, {v}.t())", _scores, product=True), MATMUL),
    "mm_method": of_ranks((2,), joined("{w}.mm({v}.t())", _scores, product=True), MATMUL),
    "bmm": of_ranks((3,), joined("torch.bmm({w}, {v}.mT)", _scores, product=True), MATMUL),
    "baddbmm": of_ranks(
        (3,), joined("torch.baddbmm({w} @ {v}.mT, {w}, {v}.mT)", _scores, product=True), MATMUL
    ),
}

MORE_LAYERS: dict[str, Emit] = {
    "linear_mm": linear(spelling="torch.mm({v}, self.{m}.weight.t()) + self.{m}.bias", rank=2),
    "linear_mm_method": linear(spelling="{v}.mm(self.{m}.weight.t()) + self.{m}.bias", rank=2),
    "linear_matmul_method": linear(spelling="{v}.matmul(self.{m}.weight.t()) + self.{m}.bias"),
    "linear_addmm_method": linear(spelling="self.{m}.bias.addmm({v}, self.{m}.weight.t())", rank=2),
}

MORE_ASSIGNMENTS: dict[str, Emit] = {
    "mask_gather_moved": gathered("{n}.copy_({n}.flip(0)); "),
    "mask_one_product": broadcast(
        "{v} + {n}",
        "{n} = ({v} > 0) * 2",
        "{n}_first = torch.arange({v}.numel()).reshape({v}.shape) < 1",
        "{n}[{n}_first] = {n}[{n}_first] * 1.5",
    ),
    "mask_put_torch": broadcast("{v} + 0.0", "torch.index_put_({v}, ({v} > 0,), {v}.sum())"),
}
