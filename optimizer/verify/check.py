"""`optimizer.check`: the answers compared, and the first value that is not what it stands for."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
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
        expected = values(capture(model, call.kwargs or call.args), call)
        found = first_divergence(expected, values(fast, call))
    except CaptureError:
        return ""
    return f"; the first value to differ is {found}" if found else ""


@dataclass(frozen=True)
class Value:
    """What a node gave, an error where it raised one; and the node as text."""

    node: str
    result: Any


def first_divergence(
    expected: Mapping[str, Value], actual: Mapping[str, Value], *, exact: bool = False
) -> str:
    """The first node that differs by more than rounding, what it stands for, and how; or empty.

    Args:
        expected: the `values` of the original graph.
        actual: those of the other, in whose order is looked.
        exact: whether every bit counts.
    """
    for name, value in actual.items():
        old = expected.get(name)
        told = (
            value.node if old is None or old.node == value.node else f"{value.node} for {old.node}"
        )
        if isinstance(value.result, Exception):
            return f"{told}: raised {value.result!r}"
        if old is None:
            continue
        found = difference(Answer(old.result, ()), Answer(value.result, ()), exact=exact)
        if found is not None:
            return f"{told}: {found.reason}"
    return ""


def values(module: fx.GraphModule, call: Call) -> dict[str, Value]:
    """What each node gives in one call, up to an error.

    The key is what a node stands for: the node of the original that it replaced, or its own name.
    """
    recorder = _Recorder(structural_copy(module), call.copied())
    with torch.no_grad(), own_random_numbers(), suppress(Exception):  # of a broken graph, any
        recorder.run()
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
        kept: Any = None
        try:
            result = super().run_node(n)
            kept = map_tensors(torch.clone, result)
        except Exception as error:
            kept = error
            raise
        finally:
            meaning = n.meta.get("stands_for", n.name)
            self.values[meaning] = Value(f"'{n.name}' ({describe(n)})", kept)
        return result
