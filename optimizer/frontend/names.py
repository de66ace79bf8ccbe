"""What a graph names, in code that fx prints: neither code nor module takes it for its own.

The weights and layers of a model become attributes of the module that is made of its graph, which
has a `report`, a `code` and a `graph` too; and code prints their names, also one that is a word of
Python's. Numbers and defaults are printed by their repr, among the arguments of the forward, one
of which may be called `nan`.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import count
from types import FunctionType
from typing import Any

from torch import fx, nn

from optimizer.core.errors import require
from optimizer.core.literals import is_literal
from optimizer.core.node import attribute
from optimizer.facts.effects import home_of


def give_free_names(
    root: nn.Module, graph: fx.Graph, kind: type[fx.GraphModule] = fx.GraphModule
) -> None:
    """Let `root` hold what `graph` reads and calls by names that are free in code and in a `kind`.

    What lies in a layer with such a name goes with it.
    """
    known: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            if node.name == "self":
                node._rename("itself")
            names = str(node.target).split(".")
            bad = [i for i, name in enumerate(names) if not _is_free(name, None if i else kind)]
            if not bad:
                continue
            held, rest = ".".join(names[: bad[-1] + 1]), names[bad[-1] + 1 :]
            if held not in known:
                known[held] = _held_by_free_name(root, held, kind)
            node.target = ".".join((known[held], *rest))


def _held_by_free_name(root: nn.Module, path: str, kind: type[fx.GraphModule]) -> str:
    held, stem = attribute(root, path), re.sub(r"\W", "_", path, flags=re.ASCII)
    for table in (root._modules, root._parameters, root._buffers):
        for name, each in table.items():
            if each is held and _is_free(name, kind):
                return name
    names = (f"{stem}_{number}" for number in count(1))
    found = next(name for name in names if not hasattr(root, name) and _is_free(name, kind))
    setattr(root, found, held)
    return found


def _is_free(name: str, kind: Any) -> bool:
    """Whether code can name an attribute, of a module of a `kind`; fx asks `getattr` for '0'."""
    printed = f"_{name}".isidentifier() and name.isascii() and not keyword.iskeyword(name)
    return printed and not (kind and name in _names_of(kind))


@cache
def _names_of(kind: Any) -> frozenset[str]:
    return frozenset(dir(kind(nn.Module(), fx.Graph())))


def require_written(graph: fx.Graph) -> None:
    """Require that code can be written of a graph.

    Raises:
        CaptureError: a number, or the default of an argument, has no literal; the name of an
            argument is that by which the code names something else; or a user's function has the
            name of one of torch's, as `functools.wraps(torch.relu)` gives it.
    """
    for node in graph.nodes:
        is_function = isinstance(node.target, FunctionType)
        pretends = is_function and str(node.target.__module__).partition(".")[0] == "torch"
        own = not pretends or home_of(node) == "torch"
        require(own, f"'{node.name}' calls a function by the name of one of torch's")
        place = f"the default of '{node.target}'" if node.op == "placeholder" else f"'{node.name}'"
        require(is_literal((node.args, node.kwargs)), f"{place} holds what code cannot name")
    for name in _hiding(graph):
        require(False, f"its argument '{name}' has the name of what the code of a graph needs")


def _hiding(graph: fx.Graph) -> Iterator[str]:
    """The arguments that are read besides in the line that gives them another name."""
    inputs = {str(n.target).lstrip("*"): n.name for n in graph.find_nodes(op="placeholder")}
    renamed = [name for name, own in inputs.items() if name == "self" or name != own]
    if renamed:
        function: Any = ast.parse(graph.python_code("self").src).body[-1]
        nodes = (node for line in function.body for node in ast.walk(line))
        read = Counter(node.id for node in nodes if isinstance(node, ast.Name))
        yield from (name for name in renamed if name == "self" or read[name] > 1)
