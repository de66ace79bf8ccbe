"""`optimizer.check`: the answers compared, and the first value that is not what it stands for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from optimizer.core.context import own_random_numbers, undisturbed
from optimizer.core.copy import structural_copy
from optimizer.core.errors import CaptureError, EquivalenceError, OptimizerWarning
from optimizer.core.inputs import Call, ExampleInputs, as_call, map_tensors, require_module
from optimizer.core.node import describe
from optimizer.frontend.symbolic import capture, capture_call, leaves_nothing_behind
from optimizer.verify.equivalence import Answer, answer, compare_answers, difference, reference
from optimizer.verify.leaves import incomparable


def check(model: nn.Module, fast: nn.Module, example_inputs: ExampleInputs) -> None:
    """Require that two modules give the same answer.

    Same structure, shapes, dtypes and devices; the same NaN and inf; values that differ by no
    more than rounding (relative to the largest value of each output: 1e-9 in float64, 1e-4 in
    float32, 1e-2 in float16, 5e-2 in bfloat16; beyond that, by a comparison of both with the
    model in float64); and inputs left in the same state.

    `model` itself is called where that is sure to leave nothing behind, and else a copy of it. A
    warning names what cannot be compared, such as a generator.

    Raises:
        EquivalenceError: they differ; names the output, the error and the first node at fault.
        InputError: an argument cannot be used, or `model` rejects the inputs.
        CaptureError: one of them cannot be copied, and so not be called.
    """
    call, model, fast = as_call(example_inputs), require_module(model), require_module(fast)

    with undisturbed():
        pure = _leaves_nothing_behind(model, call)
        expected = reference(model, call, itself=pure, draws=not pure)
        for remark in incomparable(expected.output):
            warnings.warn(f"output{remark}", OptimizerWarning, stacklevel=2)
        actual = answer(fast, call, draws=not pure)
        if found := compare_answers(model, call, expected, actual, exact=False):
            raise EquivalenceError(f"{found}{_first_divergence(model, fast, call)}.")


def _leaves_nothing_behind(model: nn.Module, call: Call) -> bool:
    try:
        return leaves_nothing_behind(capture_call(model, call))
    except CaptureError:
        return False


def _first_divergence(model: nn.Module, fast: nn.Module, call: Call) -> str:
    """Where the graphs part, if both are graphs."""
    if not isinstance(fast, fx.GraphModule):
        return ""
    try:
        found = first_divergence(
            values(capture(model, call.kwargs or call.args), call), values(fast, call)
        )
    except CaptureError:
        return ""
    return f"; the first value to differ is {found}" if found else ""


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
