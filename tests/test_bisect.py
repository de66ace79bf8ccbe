"""`bisect` finds the one rewrite that changes an answer, whatever the others are."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer import InputError
from optimizer.__main__ import main
from optimizer.core.inputs import as_call
from optimizer.frontend.symbolic import capture_call
from optimizer.passes import select
from optimizer.rewrite.pipeline import Pipeline

X = torch.linspace(-1, 1, 4 * 6).reshape(4, 6)


class Tower(nn.Module):
    """Six foldable pairs, a dead branch and dropouts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(6))
        self.dropout = nn.Dropout()
        for norm in self.norms:
            nn.init.normal_(norm.running_mean)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            torch.exp(x)
            x = self.dropout(norm(layer(x)))
        return x


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let `fold_affine` do something else at one node."""

    def install(at: str, wrong: Callable[..., Any]) -> None:
        passes = optimizer.all_passes()
        [fold] = [each for each in passes if each.name == "fold_affine"]

        def apply(affine: Any) -> Any:
            chosen = affine.name == at
            return wrong(affine.args[0], affine) if chosen else fold.apply(affine)

        changed = dataclasses.replace(fold, apply=apply)
        every = tuple(changed if each is fold else each for each in passes)
        monkeypatch.setattr("optimizer.passes.all_passes", lambda: every)

    return install


def forget_the_norm(layer: Any, norm: Any) -> Any:
    return layer


def read_too_early(layer: Any, norm: Any) -> Any:
    layer.args = (norm,)
    return layer


def raise_an_error(layer: Any, norm: Any) -> Any:
    raise ValueError("a bug")


@pytest.mark.parametrize("number", range(6))
def test_the_rewrite_at_fault_is_found(number: int, faulty: Callable[..., None]) -> None:
    faulty(f"norms_{number}", forget_the_norm)

    found = optimizer.bisect(Tower(), X)

    assert found is not None
    [rewrite] = found.rewrites
    assert (rewrite.name, rewrite.node) == ("fold_affine", f"norms_{number}")
    assert rewrite.source.startswith("test_bisect.py:")
    assert found.before < 1e-6 < 1e-2 < found.after
    told = f"rewrite {found.number} changes the answer: fold_affine at 'norms_{number}' ("
    assert str(found).startswith(told)
    assert "\n" not in str(found)


@pytest.mark.parametrize("wrong", [raise_an_error, read_too_early])
def test_a_rewrite_that_raises_or_breaks_the_graph_is_found(
    wrong: Callable[..., Any], faulty: Callable[..., None]
) -> None:
    faulty("norms_3", wrong)

    found = optimizer.bisect(Tower(), X)

    assert found is not None
    assert {rewrite.name for rewrite in found.rewrites} == {"fold_affine"}
    assert found.after == float("inf")
    assert "raised" in found.reason


def test_a_budget_makes_the_first_rewrites_of_all() -> None:
    passes = select(1, ["eliminate_dead_code", "remove_identities", "fold_affine"], ())

    def fired(budget: int | None) -> list[Any]:
        module = capture_call(Tower(), as_call(X))
        pipeline = Pipeline(module, budget=budget)
        with torch.no_grad():
            pipeline.run(passes)
        assert budget is None or pipeline.steps == budget
        return pipeline.fired

    every = fired(None)
    some = [fired(budget) for budget in range(14)]

    assert len({rewrite.name for rewrite in every}) == 3
    assert some[0] == []
    assert some[13] == every
    for few, more in pairwise(some):
        assert every[: len(few)] == few
        assert len(more) - len(few) == (6 if "exp" in more[-1].node else 1)


def test_nothing_is_found_where_all_is_right() -> None:
    found = optimizer.bisect(Tower(), X)

    assert not found
    assert str(found) == "no rewrite changes the answer: it is right after all of them (13)."


def test_the_callers_model_is_not_touched(faulty: Callable[..., None]) -> None:
    faulty("norms_3", forget_the_norm)
    model = Tower()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    optimizer.bisect(model, X)

    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_wrong_recording_is_number_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture_another(model: nn.Module, call: Any) -> Any:
        return optimizer.capture(nn.Sequential(nn.Tanh()), call.args)

    monkeypatch.setattr("optimizer.verify.check.capture_call", capture_another)

    found = optimizer.bisect(nn.ReLU().eval(), X)

    assert found is not None
    assert (found.number, found.rewrites) == (0, ())
    assert found
    assert str(found).startswith("recording the model changes the answer, before any rewrite; ")


class Branching(nn.Module):
    """What cannot be recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_bad_input_is_a_typed_error() -> None:
    with pytest.raises(InputError, match="rejects these example inputs"):
        optimizer.bisect(Tower(), torch.zeros(3, 2))


def test_where_it_cannot_be_told_it_says_so() -> None:
    found = optimizer.bisect(Branching(), X)

    assert not found
    assert str(found).startswith("it cannot be told, for nothing is rewritten: ")
    assert "control flow" in str(found)


def test_the_command_prints_the_rewrite(
    capsys: pytest.CaptureFixture[str], faulty: Callable[..., None]
) -> None:
    assert main(["bisect", "toy_model"]) == 0
    assert "toy_model: no rewrite changes the answer: " in capsys.readouterr().out

    faulty("bn", forget_the_norm)

    assert main(["bisect", "toy_model"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("toy_model: rewrite 1 changes the answer: fold_affine at 'bn' (")
    assert "relative error 0 -> " in out

    assert main(["bisect", "toy_model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rewrites"][0]["node"] == "bn"


def test_json_has_no_infinity(
    capsys: pytest.CaptureFixture[str], faulty: Callable[..., None]
) -> None:
    faulty("bn", raise_an_error)

    main(["bisect", "toy_model", "--json"])

    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["after"] == "Infinity"
