"""Whether the code of a model can tell None, or a type, from a tensor.

A traced value is never None. Where a forward asks `mask is None`, the branch that is recorded
is right for what was given, and an argument that is None in a later call must not take it.
"""

from __future__ import annotations

import dis

from optimizer._names import codes
from optimizer._outside import Outside

_TESTS = frozenset(
    code
    for name, code in dis.opmap.items()
    if name == "IS_OP" or name.endswith(("_IF_NONE", "_IF_NOT_NONE"))
)
_ASK_FOR_A_TYPE = frozenset(("isinstance", "is_tensor"))


def tests_for_none(outside: Outside) -> bool:
    """Whether a forward of a model, or a function that one may run, asks such a thing."""
    functions = (each for reach in outside.reaches.values() for each in reach.functions)
    return any(
        not _TESTS.isdisjoint(code.co_code[::2]) or not _ASK_FOR_A_TYPE.isdisjoint(code.co_names)
        for function in functions
        for code in codes(function.__code__)
    )
