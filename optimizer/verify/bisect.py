"""Which single rewrite of which pass changes an answer: the passes under a budget, halved."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from torch import nn

from optimizer.core.context import undisturbed
from optimizer.core.errors import CaptureError
from optimizer.core.inputs import Call, ExampleInputs, as_call, require_module
from optimizer.core.node import clean
from optimizer.core.report import Rewrite
from optimizer.frontend.symbolic import capture_call, leaves_nothing_behind
from optimizer.passes import select
from optimizer.rewrite.contract import Pass
from optimizer.rewrite.pipeline import FaultyPassError, Pipeline
from optimizer.verify.equivalence import (
    Answer,
    Difference,
    answer,
    compare_answers,
    largest_error,
    reference,
)


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
            found = ", ".join(map(_described, self.rewrites))
            head = f"rewrite {self.number} changes the answer: {found}"
        return f"{head}; relative error {self.before:.2g} -> {self.after:.2g}: {self.reason}"


def _described(rewrite: Rewrite) -> str:
    node = f" at '{rewrite.node}'" if rewrite.node else ""
    source = f" ({rewrite.source})" if rewrite.source else ""
    return f"{rewrite.name}{node}{source}"


def bisect(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    level: int = 2,
    only: Iterable[str | Pass] | None = None,
    disable: Iterable[str] = (),
) -> Culprit:
    """The first rewrite found that makes the answer wrong, and no longer the model's own.

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
            return _culprit(model, call, passes)
    except CaptureError as error:
        return Culprit(None, reason=f"it cannot be told, for nothing is rewritten: {error}.")


class _Trial(NamedTuple):
    """What the first rewrites, up to some number of them, make of the answer."""

    rewrites: list[Rewrite]
    steps: int
    error: float
    difference: Difference | None


def _culprit(model: nn.Module, call: Call, passes: tuple[Pass, ...]) -> Culprit:
    itself = leaves_nothing_behind(capture_call(model, call))
    expected = reference(model, call, itself=itself)
    trial = cache(partial(_trial, model, call, passes, expected))
    recorded, whole = trial(0), trial(None)
    if recorded.difference:
        return Culprit(0, (), 0.0, recorded.error, str(recorded.difference))
    if not whole.difference:
        told = f"no rewrite changes the answer: it is right after all of them ({whole.steps})."
        return Culprit(None, reason=told)
    wrong = bisect_left(range(whole.steps), True, 1, key=lambda most: bool(trial(most).difference))
    good, bad = trial(wrong - 1), trial(wrong)
    new = tuple(bad.rewrites[len(good.rewrites) :])
    return Culprit(wrong, new, good.error, bad.error, str(bad.difference))


def _trial(
    model: nn.Module, call: Call, passes: tuple[Pass, ...], expected: Answer, budget: int | None
) -> _Trial:
    pipeline = Pipeline(capture_call(model, call), budget=budget)
    try:
        pipeline.run(passes)
        clean(pipeline.module)
        actual = answer(pipeline.module, call)
    except Exception as error:  # a broken graph may raise anything
        faulty = [Rewrite(error.name, "", "")] if isinstance(error, FaultyPassError) else []
        reason = str(error) if faulty else f"raised {type(error).__name__}: {error}"
        failed = Difference("output", math.inf, reason)
        return _Trial(pipeline.fired + faulty, pipeline.steps + len(faulty), math.inf, failed)
    exact = all(each.numerics == "exact" for each in passes)
    found = compare_answers(model, call, expected, actual, exact=exact)
    return _Trial(pipeline.fired, pipeline.steps, largest_error(expected, actual), found)
