"""Tokens that spell the newest statement otherwise: its calls by name, or with more keywords.

What a call takes is asked of its signature, or of the schemas of ATen, so that every word that
calls a function of torch has such variants.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from optimizer.testing._machine import Emit, Machine

# Each keeps the shape and the dtype, and may change the numbers or the memory.
KEYWORDS = {
    "alpha": "0.5",
    "beta": "0.25",
    "rounding_mode": "'floor'",
    "memory_format": "torch.contiguous_format",
    "divisor_override": "3",
    "count_include_pad": "False",
    "accumulate": "True",
    "scale": "0.75",
    "is_causal": "True",
}
_LISTS = frozenset(("shape", "size", "dims"))
_NAMESPACES: dict[str, Any] = {"torch": torch, "F": functional, "nn": nn}


def overloads(call: ast.Call) -> list[tuple[list[str], set[str]]]:
    """What a call of torch takes by position, and by name, once for each overload that fits it."""
    if not isinstance(call.func, ast.Attribute):
        return []
    name, home = call.func.attr, ast.unparse(call.func.value)
    function, method = getattr(_NAMESPACES.get(home), name, None), home not in _NAMESPACES
    if inspect.isfunction(function) or inspect.isclass(function):
        names = [*inspect.signature(function).parameters]
        return [] if "args" in names else [(names, set(names))]
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or home.startswith("self.") or not (method or function):
        return []
    found = []
    for schema in [getattr(packet, each)._schema for each in packet.overloads()]:
        every = ["input" if each.name == "self" else each.name for each in schema.arguments]
        placed = every[: sum(not each.kwarg_only for each in schema.arguments)]
        fits = len(placed) >= len(call.args) + method and "Dimname" not in str(schema)
        if fits and (every[:1] == ["input"] or not method):
            found.append((placed[method:], set(every)))
    return found


def _by_name(call: ast.Call) -> None:
    """Give by name, last first, what all overloads call alike; one number is no list of them."""
    known = {tuple(placed[: len(call.args)]) for placed, _ in overloads(call)}
    names = known.pop() if len(known) == 1 else ()
    listed = any(isinstance(each, ast.Tuple | ast.List) for each in call.args)
    # Of numbers, the input has another name where it does not come first.
    if "input" not in names[1:] and (listed or _LISTS.isdisjoint(names)):
        given = [*map(ast.keyword, names, call.args)]
        call.args, call.keywords = call.args[len(names) :], [*given[::-1], *call.keywords]


def _with_keywords(call: ast.Call) -> None:
    """Give all of `KEYWORDS` that it takes."""
    for name, value in KEYWORDS.items():
        given = {each.arg for each in call.keywords}
        for placed, every in overloads(call):
            taken = given.union(placed[: len(call.args)])
            if name in every - taken and given <= every:
                call.keywords.append(ast.keyword(name, ast.parse(value, mode="eval").body))
                break


def respelled(change: Callable[[ast.Call], None]) -> Emit:
    """Change all calls of torch of the newest statement, and of the newest layer's making."""

    def emit(machine: Machine) -> None:
        for lines in (machine.statements, machine.members):
            tree = ast.parse(lines[-1] if lines else "")
            before = ast.unparse(tree)
            for call in [each for each in ast.walk(tree) if isinstance(each, ast.Call)]:
                change(call)
            if (after := ast.unparse(tree)) != before:
                lines[-1] = after

    return emit


RESPELLED: dict[str, Emit] = {
    "by_name": respelled(_by_name),
    "with_keywords": respelled(_with_keywords),
}
