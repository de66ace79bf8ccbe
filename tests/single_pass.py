"""What the tests of the passes share: models of one forward, one pass alone, what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import assert_equivalent, untouched
from tests.internals import GUARDS, callee, hold, module_of

EXACT = {each.name for each in optimizer.all_passes() if each.numerics == "exact"}
# How often a pass fires, and gives no reason where it does not; what a graph in which it fired
# calls in the end; or the reason for which it leaves the graph as it is.
Outcome: TypeAlias = int | list[Any] | tuple[Any, ...] | str


def function_of(arguments: str, text: Any, **more: Any) -> Callable[..., Any]:
    """What computes an expression, or runs statements that return something, of `more` names."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math} | more
    exec(f"def function({arguments}): {text if 'return ' in text else f'return {text}'}", names)
    return names["function"]  # type: ignore[no-any-return]


class Forward(nn.Module):
    """Runs a forward of a case, or its text, over some layers, parameters and buffers."""

    arguments = "m, x"

    def __init__(
        self, forward: Callable[..., Any] | str, **held: nn.Module | Tensor | None
    ) -> None:
        super().__init__()
        for name, value in held.items():
            hold(self, name, value)
        self.function: Any = forward if callable(forward) else function_of(self.arguments, forward)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class ForwardOfTwo(Forward):
    arguments = "m, x, z"

    def forward(self, x: Tensor, z: Tensor) -> Any:  # type: ignore[override]
        return self.function(self, x, z)


class ForwardOfThree(Forward):
    arguments = "m, q, k, v"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:  # type: ignore[override]
        return self.function(self, q, k, v)


def rows(cells: str, *tables: dict[str, Any]) -> pytest.MarkDecorator:
    """Run a test on each row of some tables by name; `cells` are the arguments that it holds."""
    found = [pytest.param(*row, id=name) for table in tables for name, row in table.items()]
    return pytest.mark.parametrize(cells.split(), found)


def texts(joined: str) -> dict[str, str]:
    """Forwards by their own names: with `;` between them, or a line each where they `return`."""
    parts = joined.split("\n" if "return " in joined else ";")
    return {text: text for each in parts if (text := " ".join(each.split()))}


def spelled(*tables: dict[Any, str], cells: str = "forward outcome") -> pytest.MarkDecorator:
    """Run a test on each text of tables from an outcome to the texts that have it."""
    table = {outcome: texts(text) for table in tables for outcome, text in table.items()}
    found = [pytest.param(each, outcome, id=each) for outcome in table for each in table[outcome]]
    return pytest.mark.parametrize(cells.split(), found)


def optimized_by(name: str, model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """What one pass makes of a model at level 1, unchecked; the model is left as it was."""
    options = {"level": 1, "check": None, "only": [name]} | options
    with untouched(model):
        return optimizer.optimize(model, inputs or None, **options)


def tried(
    name: str, model: nn.Module, inputs: tuple[Any, ...], outcome: Outcome, *later: tuple[Any, ...]
) -> Any:
    """Optimize by one pass alone, assert the outcome, and the answer in this and later calls."""
    fast = optimized_by(name, model, *inputs)
    assert_outcome(name, fast, outcome)
    exact = name in EXACT or not fast.report.fired
    for call in filter(None, (inputs, *later)):
        assert_equivalent(model, fast, call, exact=exact)
    return fast


def assert_outcome(name: str, fast: Any, outcome: Outcome) -> None:
    counts = fast.report.counts()
    reasons = [each.reason.partition(":")[0] for each in fast.report.refused]
    if isinstance(outcome, str):
        assert (counts, reasons) == ({}, [outcome])
    elif isinstance(outcome, list | tuple):
        assert (set(counts), callees(fast)) == ({name}, list(outcome))
    else:
        assert counts == ({name: outcome} if outcome else {})
        assert outcome or reasons == []


def callees(fast: Any) -> list[Any]:
    """The functions, classes and methods that a graph calls, in order, but for its guards."""
    called = [callee(node) or node.target for node in fast.graph.nodes if node.op[:4] == "call"]
    return [each for each in called if each not in GUARDS]


def layers_of(fast: Any) -> list[Any]:
    """The modules that a graph calls, in order."""
    return [module_of(node) for node in fast.graph.nodes if node.op == "call_module"]
