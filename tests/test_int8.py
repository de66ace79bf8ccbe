"""Level 3 in 8 bits: Linear layers by torchao, within an error budget."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optimizer
from optimizer.core.inputs import Call
from optimizer.core.node import name_of_call
from optimizer.lowering import choose as _choose
from optimizer.lowering.module import LoweredModule
from optimizer.lowering.precision import in_int8
from optimizer.lowering.trace import NotStraightLineError, straight_line
from optimizer.verify.equivalence import relative_error

WIDTH = 32


@pytest.fixture(autouse=True)
def _the_last_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is not what is tested here."""

    def race(self: Any, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
        seconds = {name: 1.0 / place for place, name in enumerate(runs, 1)}
        return {"plan": 0.1, "portable": 1.0} if "plan" in runs else seconds

    monkeypatch.setattr(_choose.Times, "race", race)


def perceptron() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH, bias=False)).eval()


def rows(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, WIDTH, generator=torch.Generator().manual_seed(3))


def reduced(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    fast = optimizer.optimize(model, inputs, level=3, precision="int8", **options)
    assert isinstance(fast, LoweredModule)
    return fast


def callees(function: Any, *inputs: torch.Tensor, held: Any) -> list[str]:
    line = straight_line(function, held, Call(inputs, {}))
    module = in_int8(line.module, line.inputs)
    return [name_of_call(node) for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("sizes", [(5,), (2, 5), ()], ids=str)
def test_it_is_within_the_budget_and_not_the_models(sizes: tuple[int, ...]) -> None:
    model, x = perceptron(), rows(*sizes)
    fast = reduced(model, x)

    assert fast.report.choices[0].chosen == "int8"
    assert 1e-4 < relative_error(model(x), fast(x)) < 5e-2
    assert fast(x).dtype == torch.float32


def test_over_the_budget_nothing_is_lowered() -> None:
    model, x = perceptron(), rows(5)
    fast = reduced(model, x, error_budget=1e-4)

    assert "off by" in fast.report.choices[0].rejected["int8"]
    torch.testing.assert_close(fast(x), model(x))


def test_it_travels() -> None:
    model, x = perceptron(), rows(5)
    fast = reduced(model, x)

    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert torch.equal(other(x), fast(x))
        assert other.state_dict().keys() == fast.state_dict().keys()


def test_weights_of_another_dtype_or_that_are_computed_stay() -> None:
    weight = torch.randn(4, WIDTH)

    constant = callees(lambda x: F.linear(x, weight), rows(5), held=[weight])
    named = callees(lambda x: F.linear(x, weight=weight), rows(5), held=[weight])
    double = weight.double()
    wide = callees(lambda x: F.linear(x, double), rows(5).double(), held=[double])
    computed = callees(lambda x: F.linear(x, x + 1), rows(5), held=[])
    vector = callees(lambda x: F.linear(x, weight[0]), rows(5), held=[weight])
    assert constant == named == ["int8_linear"]
    assert "int8_linear" not in (*wide, *computed, *vector)


def test_the_code_it_was_made_of_stays() -> None:
    weight = torch.randn(4, WIDTH)
    line = straight_line(lambda x: F.linear(x, weight), [weight], Call((rows(5),), {}))
    before = line.module.code
    in_int8(line.module, line.inputs)

    assert line.module.code == before


def test_what_torchao_cannot_compute_is_left() -> None:
    weight = torch.randn(4, WIDTH)
    line = straight_line(lambda x: F.linear(x, weight), [weight], Call((rows(0),), {}))

    with pytest.raises(NotStraightLineError, match="torchao cannot compute it"):
        in_int8(line.module, line.inputs)


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "torchao" else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(optimizer.InputError, match="pip install torchao"):
        optimizer.optimize(perceptron(), rows(5), level=3, precision="int8")
