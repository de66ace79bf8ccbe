"""Shape rules for the layers that graphs are full of, whose meta kernels are slow Python."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config

# Without data, `v[mask]` has as many rows as under a mask of True: an example as good as any.
EVERY_MASK_IS_FULL = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


def known_result(module: Any, *args: Any) -> torch.Tensor | None:
    """The result of a call of `module` on meta tensors, or None where no rule is certain of it.

    A call that is not certain to be accepted, or to be laid out densely, is left to the layer.
    """
    value = args[0] if len(args) == 1 and isinstance(args[0], torch.Tensor) else None
    if value is None or value.dim() < 2 or not value.is_contiguous():
        return None
    if _is_linear(module):
        fits = (module.in_features, module.weight.dtype) == (value.shape[-1], value.dtype)
        return value.new_empty((*value.shape[:-1], module.out_features)) if fits else None
    return value.new_empty(value.shape) if _keeps_shape(module, value) else None


def known_sum(function: Any, *args: Any) -> torch.Tensor | None:
    """The same for a sum, difference or product of two tensors that are alike."""
    if function not in _ARITHMETIC or len(args) != 2:
        return None
    one, other = args
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return None
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    dense = one.is_contiguous() and other.is_contiguous() and one.dim() > 0
    numbers = one.is_floating_point()
    return one.new_empty(one.shape) if alike and dense and numbers else None


def writes_its_input(module: Any) -> bool:
    """Whether a layer is an activation that computes in place."""
    return type(module) in _ACTIVATIONS and getattr(module, "inplace", False)


def _keeps_shape(module: Any, value: torch.Tensor) -> bool:
    if type(module) in _ACTIVATIONS:
        return value.is_floating_point() and not getattr(module, "inplace", False)
    if type(module) is nn.LayerNorm:
        normalized = value.shape[value.dim() - len(module.normalized_shape) :]
        kept = module.weight is None or module.weight.dtype == value.dtype
        return kept and normalized == module.normalized_shape and value.is_floating_point()
    if value.dim() not in _RANKS.get(type(module), ()) or module.training:
        return False
    if module.running_var is None or module.running_var.dtype != value.dtype:
        return False
    return bool(module.num_features == value.shape[1])


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
