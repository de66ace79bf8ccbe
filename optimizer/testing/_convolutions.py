"""Tokens that call a convolution, plain or transposed, of the dimension that the rank asks for."""

from __future__ import annotations

from functools import partial
from math import prod

from optimizer.testing._layers import linear
from optimizer.testing._machine import KEYWORD, MODULE, Emit, Machine, Shape, fits


def conv(
    kernel: int = 1,
    *,
    stride: int = 1,
    padding: int | str = 0,
    dilation: int = 1,
    grouped: bool = False,
    depthwise: bool = False,
    width: int | None = None,
    bias: bool = True,
    mode: str = "zeros",
    batched: bool = True,
    uneven: bool = False,
    functional: bool = False,
    spelling: str = MODULE,
) -> Emit:
    """A Conv; a Linear where there is no dimension to slide along.

    What is uneven has its kernel, steps and padding along the last dimension alone.
    `width` is the number of channels that come out, as many as go in if None. What is grouped has
    two groups, or one for each channel of an odd number; what is depthwise makes two of each.
    """

    def emit(machine: Machine) -> None:
        shape, axis = machine.top.shape, int(batched)
        rank, dimensions = len(shape), len(shape) - axis - 1
        if dimensions < 1:
            return linear(width, bias=bias)(machine)
        if dimensions > 3 or not prod(shape[axis:]):
            return None
        channels = shape[axis]
        out = 2 * channels if depthwise else width or channels
        groups = 2 if grouped and channels % 2 == 0 else channels if grouped or depthwise else 1
        each = partial(_along, uneven, dimensions)
        window, pad = dilation * (kernel - 1) + 1, 0 if isinstance(padding, str) else padding

        def result(shape: Shape) -> Shape | None:
            if len(shape) != rank or shape[axis] != channels:
                return None
            if padding == "same":
                return (*shape[:axis], out, *shape[axis + 1 :])
            slid = [(n + 2 * pad - window) // stride + 1 for n in shape[axis + 1 :]]
            space = (*shape[axis + 1 : -1], slid[-1]) if uneven else tuple(slid)
            # What is padded with its own values must have enough of them.
            enough = mode == "zeros" or min(shape[axis + 1 :]) > pad
            return (*shape[:axis], out, *space) if enough and min(space) > 0 else None

        given = {
            "stride": (each(stride, 1), 1),
            "padding": (each(padding, 0), 0),
            "dilation": (each(dilation, 1), 1),
            "groups": (groups, 1),
            "bias": (bias, True),
            "padding_mode": (mode, "zeros"),
        }
        extra = "".join(f", {k}={v!r}" for k, (v, default) in given.items() if v != default)
        if (target := result(shape)) is None or not fits(target):
            return None
        weight = (out, channels // groups, *[1 if uneven else kernel] * (dimensions - 1), kernel)
        constructor = f"nn.Conv{dimensions}d({channels}, {out}, {each(kernel, 1)}{extra})"
        layer = machine.add("conv", constructor, result, ("conv", weight))
        plain = extra.replace(", bias=False", "")
        call = f"F.conv{dimensions}d({{v}}, self.{{m}}.weight, self.{{m}}.bias{plain})"
        machine.call(layer, call if functional else spelling)
        return None

    return emit


def _along(uneven: bool, dimensions: int, last: int | str, others: int) -> object:
    return (*[others] * (dimensions - 1), last) if uneven else last


def conv_transpose(
    kernel: int = 1,
    *,
    stride: int = 1,
    padding: int = 0,
    output_padding: int = 0,
    dilation: int = 1,
    grouped: bool = False,
    bias: bool = True,
    functional: bool = False,
) -> Emit:
    """A ConvTranspose, which makes an odd number of channels of an even one."""

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        rank = len(shape)
        if rank < 3 or not prod(shape[1:]):
            return
        channels = shape[1]
        groups = 2 if grouped and channels % 2 == 0 else 1
        out = channels if groups > 1 else channels + 1
        reach = dilation * (kernel - 1) + output_padding + 1 - 2 * padding

        def result(shape: Shape) -> Shape | None:
            space = [(n - 1) * stride + reach for n in shape[2:]]
            fitting = len(shape) == rank and shape[1] == channels and min(space) > 0
            return (shape[0], out, *space) if fitting else None

        if (target := result(shape)) is None or not fits(target):
            return
        given = {
            "stride": (stride, 1),
            "padding": (padding, 0),
            "output_padding": (output_padding, 0),
            "groups": (groups, 0),
            "bias": (bias, True),
            "dilation": (dilation, 1),
        }
        extra = "".join(f", {k}={v}" for k, (v, default) in given.items() if v != default)
        constructor = f"nn.ConvTranspose{rank - 2}d({channels}, {out}, {kernel}{extra})"
        weight = (channels, out // groups, *[kernel] * (rank - 2))
        layer = machine.add("conv", constructor, result, ("transposed", weight))
        plain = extra.replace(", bias=False", "")
        call = f"F.conv_transpose{rank - 2}d({{v}}, self.{{m}}.weight, self.{{m}}.bias{plain})"
        machine.call(layer, call if functional else MODULE)

    return emit


CONVOLUTIONS: dict[str, Emit] = {
    "conv": conv(),
    "conv4": conv(width=4),
    "conv_nobias": conv(bias=False),
    "conv_k3": conv(3, padding=1),
    "conv_valid": conv(2),
    "conv_stride": conv(2, stride=2),
    "conv_pointwise_stride": conv(stride=2),
    "conv_pointwise_padded": conv(padding=1),
    "conv_pointwise_unbatched": conv(batched=False),
    "conv_k3_stride": conv(3, padding=1, stride=2),
    "conv_dilated": conv(2, dilation=2, padding=1),
    "conv_same": conv(3, padding="same"),
    "conv_reflect": conv(3, padding=1, mode="reflect"),
    "conv_replicate": conv(3, padding=1, mode="replicate"),
    "conv_circular": conv(2, padding=1, mode="circular"),
    "conv_groups": conv(grouped=True),
    "conv_groups_k3": conv(3, padding=1, grouped=True, bias=False),
    "conv_depthwise": conv(3, padding=1, depthwise=True),
    "conv_kw": conv(spelling=KEYWORD),
    "conv_F": conv(3, padding=1, functional=True),
    "conv_F_groups": conv(grouped=True, functional=True),
    "conv_unbatched": conv(2, batched=False),
    "conv_uneven": conv(3, stride=2, padding=1, uneven=True),
    "conv_many": conv(2, padding=1, dilation=2, grouped=True, uneven=True),
    "conv_many_F": conv(2, stride=2, padding=1, dilation=2, grouped=True, functional=True),
    "conv_t": conv_transpose(2),
    "conv_t_groups": conv_transpose(grouped=True),
    "conv_t_stride": conv_transpose(3, stride=2, padding=1, output_padding=1, bias=False),
    "conv_t_dilated": conv_transpose(2, dilation=2, padding=1),
    "conv_t_F": conv_transpose(2, stride=2, grouped=True, functional=True),
    "conv_t_many_F": conv_transpose(
        2, stride=2, padding=1, output_padding=1, dilation=2, grouped=True, functional=True
    ),
}
