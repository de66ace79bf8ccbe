"""Names and literals that are safe in the code, and in the module, that fx makes of a graph.

fx prints arguments by their repr, in which numpy's numbers and objects have unknown names. Weights
and layers become attributes of a module that has a `report`, a `code` and a `graph` too.
"""

from __future__ import annotations

import ast
import cmath
import enum
import keyword
import re
from collections import Counter
from functools import cache
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from optimizer.core.errors import Refused, require
from optimizer.core.node import attribute, home_of
from optimizer.frontend.traceable import numbers_of_numpy

NUMBERS = (bool, int, float, complex, str)
_PRINTED = (
    *NUMBERS, type(None), type(...), range, torch.Size, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


def literal(value: Any) -> Any:
    """Return the arguments of a call, with Python's real numbers in the place of numpy's.

    torch takes both for the same: the dtype of `x * numpy.float64(2)` is that of `x * 2.0`.

    Raises:
        Refused: an argument has no name that generated code could use.
    """
    return fx.node.map_aggregate(value, _literal)


def _literal(value: Any) -> Any:
    plain: Any = value.item() if isinstance(value, numbers_of_numpy()) else value
    exact = type(plain) is not complex or (  # (-0+0j) is a sum, and lacks the sign
        plain is value
        and cmath.isfinite(plain)
        and repr(ast.literal_eval(repr(plain))) == repr(plain)
    )
    enumerated = isinstance(plain, enum.Enum) and not isinstance(plain, enum.Flag)
    if enumerated or isinstance(plain, fx.Node | torch._ops.OpOverload):
        return plain
    if type(plain) in _PRINTED and exact:
        return plain
    raise Refused(f"code cannot name a {type(value).__name__}")


def is_literal(value: Any, within: bool = False) -> bool:
    """Return whether generated code can write down the arguments of a node.

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
    except Refused:
        return False


def rename_attributes(
    root: nn.Module, graph: fx.Graph, kind: type[fx.GraphModule] = fx.GraphModule
) -> None:
    """Let `root` hold what `graph` reads and calls by names that are free in code and in a `kind`.

    What lies in a layer with such a name goes with it.
    """
    free: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            if node.name == "self":
                node._rename("itself")
            names = str(node.target).split(".")
            bad = [i for i, name in enumerate(names) if not _is_free(name, None if i else kind)]
            if not bad:
                continue
            path, rest = ".".join(names[: bad[-1] + 1]), names[bad[-1] + 1 :]
            if path not in free:
                free[path] = _free_name(root, path, kind)
            node.target = ".".join((free[path], *rest))


def _free_name(root: nn.Module, path: str, kind: type[fx.GraphModule]) -> str:
    value, stem = attribute(root, path), re.sub(r"\W", "_", path, flags=re.ASCII)
    for table in (root._modules, root._parameters, root._buffers):
        for name, each in table.items():
            if each is value and _is_free(name, kind):
                return name
    names = (f"{stem}_{number}" for number in count(1))
    free = next(name for name in names if not hasattr(root, name) and _is_free(name, kind))
    setattr(root, free, value)
    return free


def _is_free(name: str, kind: Any) -> bool:
    """Return whether code can name an attribute of a `kind` of module; fx gets '0' by getattr."""
    printed = f"_{name}".isidentifier() and name.isascii() and not keyword.iskeyword(name)
    return printed and not (kind and name in _names_of(kind))


@cache
def _names_of(kind: Any) -> frozenset[str]:
    return frozenset(dir(kind(nn.Module(), fx.Graph())))


def require_printable(graph: fx.Graph) -> None:
    """Require that code can be written of a graph.

    Raises:
        Refused: a number, or the default of an argument, has no literal; the name of an argument
            is that by which the code names something else; or a user's function has the name of
            one of torch's, as `functools.wraps(torch.relu)` gives it.
    """
    for node in graph.nodes:
        is_function = isinstance(node.target, FunctionType)
        pretends = is_function and str(node.target.__module__).partition(".")[0] == "torch"
        is_torchs = not pretends or home_of(node) == "torch"
        require(is_torchs, f"'{node.name}' calls a function by the name of one of torch's")
        place = f"the default of '{node.target}'" if node.op == "placeholder" else f"'{node.name}'"
        require(is_literal((node.args, node.kwargs)), f"{place} holds what code cannot name")
    placeholders = graph.find_nodes(op="placeholder")
    optional = [bool(n.args) for n in placeholders if not str(n.target).startswith("*")]
    require(optional == sorted(optional), "an argument without a default follows one that has one")
    inputs = {str(n.target).lstrip("*"): n.name for n in placeholders}
    renamed = [name for name, written in inputs.items() if name == "self" or name != written]
    if renamed:
        function: Any = ast.parse(graph.python_code("self").src).body[-1]
        nodes = (node for line in function.body for node in ast.walk(line))
        read = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        # Read besides in the line that gives it another name.
        hiding = [name for name in renamed if name == "self" or read[name] > 1]
        reason = "has the name of what the code of a graph needs"
        require(not hiding, f"its argument '{next(iter(hiding), '')}' {reason}")
