"""`optimizer.check` and `optimizer.bisect`: what is wrong with an answer, and since when.

The one compares answers and finds the first node whose value differs; the other the single rewrite
that changes an answer, by bisecting how many rewrites are made.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx, nn

from optimizer.core.context import forked_rng, undisturbed
from optimizer.core.copy import structural_copy
from optimizer.core.errors import CaptureError, EquivalenceError, OptimizerWarning, raised_as
from optimizer.core.inputs import Call, ExampleInputs, as_call, map_tensors, require_module
from optimizer.core.node import arg, clean, describe, run_nodes
from optimizer.core.report import Rewrite
from optimizer.frontend.symbolic import capture_call, may_draw, writes_nothing_lasting
from optimizer.passes import select
from optimizer.rewrite.contract import Pass
from optimizer.rewrite.pipeline import FaultyPassError, Pipeline
from optimizer.verify import equivalence as oracle
from optimizer.verify.equivalence import Answer, Difference

Result: TypeAlias = tuple[str, Any]  # a node as text, and what it gave or the error it raised


def check(model: nn.Module, fast: nn.Module, example_inputs: ExampleInputs) -> None:
    """Require that two modules give the same answer.

    Same structure, shapes, dtypes and devices; the same NaN and inf; values that differ by no
    more than rounding (relative to the largest value of each output: 1e-9 in float64, 1e-4 in
    float32, 1e-2 in float16, 5e-2 in bfloat16; beyond that, by a comparison of both with the
    model in float64); and inputs left in the same state.

    `model` itself is called where that is sure to leave nothing behind, and else a copy of it. A
    warning names what cannot be compared, such as a generator.

    Raises:
        EquivalenceError: they differ, or `fast` raises; names the output, the error and the node.
        InputError: an argument cannot be used, or `model` rejects the inputs.
        CaptureError: one of them cannot be copied, and so not be called.
    """
    call, model, fast = as_call(example_inputs), require_module(model), require_module(fast)
    with undisturbed():
        recorded, pure = None, False
        with suppress(CaptureError):
            recorded = capture_call(model, call)
            pure = writes_nothing_lasting(recorded) and not may_draw(recorded)
        expected = oracle.reference(model, call, is_pure=pure, random=not pure)
        for remark in oracle.incomparable(expected.output):
            warnings.warn(f"output{remark}", OptimizerWarning, stacklevel=2)
        with raised_as(EquivalenceError, "output: raised {}."):
            actual = oracle.answer(fast, call, random=not pure)
        if part := oracle.compare_answers(model, call, expected, actual, exact=False):
            message = str(part)
            if recorded is not None and isinstance(fast, fx.GraphModule):
                where = first_divergence(values(recorded, call), values(fast, call))
                message += f"; the first value to differ is {where}" * bool(where)
            raise EquivalenceError(f"{message}.")


def first_divergence(
    expected: Mapping[str, Result], actual: Mapping[str, Result], *, exact: bool = False
) -> str:
    """Return the first node of the actual graph that differs, and how, or an empty text."""
    for name, (node, result) in actual.items():
        original, old = expected.get(name, (node, None))
        text = node if original == node else f"{node} for {original}"
        if isinstance(result, Exception):
            return f"{text}: raised {result!r}"
        part = oracle.difference(Answer(old, ()), Answer(result, ()), exact=exact)
        if part and name in expected:
            return f"{text}: {part.reason}"
    return ""


def values(module: fx.GraphModule, call: Call) -> dict[str, Result]:
    """Return the result of each node in one call, up to an error, by the node it stands for."""
    graph, (args, kwargs) = structural_copy(module, share_parameters=False).graph, call.copied()
    names = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    inputs = dict(zip(names, args, strict=False)) | kwargs
    given = {node: inputs.get(name, arg(node, 0)) for name, node in names.items()}
    results: dict[str, Result] = {}
    run = run_nodes(graph.nodes, given)
    with torch.no_grad(), forked_rng():
        for node in graph.nodes:
            name, text = node.meta.get("stands_for", node.name), f"'{node.name}' ({describe(node)})"
            try:
                results[name] = text, map_tensors(torch.clone, next(run)[1])
            except Exception as error:  # of a broken graph, any
                results[name] = text, error
                break
    return results


@dataclass(frozen=True)
class Culprit:
    """The rewrite that changes an answer; false where none was found, and a sentence in any case.

    Attributes:
        number: which of the rewrites it is, in the order in which they happen; 0 where the
            recorded graph gives another answer before any; None where none was found.
        rewrites: what it replaced. A pass over the whole graph may replace several at once.
        before, after: the largest relative error of any output without it, and with it.
        reason: what is wrong with the answer, or why none was found.
    """

    number: int | None
    rewrites: tuple[Rewrite, ...] = ()
    before: float = 0.0
    after: float = 0.0
    reason: str = ""

    def __bool__(self) -> bool:
        return self.number is not None

    def __str__(self) -> str:
        if self.number is None:
            return self.reason
        head = "recording the model changes the answer, before any rewrite"
        if self.number:
            rewrites = (
                each.name
                + f" at '{each.node}'" * bool(each.node)
                + f" ({each.source})" * bool(each.source)
                for each in self.rewrites
            )
            head = f"rewrite {self.number} changes the answer: {', '.join(rewrites)}"
        return f"{head}; relative error {self.before:.2g} -> {self.after:.2g}: {self.reason}"


def bisect(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    level: int = 2,
    only: Iterable[str | Pass] | None = None,
    disable: Iterable[str] = (),
) -> Culprit:
    """Return the first rewrite that makes the answer wrong, no longer the model's own.

    The same rewrites are made again and again, each time up to another number of them: the
    answer is right after all but the last of the culprit's number.

    Args:
        model: any module; it is not changed.
        example_inputs: on which the answer is wrong.
        level: as in `optimize`.
        only: as in `optimize`.
        disable: as in `optimize`.

    Returns:
        what prints as a sentence; false where all rewrites together leave the answer right, or
        where it cannot be told, as where the model's forward cannot be recorded.

    Raises:
        InputError: an argument cannot be used, or the model rejects the example inputs.
        PassError: there is no pass of a given name.
    """
    passes = select(level, only, disable)
    model, call = require_module(model), as_call(example_inputs)
    try:
        with undisturbed():
            expected = oracle.reference(model, call)
            trial = cache(partial(_trial, model, call, passes, expected))
            recorded, whole = trial(0), trial(None)
            if recorded.difference:
                return Culprit(0, (), 0.0, recorded.error, str(recorded.difference))
            if not whole.difference:
                reason = "no rewrite changes the answer: it is right after all of them"
                return Culprit(None, reason=f"{reason} ({whole.steps}).")
            steps = range(whole.steps)
            wrong = bisect_left(steps, True, 1, key=lambda most: bool(trial(most).difference))
            good, bad = trial(wrong - 1), trial(wrong)
            new = tuple(bad.rewrites[len(good.rewrites) :])
            return Culprit(wrong, new, good.error, bad.error, str(bad.difference))
    except CaptureError as error:
        return Culprit(None, reason=f"it cannot be told, for nothing is rewritten: {error}.")


class _Trial(NamedTuple):
    """What the first rewrites, up to some number of them, make of the answer."""

    rewrites: list[Rewrite]
    steps: int
    error: float
    difference: Difference | None


def _trial(
    model: nn.Module, call: Call, passes: tuple[Pass, ...], expected: Answer, budget: int | None
) -> _Trial:
    pipeline = Pipeline(capture_call(model, call), budget=budget)
    try:
        pipeline.run(passes)
        clean(pipeline.module)
        actual = oracle.answer(pipeline.module, call)
    except Exception as error:  # a broken graph may raise anything
        faulty = [Rewrite(error.name, "", "")] if isinstance(error, FaultyPassError) else []
        reason = str(error) if faulty else f"raised {type(error).__name__}: {error}"
        failed = Difference("output", math.inf, reason)
        return _Trial(pipeline.fired + faulty, pipeline.steps + len(faulty), math.inf, failed)
    exact = all(each.numerics == "exact" for each in passes)
    part = oracle.compare_answers(model, call, expected, actual, exact=exact)
    return _Trial(pipeline.fired, pipeline.steps, oracle.largest_error(expected, actual), part)
