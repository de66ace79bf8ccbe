"""What generated code can write down: fx prints arguments by their repr.

The repr of a numpy number, or of an object, has names that the code does not know.
"""

from __future__ import annotations

import ast
import cmath
import enum
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_NUMBERS = (bool, int, float, complex, str)
_PRINTED = (
    *_NUMBERS, type(None), type(...), range, torch.Size, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


def literal(value: Any) -> Any:
    """Arguments of a call, with Python's real numbers in the place of numpy's.

    torch takes both for the same: the dtype of `x * numpy.float64(2)` is that of `x * 2.0`.

    Raises:
        TypeError: an argument has no name that generated code could use.
    """
    return fx.node.map_aggregate(value, _literal)


def _literal(value: Any) -> Any:
    plain: Any = value.item() if isinstance(value, numbers_of_numpy()) else value
    exact = type(plain) is not complex or (plain is value and _is_printed(plain))
    enumerated = isinstance(plain, enum.Enum) and not isinstance(plain, enum.Flag)
    if enumerated or isinstance(plain, fx.Node | torch._ops.OpOverload):
        return plain
    if type(plain) in _PRINTED and exact:
        return plain
    raise TypeError(f"code cannot name a {type(value).__name__}")


def _is_printed(number: complex) -> bool:
    """Whether the text of a number is that number; (-0+0j) is a sum, and lacks the sign."""
    return cmath.isfinite(number) and repr(ast.literal_eval(repr(number))) == repr(number)


def is_literal(value: Any, within: bool = False) -> bool:
    """Whether generated code can write down the arguments of a node.

    fx prints what is `within` a dict by the repr of that, without a look at its parts.
    """
    if isinstance(value, dict):
        return all(is_literal(each, True) for pair in value.items() for each in pair)
    if isinstance(value, slice):
        return is_literal((value.start, value.stop, value.step), within)
    if isinstance(value, list | tuple) and not (within and hasattr(value, "_fields")):
        return all(is_literal(each, within) for each in value)
    if isinstance(value, fx.Node):
        return True
    try:
        return _literal(value) is value and (type(value) in _PRINTED or not within)
    except TypeError:
        return False


def numbers_of_numpy() -> tuple[Any, ...]:
    """The class of numpy's numbers, where it is imported."""
    numpy = sys.modules.get("numpy")
    return (numpy.generic,) if numpy else ()


class LiteralTracer(fx.Tracer):
    """Records numbers and texts as generated code can write them down."""

    fail: Callable[[str], Exception]
    _passing = False  # arguments, and not what the model returns

    def create_arg(self, a: Any) -> Any:
        if not (isinstance(a, _NUMBERS) or type(a).__module__ == "numpy"):
            return super().create_arg(a)
        try:
            found = literal(a)
        except TypeError as error:
            raise self.fail(str(error)) from error
        if type(found) is not type(a) and not self._passing:
            raise self.fail(f"it returns a {type(a).__name__}, which code cannot name")
        return found

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        self._passing = True
        try:
            return super().create_proxy(*args, **kwargs)
        finally:
            self._passing = False
