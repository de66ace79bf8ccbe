"""That -(-x) = x holds whatever stands around it."""

from __future__ import annotations

import pytest
import torch
from double_negation import fold_double_negation
from hypothesis import given, settings
from torch import fx, nn

import optimizer
from optimizer.testing import Counterexample, Spec, check_pass, check_spec, graphs, models

# Words of the kit: what the pass is for, what may stand between, and what may go wrong around it.
MOTIFS = ["neg neg", "neg dup neg", "neg out neg", "dup neg neg", "neg neg idouble", "neg neg t01"]
ALPHABET = [*MOTIFS, "neg", "linear", "relu", "relu_method_inplace", "dup", "add", "mask", "out"]


def rewritten(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    return optimizer.optimize(model, inputs, only=[fold_double_negation], level=1, check=None)


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

    assert check_spec(spec, rewritten, exact=True).report.counts() == {"fold_double_negation": 1}


def test_it_keeps_every_bit() -> None:
    check_pass(rewritten, exact=True, max_examples=100, alphabet=ALPHABET)


@settings(max_examples=50, deadline=None)
@given(graphs(alphabet=ALPHABET))
def test_it_does_so_on_graphs_that_nobody_traced(spec: Spec) -> None:
    check_spec(spec, rewritten, exact=True)


@settings(max_examples=50, deadline=None)
@given(models(alphabet=ALPHABET))
def test_it_does_so_at_other_sizes_later(spec: Spec) -> None:
    check_spec(spec, rewritten, exact=True, later=True)


def test_a_mistake_would_be_found() -> None:
    with pytest.raises(Counterexample, match="values differ"):
        check_pass(forgetful, exact=True, alphabet=ALPHABET)
