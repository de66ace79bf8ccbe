"""Tokens that spell the newest statement otherwise: by name, with more keywords, in two steps.

What a call takes is asked of its signature, or of the schemas of ATen, so that every word that
calls a function of torch has such variants.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from optimizer.testing._control import newest
from optimizer.testing._machine import Emit, Machine, Value

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
        parameters = inspect.signature(function).parameters
        placed = [name for name, each in parameters.items() if each.kind != each.KEYWORD_ONLY]
        return [] if "args" in parameters else [(placed, {*parameters})]
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


def _by_position(call: ast.Call) -> None:
    """Give by position what all overloads call alike, up to the first that is left out."""
    every = {tuple(placed[len(call.args) :]) for placed, _ in overloads(call)}
    for name in every.pop() if len(every) == 1 else ():
        given = [each for each in call.keywords if each.arg == name]
        if not given:
            return
        call.args.append(given[0].value)
        call.keywords.remove(given[0])


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


def written_within(machine: Machine) -> None:
    """Compute the newest value once more, and write what it reads when one part is computed."""
    tree = ast.parse(newest(machine) or "x")
    kinds = ast.Call | ast.BinOp | ast.Compare
    parts = [ast.unparse(each) for each in ast.walk(tree) if isinstance(each, kinds)]
    names = {each.name for each in machine.history}
    for part in reversed(parts[1:]):  # the innermost of those that read a value
        for name in [each for each in re.findall(r"\w+", part) if each in names][:1]:
            machine.stack.append(machine.history[-1])
            rest = parts[0].replace(part, "{n}")
            machine.write(f"{{n}} = {part}; {name}.mul_(2.0); {rest}")
            return


def turned(machine: Machine, *, within: bool = False) -> None:
    """Compute the newest value once more, with what stands left and right exchanged.

    Of the whole expression, or within it of the last operation with a number.
    """
    tree = ast.parse(newest(machine) or "x", mode="eval")
    operations = [each for each in ast.walk(tree) if isinstance(each, ast.BinOp)]
    if within:
        operations = [o for o in operations if isinstance(o.right, ast.Constant)][::-1]
    for operation in [each for each in operations[:1] if within or each is tree.body]:
        operation.left, operation.right = operation.right, operation.left
        machine.stack.append(machine.history[-1])
        machine.write(ast.unparse(tree))


def into_new(machine: Machine) -> None:
    """Compute the newest value once more into a tensor that the caller gets too."""
    name, text = f"n{len(machine.statements)}", newest(machine).removesuffix(")")
    given = f"{{n}} = torch.empty_like({{v}}); {text}, out={{n}})"
    if text.startswith("torch."):
        machine.stack.append(machine.history[-1])
        if machine.write(given):
            machine.outputs.append(Value(name, machine.top.shape))


# The functions of layers, and what these take of them after the input.
_OF_LAYERS = {
    "Linear": "linear weight bias",
    "Conv": "conv{d}d weight bias stride padding dilation groups",
    "ConvTranspose": "conv_transpose{d}d weight bias stride padding output_padding groups dilation",
    "BatchNorm": "batch_norm running_mean running_var weight bias training momentum eps",
    "AvgPool": "avg_pool{d}d kernel_size stride padding ceil_mode count_include_pad",
    "LeakyReLU": "leaky_relu negative_slope inplace",
    "Dropout": "dropout p training inplace",
}


def by_function(machine: Machine) -> None:
    """Call, in the place of the newest layer, the function of its tensors and settings."""
    found = re.fullmatch(r"(\w+ = )self\.(\w+)\((\w+)\)", (machine.statements or [""])[-1])
    layer = machine.model.get_submodule(found[2]) if found else None
    named = re.fullmatch(r"(\D+?)(\d?)d?", type(layer).__name__)
    function, *names = _OF_LAYERS.get(named[1] if named else "", "").split() or [""]
    values = [getattr(layer, name, None) for name in names]
    missing = None in (*values[:1], getattr(layer, "momentum", 0))  # which functions must be told
    if missing or not (found and named and values):
        return
    given = [
        f"self.{found[2]}.{name}" if isinstance(value, torch.Tensor) else repr(value)
        for name, value in zip(names, values, strict=True)
    ]
    call = f"F.{function.format(d=named[2])}({', '.join([found[3], *given])})"
    machine.statements[-1] = found[1] + call


RESPELLED: dict[str, Emit] = {
    "by_name": respelled(_by_name),
    "by_position": respelled(_by_position),
    "with_keywords": respelled(_with_keywords),
    "written_within": written_within,
    "turned": turned,
    "turned_within": partial(turned, within=True),
    "into_new": into_new,
    "by_function": by_function,
}
