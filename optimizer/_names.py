"""The names in a function's code, which tell what it may reach."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

_CONTINUE = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "STORE_ATTR", "DELETE_ATTR")
_BEGIN = {
    "LOAD_GLOBAL": "global", "STORE_GLOBAL": "global", "LOAD_NAME": "global",
    "LOAD_DEREF": "free", "STORE_DEREF": "free", "LOAD_CLASSDEREF": "free",
    "IMPORT_NAME": "import",
}  # fmt: skip


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@lru_cache(maxsize=4096)
def scan(code: CodeType) -> tuple[frozenset[tuple[Any, ...]], frozenset[str]]:
    """The chains `a.b.c` that begin with a global, a free variable or an import; other names."""
    chains: set[tuple[Any, ...]] = set()
    names: set[str] = set()
    chain: tuple[Any, ...] = ()
    for each in dis.get_instructions(code):
        if each.opname in _CONTINUE and chain:
            chain = (*chain, each.argval)
            continue
        chains.add(chain)
        chain = ((_BEGIN[each.opname], each.argval),) if each.opname in _BEGIN else ()
        if each.opname in _CONTINUE:
            names.add(each.argval)
    return frozenset(chains - {()}), frozenset(names)
