"""Where two graphs of one model part: the first value that is not what it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optimizer.core.context import own_random_numbers
from optimizer.core.copy import structural_copy
from optimizer.core.inputs import Call, map_tensors
from optimizer.core.node import describe
from optimizer.verify.equivalence import Answer, difference


@dataclass(frozen=True)
class Value:
    """What a node gave; an error where it raised one."""

    node: str
    operation: str
    result: Any

    def __str__(self) -> str:
        return f"'{self.node}' ({self.operation})"


@dataclass(frozen=True)
class Divergence:
    """The first node of a graph whose value differs, and what it stands for in the original.

    Attributes:
        value: of the node.
        original: what it stands for; None where it raised an error, and stands for none.
        reason: how large the difference is.
    """

    value: Value
    original: Value | None
    reason: str

    def __str__(self) -> str:
        same = self.original is None or str(self.original) == str(self.value)
        return f"{self.value}{'' if same else f' for {self.original}'}: {self.reason}"


def first_divergence(
    expected: Mapping[str, Value], actual: Mapping[str, Value], *, exact: bool = False
) -> Divergence | None:
    """The first node that differs by more than rounding, of those that have a counterpart.

    Args:
        expected: the `values` of the original graph.
        actual: those of the other, in whose order is looked.
        exact: whether every bit counts.
    """
    for name, value in actual.items():
        old = expected.get(name)
        if isinstance(value.result, Exception):
            return Divergence(value, old, f"raised {value.result!r}")
        if old is None:
            continue
        found = difference(Answer(old.result, ()), Answer(value.result, ()), exact=exact)
        if found is not None:
            return Divergence(value, old, found.reason)
    return None


def values(module: fx.GraphModule, call: Call) -> dict[str, Value]:
    """What each node gives in one call, up to an error.

    The key is what a node stands for: the node of the original that it replaced, or its own name.
    """
    recorder = _Recorder(structural_copy(module), call.copied())
    with torch.no_grad(), own_random_numbers():
        try:
            recorder.run()
        except Exception as error:  # a broken graph may raise anything
            recorder.keep(recorder.current, error)
    return recorder.values


class NodeByNode(fx.Interpreter):
    """Runs the nodes of a graph for one call, whose keywords go to the inputs of these names."""

    def __init__(self, module: fx.GraphModule, call: Call) -> None:
        super().__init__(module)
        names = (str(node.target) for node in module.graph.find_nodes(op="placeholder"))
        self.given = dict(zip(names, call.args, strict=False)) | call.kwargs

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.given.get(target, args[0] if args else None)


class _Recorder(NodeByNode):
    def __init__(self, module: fx.GraphModule, call: Call) -> None:
        super().__init__(module, call)
        self.extra_traceback = False  # it would be told as part of the error
        self.values: dict[str, Value] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        result = super().run_node(n)
        self.keep(n, map_tensors(torch.clone, result))
        return result

    def keep(self, node: fx.Node, result: Any) -> None:
        meaning = node.meta.get("stands_for", node.name)
        self.values[meaning] = Value(node.name, describe(node), result)
