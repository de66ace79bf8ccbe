"""Tokens that are near misses of a rewrite: seldom written, and wrong if they are mistaken."""

from __future__ import annotations

from math import prod

from optimizer.testing._convolutions import conv
from optimizer.testing._elementwise import binary, expression, member, statement
from optimizer.testing._layers import LAYERS, constant, linear
from optimizer.testing._machine import Emit, Machine, Shape, Value, fits, ranked
from optimizer.testing._norms import batchnorm

MATRIX_PRODUCT = "{v} @ self.{m}.weight + self.{m}.bias"


def written(emit: Emit, text: str, *, later: bool = False) -> Emit:
    """What `emit` does, and before or after it the forward writes a tensor of the new layer."""

    def emit_written(machine: Machine) -> None:
        layers, before = len(machine.layers), len(machine.statements)
        emit(machine)
        if len(machine.layers) > layers:
            place = len(machine.statements) if later else before
            machine.statements.insert(place, text.replace("{m}", machine.layers[-1].name))

    return emit_written


def of_matrix(spelling: str) -> Emit:
    """A Linear that is spelled so where its input is a matrix; an ordinary one elsewhere."""

    def emit(machine: Machine) -> None:
        is_matrix = len(machine.top.shape) == 2
        (linear(spelling=spelling) if is_matrix else linear())(machine)

    return emit


def widen(machine: Machine) -> None:
    """Four numbers in the place of the first one of each row."""
    shape: Shape = (*machine.top.shape[:-1], 4)
    if not fits(shape) or not machine.top.shape[-1]:
        return
    if machine.top.shape[-1] != 1:
        machine.replace("{v}[..., :1]", (*machine.top.shape[:-1], 1))

    def result(other: Shape) -> Shape | None:
        return (*other[:-1], 4) if other[-1] == 1 else None

    machine.helpers.add("Constant")
    layer = machine.add("constant", "Constant(4)", result, ("constant", (4,)))
    machine.call(layer, "{v} * self.{m}.weight")


def addmm_other(*size: int) -> Emit:
    """A product of matrices to which the model adds what is no bias: that many numbers."""

    def emit(machine: Machine) -> None:
        if len(machine.top.shape) == 2:
            shape = tuple(each or machine.top.shape[-1] for each in size)
            machine.helpers.add("Constant")
            held = machine.add("constant", f"Constant{shape}", lambda shape: None)
            added = f"torch.addmm(self.{held.name}.weight, {{v}}, self.{{m}}.weight.t())"
            linear(spelling=added)(machine)

    return emit


def scale_integers(machine: Machine) -> None:
    """The top times an integer for each channel."""
    channels, name = machine.top.shape[1], f"integers{len(machine.members)}"
    sizes = ", ".join(["-1", *["1"] * (len(machine.top.shape) - 2)])
    held = f"torch.arange(1, {channels + 1}).reshape({sizes})"
    machine.members.append(f"self.register_buffer({name!r}, {held})")
    machine.replace(f"{{v}} * self.{name}")


def rows(machine: Machine) -> None:
    shape = machine.top.shape
    machine.replace("{v}.flatten(0, -2)", (prod(shape[:-1]), shape[-1]))


def softmax(dimension: int) -> Emit:
    return expression(f"torch.softmax({{v}}, dim={dimension})")


def typed(made: str, *deeds: str) -> Emit:
    """Return `made`, which is `{n}` in the deeds that follow, beside the top."""

    def emit(machine: Machine) -> None:
        name = f"typed{len(machine.statements)}"
        for each in (f"{{n}} = {made}", *deeds):
            machine.do(each.replace("{n}", name))
        machine.outputs.append(Value(name, machine.top.shape))

    return emit


def of_two_ranks(machine: Machine) -> None:
    if len(machine.top.shape) == 3 and len({*machine.top.shape}) == 1:
        machine.replace("({v}.transpose(0, 1) + {v}[0].transpose(0, 1)).transpose(0, 1)")


# What is made of floating point numbers in another dtype, and done there: it rounds nothing.
_KINDS = {
    "integer": "({v} > 0) * 3 - 1",
    "truth": "{v} > 0",
    "imaginary": "{v} * (1 + 2j)",
    "single": "({v} > 0).float()",
}
_DEEDS: dict[str, tuple[str, ...]] = {
    "promoted": ("{n} = {n} * 1.5 + 1",),
    "both": ("{n} = torch.stack([{n} * 1, {n} * 1.0])[0]",),
    "masked": ("{n}[{v} > 0] = 1.5",),
    "turned": ("{n} = ({n}.transpose(0, -1) * 2).transpose(0, -1)",),
    "copied": ("{n}_copy = {n}.clone()", "{n}.fill_(1)", "{n} = {n}_copy"),
    "gated": ("{n} = {n} * torch.sigmoid({n})",),
    "flat": ("{n} = ({n}.flatten() * 2).reshape({v}.shape)", "{n} += 1"),
}

