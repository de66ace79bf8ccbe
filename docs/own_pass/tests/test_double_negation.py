"""That -(-x) = x holds whatever stands around it."""

from __future__ import annotations

import pytest
import torch
from double_negation import fold_double_negation
from hypothesis import given, settings
from torch import fx, nn

import optimizer
from optimizer.testing import (
    Counterexample,
    Motif,
    Optimize,
    Spec,
    check_pass,
    check_spec,
    graphs,
)

# In words of the kit: what the pass must rewrite, and what comes close to it.
MOTIF = Motif(
    fires=("neg neg linear", "neg_torch neg relu"),
    near=("neg neg t01", "neg dup neg mul", "dup neg neg swap idouble_statement add"),
)
WORDS = (*MOTIF.fires, *MOTIF.near_misses(), "linear", "relu", "idouble_statement", "dup", "add")


def forgetful(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    """A mistake: one negation of the two is left standing."""
    graph = fx.symbolic_trace(model)
    for node in graph.graph.nodes:
        if "neg" in str(node.target) and "neg" in str(node.args[0]):
            node.replace_all_uses_with(node.args[0])
    graph.recompile()
    return graph


def test_it_fires() -> None:
    spec = Spec(("neg", "neg", "linear"))
    subject = Optimize(only=(fold_double_negation,))

    assert check_spec(spec, subject, exact=True).report.counts() == {"fold_double_negation": 1}


def test_it_keeps_the_answer() -> None:
    check_pass(fold_double_negation, MOTIF)


@settings(max_examples=50, deadline=None)
@given(graphs(alphabet=WORDS))
def test_it_does_so_together_with_the_other_passes(spec: Spec) -> None:
    every = Optimize(only=(*optimizer.all_passes(), fold_double_negation))
    check_spec(spec, every, later=True)


def test_a_mistake_would_be_found() -> None:
    with pytest.raises(Counterexample, match="values differ"):
        check_pass(forgetful, "neg neg linear", alphabet=WORDS)
