"""Per-channel y = scale * x + shift, layers that have absorbed one, and who may see that.

All arithmetic is in float64 and rounded once, into the dtype of the layer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvTransposeNd

from optimizer.core.errors import require
from optimizer.core.node import arg
from optimizer.facts.facts import tensor

Layer: TypeAlias = Any  # a Linear, a Conv or a ConvTranspose

_BLOCK = 1 << 16  # elements: half a megabyte of float64


class Affine(NamedTuple):
    """y = scale * x + shift; one number for each channel, or one for all of them."""

    scale: torch.Tensor
    shift: torch.Tensor


@torch.no_grad()
def absorbed(layer: Layer, affine: Affine, *, over_outputs: bool) -> Layer:
    """Return a layer that computes `affine(layer(x))`, or `layer(affine(x))` if not over outputs.

    Refuse if its dtype cannot hold the weights.
    """
    rows, _ = channels(layer)
    bias = affine.shift.new_zeros(rows) if layer.bias is None else wide(layer.bias)
    if over_outputs:
        bias = affine.scale * bias + affine.shift
    elif affine.shift.any():
        shift = _by_group(layer, affine.shift, over_outputs=False)
        taps = _kernels(_on_float64_device(layer.weight), shift).sum(-1, dtype=torch.float64)
        bias = bias + (taps * shift).sum(-1).flatten()
    folded, weight = layer_like(layer), layer.weight
    factor = _by_group(layer, affine.scale, over_outputs=over_outputs)
    if not (factor == 1).all():
        folded.weight = _parameter_like(weight, _scaled(weight, factor))
    if layer.bias is not None or bias.any():
        folded.bias = _parameter_like(weight, bias)
        require(bool(folded.bias.isfinite().all()), "the folded bias overflows")
    return folded


def channels(layer: Layer) -> tuple[int, int]:
    """Return the number of output and of input channels of a layer."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return layer.out_channels, layer.in_channels


def _by_group(layer: Layer, values: torch.Tensor, *, over_outputs: bool) -> torch.Tensor:
    """Return values of the output or input channels as (groups, rows of one, columns).

    A weight's rows are the output channels, of a transposed layer the input channels, group by
    group; its columns are the channels of the other kind that each group has.
    """
    rows, columns = layer.weight.shape[:2]
    groups = getattr(layer, "groups", 1)
    if over_outputs is not isinstance(layer, _ConvTransposeNd):
        return values.expand(rows).reshape(groups, -1, 1)
    return values.expand(groups * columns).reshape(groups, 1, -1)


def _kernels(weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return a weight as (groups, rows of one, columns, taps), as `_by_group` its factors."""
    rows, columns, *taps = weight.shape
    return weight.reshape(len(factor), rows // len(factor), columns, math.prod(taps))


def _largest(weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of the weights of each factor; `abs` would copy them."""
    kernels = _kernels(weight, factor)
    axes = [*(axis for axis in (1, 2) if factor.shape[axis] == 1), 3]
    ends = kernels.amax(axes, keepdim=True), -kernels.amin(axes, keepdim=True)
    return torch.maximum(*ends).squeeze(3)


def _scaled(weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return products in float64, made a few rows at a time: a copy would not fit a cache."""
    wide = _on_float64_device(weight)
    groups, _, columns = factor.shape
    matrix = factor.expand(groups, len(wide) // groups, columns)
    by = matrix.reshape(len(wide), columns, *[1] * (wide.ndim - 2))
    scaled = torch.empty_like(wide)
    rows = max(1, _BLOCK * len(wide) // max(1, wide.numel()))
    blocks = (torch.split(each, rows) for each in (scaled, wide, by))
    for result, few, factors in zip(*blocks, strict=True):
        result.copy_(few.double() * factors)
    _require_digits(wide, scaled, factor)
    return scaled


def _require_digits(weight: torch.Tensor, scaled: torch.Tensor, factor: torch.Tensor) -> None:
    """Refuse if the dtype does not hold all products, or of a channel only too small ones."""
    if not weight.numel():
        return
    largest = _largest(scaled, factor)
    small = (largest < torch.finfo(weight.dtype).tiny) & (factor != 0)
    if small.any():
        small &= largest < _largest(weight, factor)
    require(bool((largest.isfinite() & ~small).all()), "the folded weights overflow or underflow")


def _on_float64_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor where float64 is computed with: MPS has none."""
    return tensor.cpu() if tensor.is_mps else tensor


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64."""
    return _on_float64_device(tensor).double()


def _parameter_like(weight: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(weight.device, weight.dtype), weight.requires_grad)


def layer_like(layer: Layer, kind: Any = None, **settings: Any) -> Layer:
    """Return a new layer with the tensors of another one, and its settings except `settings`."""
    kind = kind or type(layer)
    result = kind.__new__(kind)
    nn.Module.__init__(result)
    attributes = {name: value for name, value in vars(layer).items() if name not in vars(result)}
    vars(result).update(attributes, training=layer.training, **settings)
    for name in ("weight", "bias"):
        value = getattr(layer, name)
        is_buffer = not isinstance(value, nn.Parameter | None)
        result._parameters[name] = nn.Parameter(value, requires_grad=False) if is_buffer else value
    return result


def require_only_reader(node: fx.Node, reader: fx.Node) -> None:
    """Refuse if a node other than `reader` reads more of a value than its shape or dtype."""
    for user in node.users.keys() - {reader}:
        method = user.target if user.op == "call_method" else ""
        of_shape = method in ("size", "dim", "numel")
        if user.target is getattr:
            of_shape = user.args[1] in ("shape", "ndim", "dtype", "device")
        elif method in ("reshape_as", "view_as", "expand_as"):
            of_shape = user.args[0] is not node
        require(of_shape, "the layer's output is read elsewhere")


def reads_odd_strides(layer: fx.Node) -> bool:
    """Return whether a layer's input is not contiguous."""
    source = tensor(arg(layer, 0))
    return source.stride() != torch.empty(source.shape, device="meta").stride()
