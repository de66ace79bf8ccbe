"""Per-channel y = scale * x + shift, and a layer that has absorbed one.

All arithmetic is in float64 and rounded once, into the dtype of the layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

_BLOCK = 1 << 17  # elements: a megabyte of float64


@torch.no_grad()
def fold(layer: Any, bn: Any) -> Any:
    """A new layer that computes `bn(layer(x))`; neither argument is changed.

    Args:
        layer: a Linear or Conv.
        bn: a BatchNorm in eval mode over the layer's output channels.
    """
    mean, variance = _wide(bn.running_mean), _wide(bn.running_var)
    gain = torch.ones_like(mean) if bn.weight is None else _wide(bn.weight)
    scale = gain / (variance + bn.eps).sqrt()
    bias = -mean if layer.bias is None else _wide(layer.bias) - mean
    bias = scale * bias if bn.bias is None else scale * bias + _wide(bn.bias)

    folded = _shell(layer)
    folded.weight = _parameter_like(layer.weight, _scaled(layer.weight, scale))
    folded.bias = _parameter_like(layer.weight, bias)
    return folded


def is_finite(layer: nn.Module) -> bool:
    """Whether all parameters of a layer are finite numbers."""
    # A value that is not finite makes the sum so; finite ones may, in a narrow dtype.
    return all(
        math.isfinite(parameter.sum()) or bool(torch.isfinite(parameter).all())
        for parameter in layer.parameters()
    )


def _scaled(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Rows times scale, a few rows at a time: a float64 copy of it all would not fit a cache."""
    weight = _on_float64_device(weight)
    scaled, scale = torch.empty_like(weight), scale.reshape(-1, *[1] * (weight.ndim - 1))
    rows = max(1, _BLOCK * len(weight) // max(1, weight.numel()))
    for start in range(0, len(weight), rows):
        few = slice(start, start + rows)
        torch.mul(weight[few], scale[few], out=scaled[few])
    return scaled


def _on_float64_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if tensor.is_mps else tensor  # MPS has no float64


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return _on_float64_device(tensor).double()


def _parameter_like(weight: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(weight.device, weight.dtype), weight.requires_grad)


def _shell(layer: nn.Module) -> nn.Module:
    """A module with the layer's settings and none of its tensors."""
    shell = type(layer).__new__(type(layer))
    nn.Module.__init__(shell)
    settings = {k: v for k, v in vars(layer).items() if k not in vars(shell)}
    vars(shell).update(settings, training=layer.training)
    shell.register_parameter("weight", None)
    shell.register_parameter("bias", None)
    return shell
