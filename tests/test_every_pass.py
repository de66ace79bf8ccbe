"""What holds of every pass: a new one is held to it by being there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer.testing import MOTIFS, Spec, assert_equivalent
from tests.internals import GUARDS, PHASES, callee, fuse, select, whole_graph
from tests.single_pass import optimized_by, rows

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
def test_it_is_explained_with_equation_and_argument_and_its_level_follows(name: str) -> None:
    levels = [name in {each.name for each in select(level, None, ())} for level in (0, 1)]
    lines = (PASSES[name].apply.__doc__ or "").strip().split("\n")
    explanation = optimizer.explain(name)

    assert re.fullmatch(r"[A-Z].*[^.\s]\.", lines[0])
    assert not re.search(r"[.;!?]\s", lines[0])
    assert len(lines[0]) <= 100
    assert " -> " in explanation.split("\n\n")[1] or name in WITHOUT_EQUATION
    assert lines[0] in explanation
    assert PASSES[name].numerics in explanation
    assert len(lines) > 2
    assert levels == [PASSES[name].numerics == "exact", True]


UNSAFE = {
    "no argument for its safety": ("exact", "simplify", None, "idle has no docstring"),
    "misspelled": ("exakt", "simplify", "It.", "pass idle: 'exakt' does not exist"),
    "no such phase": ("exact", "Fold", "It.", "pass idle: 'Fold' does not exist"),
}


@rows("numerics phase summary reason", UNSAFE)
def test_what_is_unsafe_or_would_never_run_cannot_be_declared(numerics, phase, summary, reason):
    def idle(graph):
        return []

    idle.__doc__ = summary
    with pytest.raises(optimizer.PassError, match=reason):
        whole_graph(numerics=numerics, phase=phase)(idle)
