"""A sum or product of large tensors is written over an operand that nobody else needs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizer.core.node import callee
from optimizer.core.ops import add_over, mul_over
from optimizer.passes import fuse
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.single_pass import Forward, assert_left_alone, optimized_by

NAME = "reuse_operands"
optimized = partial(optimized_by, NAME)


@pytest.fixture(autouse=True)
def small_tensors_are_worthwhile() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse, "WORTHWHILE", 1)
        yield


class Layers(Forward):
    """Runs a forward of a case over a few layers and a parameter of its own."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(forward)
        self.linear, self.other, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.weight = nn.Parameter(torch.empty(3, 4))


def overwritten(fast: Any) -> list[Any]:
    """For each combination in place: the function, and which operand it overwrites."""
    made = [node for node in fast.graph.nodes if node.target in (add_over, mul_over)]
    return [(callee(node), node.args[2]) for node in made]


CASES: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[Any]]] = {
    "a residual": (lambda m, x: x + m.linear(x), [(add_over, 1)]),
    "a residual, the other way": (lambda m, x: m.linear(x) + x, [(add_over, 0)]),
    "torch.add": (lambda m, x: torch.add(x, m.linear(x)), [(add_over, 1)]),
    "a gate": (lambda m, x: x.sigmoid() * m.linear(x), [(mul_over, 1)]),
    "torch.mul": (lambda m, x: torch.mul(m.linear(x), x), [(mul_over, 0)]),
    "both may be": (lambda m, x: m.linear(x) + m.other(x), [(add_over, 0)]),
    "itself": (lambda m, x: (y := m.linear(x)) + y, [(add_over, 0)]),
    "one after another": (
        lambda m, x: x + m.linear(x) * m.norm(x),
        [(mul_over, 0), (add_over, 1)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_overwrites_the_operand_that_is_not_needed(case: str) -> None:
    forward, expected = CASES[case]
    model = randomize(Layers(forward).double().eval())
    inputs = inputs_like([(3, 4)], "random", 0)

    fast = optimized(model, *inputs)

    assert overwritten(fast) == expected
    assert_equivalent(model, fast, inputs, exact=True)
    assert_equivalent(model, fast, inputs_like([(2, 5, 4)], "random", 0), exact=True)
    assert_equivalent(model, pickle.loads(pickle.dumps(fast)), inputs, exact=True)


@pytest.mark.parametrize("case", CASES)
def test_propagates_the_same_gradients(case: str) -> None:
    model = randomize(Layers(CASES[case][0]).double().eval())
    (x,) = inputs_like([(3, 4)], "random", 0)
    fast = deepcopy(optimized(model, x))

    model(x).sum().backward()
    fast(x).sum().backward()

    assert torch.equal(fast.linear.weight.grad, model.linear.weight.grad)


def two_inputs(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.linear(x) + y


class Two(Layers):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return self.function(self, x, y)  # type: ignore[call-arg]


LATER: dict[str, Callable[[], Tensor]] = {
    "alike": lambda: torch.randn(3, 4),
    "a larger batch, broadcast": lambda: torch.randn(2, 3, 4),
    "smaller, broadcast": lambda: torch.randn(4),
    "another dtype": lambda: torch.randn(3, 4, dtype=torch.float64),
    "another layout": lambda: torch.randn(4, 3).t(),
    "a number of it": lambda: torch.tensor(2.0),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
}


@pytest.mark.parametrize("case", LATER)
def test_a_later_call_may_pass_anything(case: str) -> None:
    model = randomize(Two(two_inputs).eval())
    x = torch.randn(3, 4)
    fast = optimized(model, x, torch.randn(3, 4))

    assert overwritten(fast) == [(add_over, 0)]
    assert_equivalent(model, fast, (x, LATER[case]()), exact=True)


def test_autocast_may_give_the_operands_two_dtypes() -> None:
    model = randomize(Layers(lambda m, x: m.linear(x) + m.norm(x)).eval())
    x = torch.randn(3, 4)
    fast = optimized(model, x)

    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(x), fast(x)

    assert overwritten(fast) == [(add_over, 0)]
    assert expected.dtype == actual.dtype
    assert torch.equal(expected, actual)


NEEDED = "its operands are needed elsewhere"
UNLIKE = "the operands differ in dtype, shape or layout"
SQUARE = "a gradient of a square needs its root"
SMALL = "its operands are too small for it to pay"
REFUSALS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "inputs": (lambda m, x: x + x, NEEDED),
    "a parameter": (lambda m, x: x * m.weight, NEEDED),
    "a view": (lambda m, x: x + m.linear(x).view(3, 4), NEEDED),
    "a second reader": (lambda m, x: (y := m.linear(x), x + y), NEEDED),
    "a view that is read later": (lambda m, x: (y := m.linear(x), z := y[0], x + y, z), NEEDED),
    "a result given by the caller": (lambda m, x: x * torch.add(x, 1.0, out=x.clone()), NEEDED),
    "a square": (lambda m, x: (y := m.linear(x)) * y, SQUARE),
    "a broadcast": (lambda m, x: m.linear(x) + m.norm(x)[:1], UNLIKE),
    "another dtype": (lambda m, x: m.linear(x) + x.float(), UNLIKE),
    "another layout": (lambda m, x: m.linear(x) + x.t().contiguous().t(), UNLIKE),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    forward, reason = REFUSALS[case]
    model = randomize(Layers(forward).double().eval())
    inputs = inputs_like([(3, 4)], "random", 0)

    fast = optimized(model, *inputs)

    assert_left_alone(model, fast, inputs, reason)


def test_refuses_small_tensors() -> None:
    model = randomize(Layers(lambda m, x: x + m.linear(x)).eval())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse, "WORTHWHILE", 1 << 17)
        small, large = (optimized(model, torch.randn(rows, 4)) for rows in (8191, 8192))

    assert [refusal.reason for refusal in small.report.refused] == [SMALL]
    assert large.report.counts() == {NAME: 1}


NO_MATTER: dict[str, Callable[[Any, Tensor], Any]] = {
    "numbers": lambda m, x: x.reshape(x.shape[0] * x.shape[1] + 0),
    "a tensor and a number": lambda m, x: m.linear(x) * 2.0 + 1,
    "a setting": lambda m, x: torch.add(m.linear(x), m.other(x), alpha=2),
}


@pytest.mark.parametrize("case", NO_MATTER)
def test_what_is_no_sum_of_two_tensors_is_not_spoken_of(case: str) -> None:
    model = randomize(Layers(NO_MATTER[case]).double().eval())
    inputs = inputs_like([(3, 4)], "random", 0)

    fast = optimized(model, *inputs)

    assert_left_alone(model, fast, inputs)
