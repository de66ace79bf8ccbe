"""The in-place operators (`x += y`, and those of passes) as functions that a tracer can record.

`operator.iadd` will not do: fx prints it as the statement `a += b`, which rebinds the
variable `a`, and a later reader of `a` would see the new value also where `a` is an integer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def _recordable(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def apply(target: Any, other: Any) -> Any:
        if has_torch_function((target, other)):
            return handle_torch_function(apply, (target, other), target, other)
        return function(target, other)

    apply.__name__ = apply.__qualname__ = function.__name__
    return apply


iadd = _recordable(operator.iadd)
iand = _recordable(operator.iand)
ifloordiv = _recordable(operator.ifloordiv)
ilshift = _recordable(operator.ilshift)
imatmul = _recordable(operator.imatmul)
imod = _recordable(operator.imod)
imul = _recordable(operator.imul)
ior = _recordable(operator.ior)
ipow = _recordable(operator.ipow)
irshift = _recordable(operator.irshift)
isub = _recordable(operator.isub)
itruediv = _recordable(operator.itruediv)
ixor = _recordable(operator.ixor)

INPLACE_OPERATORS = (
    iadd, iand, ifloordiv, ilshift, imatmul, imod, imul, ior, ipow, irshift, isub, itruediv, ixor,
)  # fmt: skip


def _over_an_operand(
    function: Callable[[Any, Any], Any], in_place: Callable[[Any, Any], Any]
) -> Callable[[Any, Any, int], Any]:
    """A commutative `function` whose result overwrites an operand if they are laid out alike."""

    def apply(first: Any, second: Any, overwritten: int) -> Any:
        if has_torch_function((first, second)):
            return handle_torch_function(apply, (first, second), first, second, overwritten)
        if not alike(first, second):
            return function(first, second)
        return in_place(second, first) if overwritten else in_place(first, second)

    apply.__name__ = apply.__qualname__ = f"{function.__name__}_over"
    return apply


def alike(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one dtype, shape and layout, and so has their sum or product."""
    same = first.dtype == second.dtype and first.shape == second.shape
    return same and first.stride() == second.stride()


def where_into(mask: Any, value: Any, other: Any, *, out: Any) -> Any:
    """`torch.where` that has `out` also where gradients are recorded."""
    given = (mask, value, other, out)
    if has_torch_function(given):
        return handle_torch_function(where_into, given, mask, value, other, out=out)
    if torch.is_grad_enabled() and (value.requires_grad or other.requires_grad):
        return out.copy_(torch.where(mask, value, other))
    return torch.where(mask, value, other, out=out)


def where_like(mask: Any, value: Any, other: Any) -> Any:
    """`torch.where` laid out as a copy of `other` is, and not as the mask."""
    if has_torch_function((mask, value, other)):
        return handle_torch_function(where_like, (mask, value, other), mask, value, other)
    result = torch.where(mask, value, other)
    alike = result.stride() == other.stride()
    return result if alike else torch.empty_like(other).copy_(result)


add_over = _over_an_operand(operator.add, Tensor.add_)
mul_over = _over_an_operand(operator.mul, Tensor.mul_)
