"""What holds of every pass: a new one is held to it by being there."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer.core.guards import GUARDS
from optimizer.core.node import callee
from optimizer.passes import fuse, select
from optimizer.rewrite.contract import PHASES, whole_graph
from optimizer.testing import MOTIFS, Spec, assert_equivalent, randomize
from tests.single_pass import Forward, callees, optimized_by, rows

PASSES = {each.name: each for each in optimizer.all_passes()}
WITHOUT_EQUATION = {"eliminate_dead_code"}  # which removes, and replaces nothing
each_pass = pytest.mark.parametrize("name", PASSES)


@pytest.fixture(autouse=True)
def small_operands_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "WORTHWHILE", 1)


def example(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The first program of the pass's motif."""
    spec = Spec(tuple(MOTIFS[name].fires[0].split()), MOTIFS[name].shape)
    return spec.build(dtype), tuple(spec.inputs(dtype))


def size(module: Any) -> int:
    """The number of nodes but for the guards of the inputs."""
    return sum(callee(node) not in GUARDS for node in module.graph.nodes)


def test_the_passes_run_in_the_order_of_their_phases() -> None:
    phases = [each.phase for each in PASSES.values()]

    assert phases == sorted(phases, key=PHASES.index)
    assert len(PASSES) == len(optimizer.all_passes()) >= 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@each_pass
def test_it_fires_and_keeps_its_promise_in_every_precision(name: str, dtype: torch.dtype) -> None:
    model, inputs = example(name, dtype)

    fast = optimized_by(name, model, *inputs)

    assert set(fast.report.counts()) == {name}
    assert all(rewrite.node for rewrite in fast.report.fired)
    if PASSES[name].numerics == "exact" or dtype == torch.float64:
        assert_equivalent(model, fast, inputs, exact=PASSES[name].numerics == "exact")
    optimizer.check(model, fast, inputs)


@each_pass
def test_it_leaves_no_more_nodes_and_finds_nothing_to_do_the_second_time(name: str) -> None:
    model, inputs = example(name)
    fast = optimized_by(name, model, *inputs)

    again = optimized_by(name, fast, *inputs)
    without = optimizer.optimize(model, inputs, disable=[name], check=None, level=1)

    assert again.report.fired == ()
    assert size(again) == size(fast) <= size(optimizer.capture(model, inputs))
    assert name not in without.report.counts()


@each_pass
def test_its_level_follows_from_its_numerics(name: str) -> None:
    levels = [{each.name for each in select(level, None, ())} for level in (0, 1)]

    assert [name in each for each in levels] == [PASSES[name].numerics == "exact", True]


@each_pass
def test_its_summary_is_one_sentence_and_it_is_explained_with_equation_and_argument(
    name: str,
) -> None:
    lines = (PASSES[name].apply.__doc__ or "").strip().split("\n")
    explanation = optimizer.explain(name)

    assert re.fullmatch(r"[A-Z].*[^.\s]\.", lines[0])
    assert not re.search(r"[.;!?]\s", lines[0])
    assert len(lines[0]) <= 100
    assert " -> " in explanation.split("\n\n")[1] or name in WITHOUT_EQUATION
    assert lines[0] in explanation
    assert PASSES[name].numerics in explanation
    assert len(lines) > 2


# Something for every pass, where one pass makes work for another.
OF_EACH = """
x = m.norm(m.drop(m.conv(x))); x = m.skip(x.transpose(1, 2)).transpose(2, 1); x.exp();
x = m.relu(m.skip(m.linear(x.mean(-1)))); y = x.clone(); y[x > 1] = 0.5;
return torch.relu(m.last_norm(m.last(y)))
"""


def subject() -> tuple[nn.Module, tuple[Tensor, ...]]:
    convolution = {"conv": nn.Conv1d(3, 4, 3), "norm": nn.BatchNorm1d(4, eps=0.125)}
    middle = {"drop": nn.Dropout(), "skip": nn.Identity(), "linear": nn.Linear(4, 4)}
    last = {"relu": nn.ReLU(), "last": nn.Linear(4, 5), "last_norm": nn.BatchNorm1d(5, eps=0.125)}
    model = Forward(" ".join(OF_EACH.split()), **convolution, **middle, **last)
    return randomize(model.double().eval()), (torch.randn(2, 3, 8).double(),)


def test_all_together_leave_only_what_has_to_be_computed() -> None:
    model, inputs = subject()
    shuffled: nn.Module = model

    fast = optimizer.optimize(model, inputs, level=1)
    # Generated models are tried in other orders too: see test_properties.py.
    for name in Random(0).sample(sorted(PASSES), len(PASSES)):
        shuffled = optimizer.optimize(shuffled, inputs, only=[name], check=None, level=1)

    assert len(fast.report.counts()) >= 6
    assert len(callees(fast)) <= 6
    assert_equivalent(model, fast, inputs)
    assert_equivalent(model, shuffled, inputs)


@rows(
    "numerics phase summary reason",
    {
        "no argument for its safety": ("exact", "simplify", None, "idle has no docstring"),
        "misspelled": ("exakt", "simplify", "It.", "pass idle: 'exakt' does not exist"),
        "no numerics": (None, "simplify", "It.", "pass idle: None does not exist"),
        "no such phase": ("exact", "Fold", "It.", "pass idle: 'Fold' does not exist"),
    },
)
def test_a_pass_that_is_unsafe_or_would_never_run_cannot_be_declared(
    numerics: Any, phase: Any, summary: str | None, reason: str
) -> None:
    def idle(graph: object) -> list[Any]:
        return []

    idle.__doc__ = summary
    with pytest.raises(optimizer.PassError, match=reason):
        whole_graph(numerics=numerics, phase=phase)(idle)
