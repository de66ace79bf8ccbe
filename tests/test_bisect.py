"""`bisect` finds the one rewrite that changes an answer, and a report the first node that does."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import optimizer
from optimizer import InputError
from optimizer.__main__ import main
from optimizer.core.inputs import as_call
from optimizer.testing import Counterexample, Optimize, Spec, check_spec, untouched
from optimizer.testing._locate import first_divergent_node
from optimizer.verify.check import first_divergence, values
from tests.single_pass import Forward, function_of, rows

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
    """Let `fold_affine` do something else at one node: `wrong`, of the node and what it gives."""

    def install(at: str, wrong: Callable[..., Any]) -> None:
        passes = optimizer.all_passes()
        [fold] = [each for each in passes if each.name == "fold_affine"]

        def apply(affine: Any) -> Any:
            return wrong(affine, fold.apply) if affine.name == at else fold.apply(affine)

        changed = dataclasses.replace(fold, apply=apply)
        every = tuple(changed if each is fold else each for each in passes)
        monkeypatch.setattr("optimizer.passes.all_passes", lambda: every)

    return install


def forget_the_norm(norm: Any, fold: Any) -> Any:
    return norm.args[0]


def read_too_early(norm: Any, fold: Any) -> Any:
    layer = norm.args[0]
    layer.args = (norm,)
    return layer


def raise_an_error(norm: Any, fold: Any) -> Any:
    raise ValueError("a bug")


def shift_the_bias(norm: Any, fold: Any) -> Any:
    folded = fold(norm)
    if folded is not None:
        folded.graph.owning_module.get_submodule(folded.target).bias.data.add_(1)
    return folded


@pytest.mark.parametrize("number", range(6))
def test_the_rewrite_at_fault_is_found(number: int, faulty: Callable[..., None]) -> None:
    faulty(f"norms_{number}", forget_the_norm)
    with untouched(model := Tower()):
        found = optimizer.bisect(model, X)

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


@rows(
    "model words",
    {
        "all is right": (
            Tower(), "no rewrite changes the answer: it is right after all of them (13).",
        ),
        "what cannot be recorded": (
            Forward("x + 1 if x.sum() > 0 else x - 1").eval(),
            "it cannot be told, for nothing is rewritten: its control flow",
        ),
    },
)  # fmt: skip
def test_where_nothing_is_found_it_says_why(model: nn.Module, words: str) -> None:
    found = optimizer.bisect(model, X)

    assert not found
    assert words in str(found).replace("left as it is: ", "")


def test_a_wrong_recording_is_number_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture_another(model: nn.Module, call: Any) -> Any:
        return optimizer.capture(nn.Sequential(nn.Tanh()), call.args)

    monkeypatch.setattr("optimizer.verify.check.capture_call", capture_another)

    found = optimizer.bisect(nn.ReLU().eval(), X)

    assert found
    assert (found.number, found.rewrites) == (0, ())
    assert str(found).startswith("recording the model changes the answer, before any rewrite; ")


def test_bad_input_is_a_typed_error() -> None:
    with pytest.raises(InputError, match="rejects these example inputs"):
        optimizer.bisect(Tower(), torch.zeros(3, 2))


def test_the_command_prints_the_rewrite_and_json_without_infinity(
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

    faulty("bn", raise_an_error)

    main(["bisect", "toy_model", "--json"])
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["after"] == "Infinity"


SPEC = Spec(("linear", "bn", "t01", "add"), (3, 3))


def located(subject: Any) -> str:
    return first_divergent_node(SPEC, subject, exact=False, dtype=torch.float64)


def test_a_wrong_fold_is_named_at_its_node_in_the_report(faulty: Callable[..., None]) -> None:
    faulty("batchnorm1", shift_the_bias)

    with pytest.raises(Counterexample) as caught:
        check_spec(SPEC, Optimize())

    named = "'linear0_folded' (Linear) for 'batchnorm1' (BatchNorm1d): relative"
    assert "first guilty pass: fold_affine\n" in caught.value.text()
    assert f"first divergent node: {named}" in caught.value.text()


LEAVE_OUT = "n.replace_all_uses_with(n.args[0]); n.graph.erase_node(n)"
# A node of a trace, what is done to it, and what is told.
DIVERGED = {
    "a right value before the wrong one is not named": (
        "add", "n.target = torch.sub", "'add' (torch.sub) for 'add' (operator.add): rel",
    ),
    "a value that is left out shows where it is read": (
        "batchnorm1", LEAVE_OUT, "'transpose' (.transpose): relative error",
    ),
    "a node that raises is named": (
        "transpose", "n.args = (*n.args[:2], 7)", "'transpose' (.transpose): raised IndexError(",
    ),
    "all that can be compared agrees": (
        "add", "pass",
        "none: 6 of the 6 nodes stand for one of the model's, and agree with it here",
    ),
}  # fmt: skip


@rows("name change told", DIVERGED)
def test_the_first_node_that_differs_is_told(name: str, change: str, told: str) -> None:
    def changed(model: nn.Module, inputs: Any) -> nn.Module:
        traced = fx.symbolic_trace(copy.deepcopy(model))
        (node,) = (each for each in traced.graph.nodes if each.name == name)
        function_of("n", f"{change}; return n")(node)
        traced.recompile()
        return traced

    assert located(changed).startswith(told)


def test_it_says_so_where_there_are_no_two_graphs() -> None:
    def raises(model: nn.Module, inputs: Any) -> nn.Module:
        raise RuntimeError("planted")

    assert located(raises) == "none, for there are no two graphs: RuntimeError"
    assert located(lambda model, inputs: nn.Tanh()) == "none, for there are no two graphs"


def test_rounding_is_a_divergence_only_where_bits_count_and_what_has_no_like_is_none() -> None:
    def run(layer: nn.Module) -> Any:
        return values(fx.symbolic_trace(layer), as_call(torch.eye(2) / 2))

    rounded = {k: (node, y + 1e-7) for k, (node, y) in run(nn.Tanh()).items()}

    assert first_divergence(run(nn.Tanh()), rounded) == ""
    assert first_divergence(run(nn.Tanh()), rounded, exact=True).startswith("'input_1' ")
    other = first_divergence(run(nn.Sequential(nn.ReLU())), run(nn.Tanh()))
    assert other.startswith("'output' (output): relative error")