RARE: dict[str, Emit] = {
    **{f"{k}_{d}": typed(_KINDS[k], *_DEEDS[d]) for k in _KINDS for d in _DEEDS},
    "lower": expression("{v} - 1.0"),
    "quarter": expression("{v} / 4.0"),
    # Clamped, since layers that read infinities cannot be merged: they do not distribute.
    "reciprocal": expression("(1.0 / {v}).clamp(-9, 9)"),
    "over_zero": expression("({v} / 0.0).nan_to_num(1.0, 9.0, -9.0)"),
    "over_minus_zero": expression("({v} / -0.0).nan_to_num(1.0, 9.0, -9.0)"),
    # Pairs that differ in one argument, of which a pass may take one for the other.
    "slice_twos": expression("{v} + {v}[..., 0:4:2].sum()"),
    "slice_threes": expression("{v} + {v}[..., 0:4:3].sum()"),
    "slice_one": expression("{v} + {v}[..., 0:1].sum()"),
    "slice_two": expression("{v} + {v}[..., 0:2].sum()"),
    "slice_second": expression("{v} + {v}[..., 1:2].sum()"),
    "at_least_half": expression("{v}.clamp(min=0.5)"),
    "at_most_half": expression("{v}.clamp(max=0.5)"),
    "sum_first": ranked(1, expression("{v} + {v}.sum(dim=0, keepdim=True)")),
    "sum_last": ranked(1, expression("{v} + {v}.sum(dim=-1, keepdim=True)")),
    "add_alpha3": binary("torch.add({w}, {v}, alpha=3)"),
    "clamp_other": expression("torch.clamp({v} + 3.0, 0, 5) / 6.0"),
    "gate_other": expression("{v} * torch.sigmoid({v} * 0.5)"),
    "hardswish_minus": expression("{v} * F.relu6({v} - 3) / 6"),
    "gelu_tanh_square": expression(
        "{v} * 0.5 * (1 + torch.tanh((2 / 3.141592653589793) ** 0.5 * ({v} + 0.044715 * {v} ** 2)))"
    ),
    "softmax_first": softmax(0),
    "softmax_last": softmax(-1),
    "leaky_half_module": member("leaky", "nn.LeakyReLU(0.5)"),
    "leaky_negative": expression("F.leaky_relu({v}, -0.5)"),
    "gelu_tanh_module": member("gelu", 'nn.GELU(approximate="tanh")'),
    "rows": ranked(2, rows),
    "widen": widen,
    "t01_of_two_ranks": of_two_ranks,
    "T_of_row_and_column": ranked(2, expression("({v}[..., :1, :].mT + {v}[..., :1].mT).mT")),
    "t01_of_one_row": ranked(
        2, expression("torch.relu({v}[:1].expand({v}.shape).transpose(0, 1)).transpose(0, 1)")
    ),
    "conv_written": written(conv(), "self.{m}.weight.mul_(2.0)"),
    "conv_written_later": written(conv(), "self.{m}.weight.mul_(2.0)", later=True),
    "bn_written": written(batchnorm(), "self.{m}.running_mean.add_(1.0)"),
    "scale_written": written(LAYERS["scale_last"], "self.{m}.weight.mul_(2.0)"),
    "matmul_vector": constant("({v} @ {c}).unsqueeze(-1) + {v}", "last"),
    "scale_integers": ranked(2, scale_integers),
    "matmul_square": linear(spelling=MATRIX_PRODUCT),
    "matmul_written": written(linear(spelling=MATRIX_PRODUCT), "self.{m}.weight.mul_(2.0)"),
    "addmm_scaled": of_matrix(
        "torch.addmm(self.{m}.bias, {v}, self.{m}.weight.t(), alpha=2.0, beta=0.5)"
    ),
    "addmm_number": addmm_other(1),
    "addmm_row": addmm_other(1, 0),
    "bn_F_train_bare": batchnorm(
        spelling="F.batch_norm({v}, self.{m}.running_mean, self.{m}.running_var, training=True)",
        training=True,
    ),
    "bn_F_by_size": batchnorm(
        spelling="F.batch_norm({v}, self.{m}.running_mean, self.{m}.running_var,"
        " training={v}.shape[0] > 4)",
        training=True,
    ),
    "mask_accumulate": statement(
        "{v}.index_put_(({v} > 0,), torch.ones((), dtype={v}.dtype), accumulate=True)"
    ),
    "identity_number": member("identity", "nn.Identity()", spelling="{v} * self.{m}(2.0)"),
    "swish_integers": expression("{v} + {n} * torch.sigmoid({n})", "{n} = ({v} > 0) * 2"),
    "hardswish_expanded": ranked(
        3,
        expression(
            "{v} + ({n} * F.hardsigmoid({n})).sum()",
            "{n} = {v}[..., :1].expand({v}.shape).transpose(0, -1)[..., :1]",
        ),
    ),
    "two_devices": expression("{v} + torch.empty({v}.dim(), device='meta').dim()"),
    "mask_two": statement("{v}[({v} > 0) & ({v} < 2)] *= 2.0"),
    "count_chosen": expression("{v} + {v}[{v} > 0].shape[0]"),
    # Of x as it is given, and true of one infinity in each row: no example is rejected.
    "assert_finite": lambda machine: machine.statements.insert(
        0, 'torch._assert((x >= 1e30).sum() <= x.shape[0], "too large")'
    ),
}
