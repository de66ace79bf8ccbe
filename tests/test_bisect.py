"""`bisect` finds the one rewrite that changes an answer, and a report the first node that does."""

from __future__ import annotations

import dataclasses
import json
from itertools import chain

import pytest
import torch
from torch import nn

import optimizer
from optimizer import InputError
from optimizer.testing import Counterexample, Optimize, Spec, check_spec, randomize, untouched
from tests.internals import main
from tests.single_pass import Forward

X = torch.linspace(-1, 1, 4 * 6).reshape(4, 6)


def tower() -> nn.Module:
    """Six foldable pairs and dropouts."""
    layers = [(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout()) for _ in range(6)]
    return randomize(nn.Sequential(*chain(*layers)).eval())


@pytest.fixture
def faulty(monkeypatch):
    """Let `fold_affine` do something else at one node: `wrong`, of the node and what it gives."""

    def install(at, wrong):
        passes = optimizer.all_passes()
        [fold] = [each for each in passes if each.name == "fold_affine"]

        def apply(affine):
            return wrong(affine, fold.apply) if affine.name == at else fold.apply(affine)

        changed = dataclasses.replace(fold, apply=apply)
        every = tuple(changed if each is fold else each for each in passes)
        monkeypatch.setattr("optimizer.passes.all_passes", lambda: every)

    return install


def read_too_early(norm, fold):
    layer = norm.args[0]
    layer.args = (norm,)
    return layer


def raise_an_error(norm, fold):
    raise ValueError("a bug")


def shift_the_bias(norm, fold):
    folded = fold(norm)
    if folded is not None:
        folded.graph.owning_module.get_submodule(folded.target).bias.data.add_(1)
    return folded


@pytest.mark.parametrize("at", ["_1", "_10", "_16"])
def test_the_rewrite_at_fault_is_found(at: str, faulty) -> None:
    faulty(at, lambda norm, fold: norm.args[0])
    with untouched(model := tower()):
        found = optimizer.bisect(model, X)

    [rewrite] = found.rewrites
    assert (rewrite.name, rewrite.node) == ("fold_affine", at)
    assert found.before < 1e-6 < 1e-2 < found.after
    told = f"rewrite {found.number} changes the answer: fold_affine at '{at}' ("
    assert str(found).startswith(told)
    assert "\n" not in str(found)


@pytest.mark.parametrize("wrong", [raise_an_error, read_too_early])
def test_a_rewrite_that_raises_or_breaks_the_graph_is_found(wrong, faulty):
    faulty("_10", wrong)

    found = optimizer.bisect(tower(), X)

    assert {rewrite.name for rewrite in found.rewrites} == {"fold_affine"}
    assert found.after == float("inf")
    assert "raised" in found.reason


def test_where_nothing_is_found_it_says_why() -> None:
    branching = Forward("x + 1 if x.sum() > 0 else x - 1").eval()

    right, unknown = optimizer.bisect(tower(), X), optimizer.bisect(branching, X)

    assert not right
    assert not unknown
    assert str(right) == "no rewrite changes the answer: it is right after all of them (12)."
    assert str(unknown).startswith("it cannot be told, for nothing is rewritten: ")
    for model in (tower(), Forward("[w.raises for w in x]")):  # the other cannot be recorded
        with pytest.raises(InputError, match="rejects these example inputs"):
            optimizer.bisect(model, torch.zeros(3, 2))


def test_the_command_prints_json_without_infinity(capsys, faulty):
    faulty("bn", raise_an_error)

    main(["bisect", "toy_model", "--json"])
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["after"] == "Infinity"


def test_a_wrong_fold_is_named_at_its_node_in_the_report(faulty) -> None:
    faulty("batchnorm1", shift_the_bias)

    with pytest.raises(Counterexample) as caught:
        check_spec(Spec(("linear", "bn", "t01", "add"), (3, 3)), Optimize())

    named = "'linear0_folded' (Linear) for 'batchnorm1' (BatchNorm1d): relative"
    assert "first guilty pass: fold_affine\n" in caught.value.text()
    assert f"first divergent node: {named}" in caught.value.text()
