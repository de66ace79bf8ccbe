"""Tokens that call a layer: Linear, Conv, BatchNorm, constants, in every spelling."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeAlias

from optimizer.testing._machine import Machine, Shape, fits

Emit: TypeAlias = Callable[[Machine], None]

MODULE = "self.{m}({v})"
KEYWORD = "self.{m}(input={v})"
# 0.5 and the like keep var + eps = 4 ** k exact; the last one is near torch's default.
HALF, EIGHTH, SMALL, TINY = 0.5, 0.125, 2.0**-10, 2.0**-17


def linear(
    width: int | None = None,
    *,
    bias: bool = True,
    spelling: str = MODULE,
    cls: str = "nn.Linear",
) -> Emit:
    """A Linear over the last dimension, `width` wide (as wide as its input if None)."""

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        features, out = shape[-1], width or shape[-1]
        if not features or not fits((*shape[:-1], out)):
            return

        def result(shape: Shape) -> Shape | None:
            return (*shape[:-1], out) if shape[-1] == features else None

        extra = "" if bias else ", bias=False"
        machine.helpers.add(cls)
        kind = "linear" if bias else "bare"
        constructor = f"{cls}({features}, {out}{extra})"
        layer = machine.add(kind, constructor, result, ("linear", (out, features)))
        machine.call(layer, spelling)

    return emit


def conv(
    kernel: int = 1,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    grouped: bool = False,
    width: int | None = None,
    bias: bool = True,
    functional: bool = False,
    spelling: str = MODULE,
) -> Emit:
    """A Conv of the dimension that the top's rank asks for; a Linear where there is none."""

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        channels, rank = shape[1], len(shape)
        if rank < 3:
            return linear(width, bias=bias)(machine)
        if not prod(shape[1:]):
            return None
        groups = (2 if channels % 2 == 0 else channels) if grouped else 1
        out = channels if grouped else (width or channels)
        window = dilation * (kernel - 1) + 1

        def result(shape: Shape) -> Shape | None:
            if len(shape) != rank or shape[1] != channels:
                return None
            space = tuple((n + 2 * padding - window) // stride + 1 for n in shape[2:])
            return (shape[0], out, *space) if min(space) > 0 else None

        given = {
            "stride": (stride, 1),
            "padding": (padding, 0),
            "dilation": (dilation, 1),
            "groups": (groups, 1),
            "bias": (bias, True),
        }
        extra = "".join(f", {k}={v}" for k, (v, default) in given.items() if v != default)
        if (target := result(shape)) is None or not fits(target):
            return None
        weight = (out, channels // groups, *[kernel] * (rank - 2))
        constructor = f"nn.Conv{rank - 2}d({channels}, {out}, {kernel}{extra})"
        layer = machine.add("conv", constructor, result, ("conv", weight))
        plain = extra.replace(", bias=False", "")
        call = f"F.conv{rank - 2}d({{v}}, self.{{m}}.weight, self.{{m}}.bias{plain})"
        machine.call(layer, call if functional else spelling)
        return None

    return emit


def conv_transpose(kernel: int = 1, *, grouped: bool = False) -> Emit:
    """A ConvTranspose, which makes an odd number of channels of an even one."""

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        channels, rank = shape[1], len(shape)
        if rank < 3 or not prod(shape[1:]):
            return
        groups = 2 if grouped and channels % 2 == 0 else 1
        out = channels if groups > 1 else channels + 1

        def result(shape: Shape) -> Shape | None:
            fitting = len(shape) == rank and shape[1] == channels
            return (shape[0], out, *[n + kernel - 1 for n in shape[2:]]) if fitting else None

        if not fits(result(shape) or ()):
            return
        constructor = f"nn.ConvTranspose{rank - 2}d({channels}, {out}, {kernel}, groups={groups})"
        weight = (channels, out // groups, *[kernel] * (rank - 2))
        machine.call(machine.add("conv", constructor, result, ("transposed", weight)))

    return emit


def constant(spelling: str, where: str = "channels") -> Emit:
    """The top combined with a tensor of the model, which has one number for each channel.

    `where` is "channels" for dimension 1, "last" for the last dimension, and "everywhere" for a
    number for each position.
    """

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        channels = (shape[1], *[1] * (len(shape) - 2))
        size = {"channels": channels, "last": shape[-1:]}.get(where, shape[1:])

        def result(other: Shape) -> Shape | None:
            return other if other[1:] == shape[1:] else None

        machine.helpers.add("Constant")
        layer = machine.add("constant", f"Constant{size}", result, ("constant", size))
        machine.call(layer, spelling.replace("{c}", "self.{m}.weight"))

    return emit


def batchnorm(
    eps: float = HALF,
    *,
    affine: bool = True,
    tracked: bool = True,
    training: bool = False,
    functional: bool = False,
    spelling: str = MODULE,
) -> Emit:
    """A BatchNorm over dimension 1, of the dimension that the top's rank asks for."""

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        channels, rank = shape[1], len(shape)

        def result(shape: Shape) -> Shape | None:
            if shape[1] != channels or max(1, len(shape) - 2) != max(1, rank - 2):
                return None
            # torch refuses batch statistics of a single value per channel.
            from_batch = training or not tracked
            return None if from_batch and prod(shape) <= channels else shape

        if not channels or result(shape) is None:
            return
        given = {"affine": affine, "track_running_stats": tracked}
        extra = "".join(f", {k}=False" for k, v in given.items() if not v)
        constructor = f"nn.BatchNorm{max(1, rank - 2)}d({channels}, eps={eps!r}{extra})"
        weight = ("batchnorm", (channels,)) if affine else None
        layer = machine.add("bn", constructor, result, weight)
        if training:
            machine.finishing.append(f"self.{layer.name}.train()")
        arguments = ("running_mean", "running_var", "weight", "bias")
        listed = ", ".join(f"self.{{m}}.{a}" for a in arguments)
        call = f"F.batch_norm({{v}}, {listed}, eps={eps!r})"
        machine.call(layer, call if functional else spelling)

    return emit


def block(machine: Machine) -> None:
    """A Sequential of layer, BatchNorm and ReLU, which `again` calls as a whole."""
    shape = machine.top.shape
    channels, rank = shape[1], len(shape)
    if not prod(shape[1:]):
        return

    def result(shape: Shape) -> Shape | None:
        suits = len(shape) == rank and shape[1] == channels and prod(shape[1:]) > 0
        return shape if suits else None

    size = max(1, rank - 2)
    first = f"nn.Linear({channels}, {channels})"
    if rank > 2:
        first = f"nn.Conv{size}d({channels}, {channels}, 1)"
    rest = f"nn.BatchNorm{size}d({channels}, eps={HALF}), nn.ReLU()"
    machine.call(machine.add("block", f"nn.Sequential({first}, {rest})", result))


LAYERS: dict[str, Emit] = {
    "linear": linear(),
    "bn": batchnorm(),
    "conv": conv(),
    "linear1": linear(1),
    "linear4": linear(4),
    "linear_nobias": linear(bias=False),
    "linear_kw": linear(spelling=KEYWORD),
    "linear_F": linear(spelling="F.linear({v}, self.{m}.weight, self.{m}.bias)"),
    "linear_F_kw": linear(
        spelling="F.linear(input={v}, bias=self.{m}.bias, weight=self.{m}.weight)"
    ),
    "linear_matmul": linear(spelling="{v} @ self.{m}.weight.t() + self.{m}.bias"),
    "linear_subclass": linear(cls="Doubled"),
    "conv4": conv(width=4),
    "conv_nobias": conv(bias=False),
    "conv_k3": conv(3, padding=1),
    "conv_valid": conv(2),
    "conv_stride": conv(2, stride=2),
    "conv_dilated": conv(2, dilation=2, padding=1),
    "conv_groups": conv(grouped=True),
    "conv_groups_k3": conv(3, padding=1, grouped=True, bias=False),
    "conv_kw": conv(spelling=KEYWORD),
    "conv_F": conv(3, padding=1, functional=True),
    "conv_F_groups": conv(grouped=True, functional=True),
    "conv_t": conv_transpose(2),
    "conv_t_groups": conv_transpose(grouped=True),
    "scale": constant("self.{m}({v})"),
    "scale_last": constant("{v}.mul({c})", "last"),
    "scale_everywhere": constant("{v} * {c}", "everywhere"),
    "offset": constant("{c} - {v}"),
    "bn_eighth": batchnorm(EIGHTH),
    "bn_small": batchnorm(SMALL),
    "bn_tiny": batchnorm(TINY),
    "bn_one": batchnorm(1.0),
    "bn_plain": batchnorm(EIGHTH, affine=False),
    "bn_nostats": batchnorm(tracked=False),
    "bn_train": batchnorm(training=True),
    "bn_kw": batchnorm(EIGHTH, spelling=KEYWORD),
    "bn_F": batchnorm(EIGHTH, functional=True),
    "bn_F_plain": batchnorm(affine=False, functional=True),
    "block": block,
}
