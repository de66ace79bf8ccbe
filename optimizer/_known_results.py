"""Shape rules for the layers that graphs are full of, whose meta kernels are slow Python."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


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


def _keeps_shape(module: Any, value: torch.Tensor) -> bool:
    if type(module) is nn.ReLU:
        return not module.inplace
    if value.dim() not in _RANKS.get(type(module), ()) or module.training:
        return False
    return bool(module.track_running_stats) and module.num_features == value.shape[1]


def _is_linear(module: Any) -> bool:
    fused = isinstance(module, nn.Linear) and type(module).__module__.startswith("optimizer.")
    return fused or type(module) is nn.Linear


_RANKS: dict[type, tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,),
}  # fmt: skip
