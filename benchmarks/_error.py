"""How far an answer in float32 is from that of the same model and inputs in float64."""

from __future__ import annotations

import copy
import math
from typing import Any

_EPS = 2.0**-23  # of float32


def in_float64(module: Any, inputs: Any) -> list[Any]:
    """The tensors in the answer of the model as it is, in float64.

    Raises:
        NotImplementedError: it does not run in float64.
    """
    double = copy.deepcopy(module).double()
    try:
        return answered(double, [_doubled(each) for each in inputs])
    except Exception as error:  # a model may ask for float32 in any way
        raise NotImplementedError(f"it does not run in float64: {error}") from error


def answered(run: Any, inputs: Any) -> list[Any]:
    """The tensors in what it answers to copies of the inputs."""
    import torch
    from torch.utils import _pytree as pytree

    leaves = pytree.tree_leaves(run(*pytree.tree_map_only(torch.Tensor, torch.clone, inputs)))
    return [each for each in leaves if isinstance(each, torch.Tensor)]


def error_bound(actual: list[Any], exact: list[Any]) -> int:
    """The largest difference relative to the largest value of that output, in eps of float32.

    It is rounded up to a power of two and is at least 1. Another order of the same sums, of which
    every change of a graph may be one, moves the last bits of an error and seldom its power.

    Raises:
        ValueError: an output is not finite where that in float64 is, or has another shape.
    """
    pairs = zip(actual, exact, strict=True)
    found = max((_relative(*pair) for pair in pairs), default=0.0)
    return 2 ** max(0, math.ceil(math.log2(found / _EPS))) if found else 1


def _relative(actual: Any, exact: Any) -> float:
    actual, finite = actual.double(), exact.double().isfinite()
    if actual.shape != exact.shape or not actual.isfinite().equal(finite):
        raise ValueError("an output has another shape, or is not finite where it should be")
    if not finite.any():
        return 0.0
    exact = exact.double()[finite]
    largest = exact.abs().max().item()
    return (actual[finite] - exact).abs().max().item() / (largest or 1.0)


def _doubled(value: Any) -> Any:
    return value.double() if value.is_floating_point() else value
