"""Per-channel y = scale * x + shift, and layers that have absorbed one.

All arithmetic is in float64 and rounded once, into the dtype of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from optimizer.rewrite.contract import require

Layer: TypeAlias = Any  # a Linear, a Conv or a ConvTranspose

_BLOCK = 1 << 16  # elements: half a megabyte of float64


@dataclass(frozen=True)
class Affine:
    """y = scale * x + shift; one number for each channel, or one for all of them."""

    scale: torch.Tensor
    shift: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of_batchnorm(cls, bn: Any) -> Affine:
        """What a BatchNorm with running statistics does in eval mode."""
        mean, deviation = _wide(bn.running_mean), (_wide(bn.running_var) + bn.eps).sqrt()
        scale = (1.0 if bn.weight is None else _wide(bn.weight)) / deviation
        return cls(scale, (0.0 if bn.bias is None else _wide(bn.bias)) - scale * mean)

    @classmethod
    @torch.no_grad()
    def of_constant(cls, name: str, constant: torch.Tensor, *, comes_first: bool) -> Affine:
        """`x name constant`, or `constant name x`, where name is add, sub, mul or truediv."""
        value = _wide(constant).reshape(-1)
        one, zero = torch.ones_like(value), torch.zeros_like(value)
        if name in ("mul", "truediv"):
            return cls(value if name == "mul" else one / value, zero)
        if comes_first:
            return cls(one if name == "add" else -one, value)
        return cls(one, value if name == "add" else -value)


@torch.no_grad()
def absorbed_after(layer: Layer, affine: Affine) -> Layer:
    """A new layer that computes `affine(layer(x))`; the one that is given stays as it is.

    Raises:
        Refused: the new weights are beyond the layer's dtype.
    """
    bias = affine.shift
    if layer.bias is not None:
        bias = affine.scale * _wide(layer.bias) + bias
    rows, _ = channels(layer)
    return _with_tensors(layer, affine, bias.expand(rows).contiguous(), over_outputs=True)


@torch.no_grad()
def absorbed_before(layer: Layer, affine: Affine) -> Layer:
    """A new layer that computes `layer(affine(x))`; the one that is given stays as it is.

    Raises:
        Refused: the new weights are beyond the layer's dtype.
    """
    bias = None if layer.bias is None else _wide(layer.bias)
    if affine.shift.any():
        weight = _on_float64_device(layer.weight)
        taps = weight.reshape(*weight.shape[:2], -1).sum(-1, dtype=torch.float64)
        shifted = (taps * _matrix(_by_group(layer, affine.shift, over_outputs=False), weight)).sum(
            1
        )
        bias = shifted if bias is None else bias + shifted
    return _with_tensors(layer, affine, bias, over_outputs=False)


def channels(layer: Layer) -> tuple[int, int]:
    """The number of output and of input channels of a layer."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return layer.out_channels, layer.in_channels


def _with_tensors(
    layer: Layer, affine: Affine, bias: torch.Tensor | None, *, over_outputs: bool
) -> Layer:
    folded, factor = _shell(layer), _by_group(layer, affine.scale, over_outputs=over_outputs)
    folded.weight = as_parameter(layer.weight)
    if not (factor == 1).all():
        scaled = _scaled(layer.weight, factor)
        kept = _keeps_digits(layer.weight, scaled, factor)
        require(kept, "the folded weights overflow or underflow")
        folded.weight = _parameter_like(layer.weight, scaled)
    if bias is not None and (layer.bias is not None or bias.any()):
        folded.bias = _parameter_like(layer.weight, bias)
        require(bool(folded.bias.isfinite().all()), "the folded bias overflows")
    return folded


def _by_group(layer: Layer, values: torch.Tensor, *, over_outputs: bool) -> torch.Tensor:
    """Values of the output or input channels as (groups, rows of one, columns).

    A weight's rows are the output channels, of a transposed layer the input channels, group by
    group; its columns are the channels of the other kind that each group has.
    """
    rows, columns = layer.weight.shape[:2]
    groups = getattr(layer, "groups", 1)
    if over_outputs is not isinstance(layer, _ConvTransposeNd):
        return values.expand(rows).reshape(groups, -1, 1)
    return values.expand(groups * columns).reshape(groups, 1, -1)


def _keeps_digits(weight: torch.Tensor, scaled: torch.Tensor, factor: torch.Tensor) -> bool:
    """Whether no product is too large for the weight's dtype, and no channel's all too small.

    A sum is a cheaper look than a maximum: where |w1 + ... + wn| >= n t, one of them is >= t.
    """
    if not weight.numel():
        return True
    tiny = torch.finfo(weight.dtype).tiny
    sums = _over_each(factor, torch.sum, scaled).abs()
    if ((sums >= tiny * (scaled.numel() // factor.numel())) & sums.isfinite()).all():
        return True
    largest, was = (
        _over_each(factor, torch.amax, each.abs()) for each in (scaled, weight.to(scaled.device))
    )
    too_small = (largest < tiny) & (largest < was) & (factor != 0)
    return bool((largest.isfinite() & ~too_small).all())


def _over_each(factor: torch.Tensor, reduce: Any, weight: torch.Tensor) -> torch.Tensor:
    """Reduce the weights that each factor scales to one number."""
    kernels = weight.reshape(len(factor), -1, weight.shape[1], weight[0, 0].numel())
    others = [*(axis for axis in (1, 2) if factor.shape[axis] == 1), 3]
    return reduce(kernels, others, keepdim=True).squeeze(3)  # type: ignore[no-any-return]


def _matrix(factor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What `_by_group` gave, with one row for each row of the weight."""
    groups, _, columns = factor.shape
    return factor.expand(groups, len(weight) // groups, columns).reshape(len(weight), columns)


def _scaled(weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Products in float64, a few rows at a time: a copy of them all would not fit a cache."""
    wide = _on_float64_device(weight)
    factor = _matrix(factor, wide).reshape(len(wide), -1, *[1] * (wide.ndim - 2))
    scaled = torch.empty_like(wide)
    rows = max(1, _BLOCK * len(wide) // max(1, wide.numel()))
    blocks = (torch.split(each, rows) for each in (scaled, wide, factor))
    for made, few, by in zip(*blocks, strict=True):
        made.copy_(few.double() * by)
    return scaled


def device_of_float64(layer: Layer) -> torch.device:
    """Where to compute what a layer on its device is to absorb: MPS has no float64."""
    return torch.device("cpu") if layer.weight.is_mps else layer.weight.device


def _on_float64_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if tensor.is_mps else tensor


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return _on_float64_device(tensor).double()


def _parameter_like(weight: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(weight.device, weight.dtype), weight.requires_grad)


def as_parameter(tensor: torch.Tensor | None) -> Any:
    """A layer's tensor where a new layer has a parameter: of the original, it may be a buffer."""
    if tensor is None or isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=False)


def _shell(layer: nn.Module) -> nn.Module:
    """A module with the layer's settings and none of its tensors."""
    shell = type(layer).__new__(type(layer))
    nn.Module.__init__(shell)
    settings = {k: v for k, v in vars(layer).items() if k not in vars(shell)}
    vars(shell).update(settings, training=layer.training)
    shell.register_parameter("weight", None)
    shell.register_parameter("bias", None)
    return shell
