"""Whether the code of a model can tell None, or a type, from a tensor.

A traced value is never None. Where a forward asks `mask is None`, the branch that is recorded
is right for what was given, and an argument that is None in a later call must not take it.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from optimizer._source import NOT_USER_CODE

_TESTS = frozenset(
    code
    for name, code in dis.opmap.items()
    if name == "IS_OP" or name.endswith(("_IF_NONE", "_IF_NOT_NONE"))
)
_ASK_FOR_A_TYPE = frozenset(("isinstance", "is_tensor"))


def tests_for_none(root: nn.Module) -> bool:
    """Whether a forward of `root`, or a function that one calls by name, asks such a thing."""
    return any(_asks(module) for module in root.modules())


def _asks(module: nn.Module) -> bool:
    pending: list[Any] = [getattr(type(module), "forward", None)]  # a scripted one has none
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        if id(function) in seen or not _is_users(function):
            continue
        seen.add(id(function))
        for code in _codes(function.__code__):
            if _TESTS & set(code.co_code[::2]) or _ASK_FOR_A_TYPE & set(code.co_names):
                return True
            pending += _named(code, function, module)
        pending.append(getattr(function, "__wrapped__", None))
    return False


def _is_users(function: Any) -> bool:
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return isinstance(function, FunctionType) and not file.startswith(NOT_USER_CODE)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _named(code: CodeType, function: FunctionType, module: nn.Module) -> Iterator[Any]:
    """What the names in a function may stand for: globals, attributes, members of a namespace."""
    known = [function.__globals__.get(name) for name in code.co_names]
    spaces = [type(module), *(value for value in known if isinstance(value, ModuleType))]
    yield from known
    yield from (vars(module).get(name) for name in code.co_names)
    yield from (getattr(space, name, None) for space in spaces for name in code.co_names)
    yield from (cell.cell_contents for cell in function.__closure__ or ())
