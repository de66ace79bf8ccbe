"""A wrong candidate is told by the first node that differs from what it stands for."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import fx, nn

import optimizer
from optimizer.core.inputs import as_call
from optimizer.testing import Counterexample, Optimize, Spec, check_spec
from optimizer.testing._locate import first_divergent_node
from optimizer.verify.check import first_divergence, values

Inputs = tuple[torch.Tensor, ...]
SPEC = Spec(("linear", "bn", "t01", "add"), (3, 3))


def located(subject: Any, spec: Spec = SPEC) -> str:
    return first_divergent_node(spec, subject, exact=False, dtype=torch.float64)


def graph_without(model: nn.Module, target: str) -> fx.GraphModule:
    """A trace that gives the input of a submodule for its output."""
    traced = fx.symbolic_trace(copy.deepcopy(model))
    (node,) = (each for each in traced.graph.nodes if each.target == target)
    node.replace_all_uses_with(node.args[0])
    traced.graph.erase_node(node)
    traced.recompile()
    return traced


def test_a_wrong_fold_is_named_at_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = optimizer.all_passes()
    [fold] = [each for each in passes if each.name == "fold_affine"]

    def spoiled(affine: fx.Node) -> Any:
        folded = fold.apply(affine)
        if folded is not None:
            folded.graph.owning_module.get_submodule(folded.target).bias.data.add_(1)
        return folded

    wrong = dataclasses.replace(fold, apply=spoiled)
    every = tuple(wrong if each is fold else each for each in passes)
    monkeypatch.setattr("optimizer.passes.all_passes", lambda: every)

    with pytest.raises(Counterexample) as caught:
        check_spec(SPEC, Optimize())

    report = caught.value.text()
    assert "first guilty pass: fold_affine\n" in report
    named = (
        "first divergent node: 'linear0_folded' (Linear) for 'batchnorm1' (BatchNorm1d): relative"
    )
    assert named in report


def test_a_right_value_before_the_wrong_one_is_not_named() -> None:
    def spoils_the_sum(model: nn.Module, inputs: Inputs) -> nn.Module:
        traced = fx.symbolic_trace(model)
        (node,) = (each for each in traced.graph.nodes if each.name == "add")
        node.target = torch.sub
        traced.recompile()
        return traced

    assert located(spoils_the_sum).startswith("'add' (torch.sub) for 'add' (operator.add): rel")


def test_a_value_that_is_left_out_shows_where_it_is_read() -> None:
    found = located(lambda model, inputs: graph_without(model, "batchnorm1"))

    assert found.startswith("'transpose' (.transpose): relative error")


def test_a_node_that_raises_is_named() -> None:
    def breaks(model: nn.Module, inputs: Inputs) -> nn.Module:
        traced = fx.symbolic_trace(model)
        (node,) = (each for each in traced.graph.nodes if each.name == "transpose")
        node.args = (*node.args[:2], 7)
        traced.recompile()
        return traced

    assert located(breaks).startswith("'transpose' (.transpose): raised IndexError(")


def test_a_node_without_a_counterpart_is_not_compared() -> None:
    x = torch.eye(2)
    model = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    other = fx.symbolic_trace(nn.ModuleDict({"one": nn.Tanh()})["one"])
    graphs = [values(each, as_call(x)) for each in (model, other)]

    found = first_divergence(*graphs)

    assert found.startswith("'output' (output): relative error")


def test_rounding_is_a_divergence_only_where_bits_count() -> None:
    model = fx.symbolic_trace(nn.Tanh())
    x = torch.tensor([0.5])
    rounded = {k: (node, y + 1e-7) for k, (node, y) in run(model, x).items()}

    assert first_divergence(run(model, x), rounded) == ""
    assert first_divergence(run(model, x), rounded, exact=True).startswith("'input_1' ")


def run(module: fx.GraphModule, x: torch.Tensor) -> Any:
    return values(module, as_call(x))


def test_it_says_so_where_all_that_can_be_compared_agrees() -> None:
    found = located(lambda model, inputs: fx.symbolic_trace(model))

    assert found == "none: 6 of the 6 nodes stand for one of the model's, and agree with it here"


def test_it_says_so_where_there_are_no_two_graphs() -> None:
    def raises(model: nn.Module, inputs: Inputs) -> nn.Module:
        raise RuntimeError("planted")

    assert located(raises) == "none, for there are no two graphs: RuntimeError"
    assert located(lambda model, inputs: nn.Tanh()) == "none, for there are no two graphs"
