"""`optimizer.check`: the answers compared, and the first value that is not what it stands for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

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

Told: TypeAlias = tuple[str, Any]  # a node as text, and what it gave or the error it raised


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
        pure = False
        with suppress(CaptureError):
            pure = leaves_nothing_behind(capture_call(model, call))
        expected = reference(model, call, itself=pure, draws=not pure)
        for remark in incomparable(expected.output):
            warnings.warn(f"output{remark}", OptimizerWarning, stacklevel=2)
        actual = answer(fast, call, draws=not pure)
        if found := compare_answers(model, call, expected, actual, exact=False):
            raise EquivalenceError(f"{found}{_first_divergence(model, fast, call)}.")


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


def first_divergence(
    expected: Mapping[str, Told], actual: Mapping[str, Told], *, exact: bool = False
) -> str:
    """The first node of the other graph, in its order, that differs, and how; or empty."""
    for name, (node, result) in actual.items():
        original, old = expected.get(name, (node, None))
        told = node if original == node else f"{node} for {original}"
        if isinstance(result, Exception):
            return f"{told}: raised {result!r}"
        found = difference(Answer(old, ()), Answer(result, ()), exact=exact)
        if found and name in expected:
            return f"{told}: {found.reason}"
    return ""


def values(module: fx.GraphModule, call: Call) -> dict[str, Told]:
    """What each node gives in one call, up to an error, by the node that it stands for."""
    found: dict[str, Told] = {}

    def keep(node: fx.Node, run: Callable[[fx.Node], Any]) -> Any:
        name, text = node.meta.get("stands_for", node.name), f"'{node.name}' ({describe(node)})"
        try:
            result = run(node)
            found[name] = text, map_tensors(torch.clone, result)
        except Exception as error:
            found[name] = text, error
            raise
        return result

    recorder = NodeByNode(structural_copy(module), call.copied(), keep)
    with torch.no_grad(), own_random_numbers(), suppress(Exception):  # of a broken graph, any
        recorder.run()
    return found


class NodeByNode(fx.Interpreter):
    """Run a graph for one call; a node's value is what `around` makes of it and what runs it."""

    def __init__(self, module: fx.GraphModule, call: Call, around: Callable[..., Any]) -> None:
        super().__init__(module)
        self.extra_traceback = False  # it would be told as part of an error
        names = (str(node.target) for node in module.graph.find_nodes(op="placeholder"))
        self.given = dict(zip(names, call.args, strict=False)) | call.kwargs
        self.around = around

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.given.get(target, args[0] if args else None)

    def run_node(self, n: fx.Node) -> Any:
        return self.around(n, super().run_node)
