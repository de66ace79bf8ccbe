"""Shape rules for the layers that graphs are full of, whose meta kernels are slow Python."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config

from optimizer.core.inputs import storages_in
from optimizer.core.ops import CONVOLUTIONS
from optimizer.facts.effects import NOTHING, Effect

# Without data, `v[mask]` has as many rows as under a mask of True: an example as good as any.
EVERY_MASK_IS_FULL = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


def known_outcome(called: Any, *args: Any) -> tuple[torch.Tensor, Effect] | None:
    """What a call on meta tensors yields and does, or None where no rule is certain of it.

    A call that is not certain to be accepted, or to be laid out densely, is left to the layer.
    """
    rule = _known_result if isinstance(called, nn.Module) else _known_sum
    result = rule(called, *args)
    if result is None:
        return None
    return result, Effect(storages_in(result)) if result is args[0] else NOTHING


def _known_result(module: Any, *args: Any) -> torch.Tensor | None:
    value = args[0] if len(args) == 1 and isinstance(args[0], torch.Tensor) else None
    if value is None or value.dim() < 2:
        return None
    if not (value.is_contiguous() if type(module) in _RANKS else _is_dense(value)):
        return None  # of single elements, a BatchNorm alone does not keep the strides
    if _is_linear(module):
        fits = (module.in_features, module.weight.dtype) == (value.shape[-1], value.dtype)
        return value.new_empty((*value.shape[:-1], module.out_features)) if fits else None
    if type(module) in CONVOLUTIONS:
        return _convolved(module, value) if _takes(module, value) else None
    if not _keeps_shape(module, value):
        return None
    return value if getattr(module, "inplace", False) else value.new_empty(value.shape)


def _known_sum(function: Any, *args: Any) -> torch.Tensor | None:
    if function not in _ARITHMETIC or len(args) != 2:
        return None
    one, other = args
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return None
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    dense = _is_dense(one) and _is_dense(other) and one.dim() > 0
    numbers = one.is_floating_point()
    return one.new_empty(one.shape) if alike and dense and numbers else None


def _is_dense(value: torch.Tensor) -> bool:
    """Whether it is contiguous, in the strides of single elements too: results inherit them."""
    return value.stride() == value.new_empty(value.shape).stride()


def _keeps_shape(module: Any, value: torch.Tensor) -> bool:
    if type(module) in _ACTIVATIONS:
        return value.is_floating_point()
    if type(module) is nn.LayerNorm:
        normalized = value.shape[value.dim() - len(module.normalized_shape) :]
        kept = module.weight is None or module.weight.dtype == value.dtype
        return kept and normalized == module.normalized_shape and value.is_floating_point()
    if value.dim() not in _RANKS.get(type(module), ()) or module.training:
        return False
    if module.running_var is None or module.running_var.dtype != value.dtype:
        return False
    return bool(module.num_features == value.shape[1])


def _takes(convolution: Any, value: torch.Tensor) -> bool:
    """Whether it is certain to accept a value, and to lay out its result as that."""
    weight, bias, groups = convolution.weight, convolution.bias, convolution.groups
    if convolution.padding_mode != "zeros" or isinstance(convolution.padding, str):
        return False
    channels = value.dim() == weight.dim() and value.shape[1] == weight.shape[1] * groups
    biased = bias is None or (bias.shape, bias.dtype) == (weight.shape[:1], weight.dtype)
    numbers = value.is_floating_point() and value.dtype == weight.dtype
    steps = min(convolution.stride) > 0 and min(convolution.dilation) > 0
    steps = steps and min(convolution.padding) >= 0 and weight.shape[0] % groups == 0
    return channels and biased and numbers and steps and weight.is_contiguous()


def _convolved(convolution: Any, value: torch.Tensor) -> torch.Tensor | None:
    """The formula of `nn.Conv2d`'s documentation, where it leaves something."""
    kernel = convolution.weight.shape[2:]
    stride, padding, dilation = convolution.stride, convolution.padding, convolution.dilation
    sizes = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(value.shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    shape = (value.shape[0], convolution.weight.shape[0], *sizes)
    return value.new_empty(shape) if value.numel() and min(sizes) > 0 else None


def _is_linear(module: Any) -> bool:
    fused = isinstance(module, nn.Linear) and type(module).__module__.startswith("optimizer.")
    return fused or type(module) is nn.Linear


_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh,
)  # fmt: skip
_ARITHMETIC = frozenset((operator.add, operator.sub, operator.mul, torch.add, torch.mul))
_RANKS: dict[type, tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,),
}  # fmt: skip
