"""Entries that a forward adds to a dict: each result fills a cache of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer

X = torch.linspace(-1, 1, 2 * 4).reshape(2, 4)


class Cache(nn.Module):
    """Computes with what `look_up` gives, which may fill `cache`."""

    def __init__(self, look_up: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.arange(8.0))
        self.register_buffer("index", torch.tensor([3, 1, 2, 0]))
        self.register_buffer("steps", torch.ones(()))
        self.look_up, self.cache = look_up, {}

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + self.look_up(self, x)


def model_with(look_up: Callable[[Any, Tensor], Tensor]) -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Cache(look_up), nn.ReLU()).eval()


def by_device(self: Any, x: Tensor) -> Tensor:
    key = str(x.device)
    if key not in self.cache:
        self.cache[key] = self.bias[self.index]
    return self.cache[key]


def by_two_keys(self: Any, x: Tensor) -> Tensor:
    return x * by_device(self, x) + by_device(self, x * 2)


def by_name(self: Any, x: Tensor) -> Tensor:
    if not self.cache:
        self.cache["bias"] = self.bias[self.index]
    return self.cache["bias"]


RECORDED = {"by device": by_device, "by two keys": by_two_keys, "by name": by_name}


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("case", RECORDED)
def test_what_is_around_a_cache_of_a_constant_is_optimized(case: str, filled: bool) -> None:
    model = model_with(RECORDED[case])
    expected = model(X)  # with gradients, which the entry keeps
    if not filled:
        model[2].cache.clear()
    before = dict(model[2].cache)

    fast: Any = optimizer.optimize(model, X, level=1)

    assert "fold_affine" in fast.report.counts()
    assert model[2].cache == before
    torch.testing.assert_close([fast(X), fast(X)], [expected, expected])


def answer_of_the_second_call(self: Any, x: Tensor) -> Tensor:
    scale = 2 if self.cache else 1
    return by_name(self, x) * scale


def of_the_input(self: Any, x: Tensor) -> Tensor:
    if "first" not in self.cache:
        self.cache["first"] = x.sum(0)
    return self.cache["first"]


def drawn(self: Any, x: Tensor) -> Tensor:
    if "noise" not in self.cache:
        self.cache["noise"] = torch.rand(4) + self.steps
    return self.cache["noise"]


def written(self: Any, x: Tensor) -> Tensor:
    return by_name(self, x).add_(1)


def of_a_counter(self: Any, x: Tensor) -> Tensor:
    self.steps.add_(1)
    if "steps" not in self.cache:
        self.cache["steps"] = self.steps * 2
    return self.cache["steps"]


def of_two_values(self: Any, x: Tensor) -> Tensor:
    first, second = str(x.device), str((x * 2).device)
    if first not in self.cache:
        self.cache[first] = self.bias[self.index]
    if second not in self.cache:
        self.cache[second] = self.bias[:4]
    return self.cache[second]


def counted(self: Any, x: Tensor) -> Tensor:
    self.cache["calls"] = self.cache.get("calls", 0) + 1
    return by_device(self, x) * self.cache["calls"]


def counted_apart(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return x * self.calls + by_device(self, x)


def replaced(self: Any, x: Tensor) -> Tensor:
    self.cache["bias"] = self.cache.get("bias", self.bias[:4]) + self.bias[:4]
    return self.cache["bias"]


CALLED = {
    "another answer once it is there": answer_of_the_second_call,
    "a value of the first input": of_the_input,
    "a random value": drawn,
    "a value that is written": written,
    "a value of what is written": of_a_counter,
    "two values under what is one key": of_two_values,
    "a count beside it": counted,
    "a count in an attribute": counted_apart,
    "a sum that grows": replaced,
}


@pytest.mark.parametrize("case", CALLED)
def test_a_cache_that_is_state_answers_as_in_eager(case: str) -> None:
    model, reference = model_with(CALLED[case]), model_with(CALLED[case])
    reference.load_state_dict(model.state_dict())

    fast: Any = optimizer.optimize(model, X, level=1)

    assert model[2].cache == {}
    with torch.no_grad():
        for x in (X, -X, X + 1):
            torch.manual_seed(0)
            actual = fast(x)
            torch.manual_seed(0)
            torch.testing.assert_close(actual, reference(x))


class Giving(Cache):
    """Gives the entry away, which is one tensor in all calls."""

    def forward(self, x: Tensor) -> Any:
        return x + 1, self.look_up(self, x)


def test_an_entry_that_is_returned_is_one_tensor_in_all_calls() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Giving(by_device)).eval()

    fast: Any = optimizer.optimize(model, X, level=1)

    assert fast(X)[1] is fast(X)[1]


def test_an_entry_from_before_the_weights_changed_stays() -> None:
    model = model_with(by_device)
    with torch.no_grad():
        model(X)
        model[2].bias.mul_(3)
        expected = model(X)

    fast: Any = optimizer.optimize(model, X, check=None, level=1)

    torch.testing.assert_close(fast(X), expected)


def test_without_example_inputs_nothing_is_known_of_an_entry() -> None:
    fast: Any = optimizer.optimize(model := model_with(by_device), level=1)

    assert fast.report.remarks[-1].startswith("left as it is: it writes a traced value as text")
    torch.testing.assert_close(fast(X), model(X))
