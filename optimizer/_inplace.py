"""The in-place operators (`x += y`) as functions that a tracer can record.

`operator.iadd` will not do: fx prints it as the statement `a += b`, which rebinds the
variable `a`, and a later reader of `a` would see the new value also where `a` is an integer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

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
