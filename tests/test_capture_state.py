"""State that does not show, or that others hold, is neither baked in nor left changed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import optimizer
from tests.single_pass import Forward

X = torch.linspace(-1, 1, 12).reshape(3, 4)
Function = Callable[[Any, Tensor], Any]
STEPS = [0]


class Secretive:
    """Does not say what it holds."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __getstate__(self) -> None:
        return None

    def step(self) -> int:
        self.calls += 1
        return self.calls


secretive = Secretive()


def scaled_by(function: Function, *, behind: bool = True) -> nn.Module:
    """A model that scales by what a function gives, which may keep state anywhere."""
    model: nn.Module = Forward(lambda m, x: m.layer(x) * function(m, x), layer=nn.Linear(4, 4))
    return (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), model) if behind else model).eval()


def sequence(model: Any) -> list[Tensor]:
    with torch.no_grad():
        return [model(X).clone() for _ in range(7)]


def stepped(x: Tensor) -> Tensor:
    STEPS[0] += 1
    return x * STEPS[0]


def test_the_code_of_a_graph_may_keep_state() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(stepped, (graph.placeholder("x"),)))
    model = nn.Sequential(nn.Linear(4, 4), fx.GraphModule(nn.Module(), graph)).eval()
    expected = sequence(model)
    STEPS[0] = 0

    fast = optimizer.optimize(model, X, level=1)

    torch.testing.assert_close(sequence(fast), expected)


def test_what_lay_in_memory_is_no_constant() -> None:
    model = Forward("x * torch.empty(4).nan_to_num(1.0).clamp(1.0, 1.0)").eval()

    graph = optimizer.capture(model, X).graph

    assert torch.empty in {node.target for node in graph.nodes}


def more_each_time(m: Any, x: Tensor) -> Tensor:
    for _ in range(1 + secretive.step() % 4):
        x = x + 1.0
    return x


def less_each_time(m: Any, x: Tensor) -> Tensor:
    for _ in range(4 - secretive.step() % 4):
        x = x + 1.0
    return x


HIDDEN: dict[str, Function] = {
    "a number": lambda m, x: secretive.step(),
    "a tensor": lambda m, x: torch.tensor([float(secretive.step())]),
    "a number and NaN": lambda m, x: (
        torch.tensor([float("nan"), float(secretive.step())]).nan_to_num().sum()
    ),
    "more steps": more_each_time,
    "less steps": less_each_time,
}


@pytest.mark.parametrize("behind", [True, False], ids=["child", "model"])
@pytest.mark.parametrize("name", HIDDEN)
def test_state_that_does_not_show_is_not_recorded(name: str, behind: bool) -> None:
    model = scaled_by(HIDDEN[name], behind=behind)

    fast = optimizer.optimize(model, X, level=1, check=None)

    assert "it reaches secretive, a Secretive" in fast.report.remarks[0]
    first, second = sequence(fast)[:2]
    assert not torch.equal(first, second)


@functools.lru_cache
def cached(number: int) -> Tensor:
    return torch.rand(number)


def test_no_traced_value_stays_in_the_cache_of_a_function() -> None:
    model = scaled_by(lambda m, x: cached(4), behind=False)

    optimizer.optimize(model, X, level=1, check=None)

    assert isinstance(model(X), Tensor)


GLOBAL = torch.ones(4)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_tensor_outside_the_module_is_part_of_the_snapshot(level: int) -> None:
    function = lambda m, x: m.layer(x) * GLOBAL + x.relu() * GLOBAL  # noqa: E731
    model = Forward(function, layer=nn.Linear(4, 4)).eval()
    fast = optimizer.optimize(model, X, level=level)
    before = model(X).detach()

    GLOBAL.mul_(3)
    after = fast(X)
    GLOBAL.div_(3)

    torch.testing.assert_close(after.detach(), before)


SYSTEM = random.SystemRandom()


class Unwilling:
    """What raises when it is asked for its state."""

    scale = 2.0

    @property
    def __dict__(self) -> dict[str, Any]:
        raise RuntimeError("no")


@dataclass(frozen=True, slots=True)
class Frozen:
    """What may not be put back, and need not be."""

    scale: float = 2.0


UNWILLING, FROZEN = Unwilling(), Frozen()


def of_the_frozen(m: Any, x: Tensor) -> float:
    STEPS[0] += 1
    return FROZEN.scale


UNTOLD: dict[str, Function] = {
    "system": lambda m, x: 1 + 0 * SYSTEM.random(),
    "unwilling": lambda m, x: UNWILLING.scale,
    "frozen": of_the_frozen,
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_does_not_tell_or_take_its_state_raises_nothing(name: str) -> None:
    STEPS[0], model = 0, scaled_by(UNTOLD[name])

    fast = optimizer.optimize(model, X, level=1)

    assert STEPS == [0]
    torch.testing.assert_close(fast(X), model(X))


class Tally:
    """An object that a hook writes to."""

    count = 0


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_a_hook_writes_is_put_back(level: int) -> None:
    calls, seen, tally = 0, list[Tensor](), Tally()

    def counting(module: nn.Module, given: Any, result: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        tally.count += 1
        seen.append(result)
        return result * calls

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    model[0].register_forward_hook(counting)

    optimizer.optimize(model, torch.ones(2, 4), level=level, tune_seconds=0.0)

    assert (calls, seen, vars(tally)) == (0, [], {})
