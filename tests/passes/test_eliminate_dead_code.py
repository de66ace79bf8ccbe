"""What nobody reads goes, and what does something else stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.single_pass import Forward, optimized_by

NAME = "eliminate_dead_code"
optimized = partial(optimized_by, NAME)


class Model(Forward):
    """Runs a forward of a case over some layers and a buffer."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(forward)
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.hooked, self.inplace = nn.Linear(3, 3), nn.ReLU(inplace=True)
        self.hooked.register_forward_hook(lambda module, given, result: given[0].add_(1.0))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("var", torch.ones(3, dtype=torch.float64))


def calls(fast: Any) -> int:
    return sum(node.op.startswith("call") for node in fast.graph.nodes)


def gone(*results: Any) -> None:
    """Reads nothing: what was computed for it is dead."""


DEAD: dict[str, Callable[[Any, Tensor], Any]] = {
    "a method": lambda m, x: gone(x.exp()),
    "a function": lambda m, x: gone(torch.exp(x)),
    "an operator": lambda m, x: gone(x + 1),
    "a module": lambda m, x: gone(m.linear(x)),
    "a chain": lambda m, x: gone(m.linear(x).exp().t().sum() + 1),
    "a parameter": lambda m, x: gone(m.linear.weight * 2),
    "a shape": lambda m, x: gone(x.shape[0], x.size(1) * 2),
    "a view": lambda m, x: gone(x.t()[0]),
    "two readers": lambda m, x: gone((y := x.exp()) + 1, y * 2),
    "new tensors": lambda m, x: gone(torch.zeros(3, dtype=x.dtype) + torch.arange(3)),
    "an inference-mode BatchNorm": lambda m, x: gone(m.norm(x)),
    "an inference-mode dropout": lambda m, x: gone(F.dropout(x, training=False)),
    "a value that a tuple holds": lambda m, x: gone(torch.chunk(x, 2)[0]),
}


@pytest.mark.parametrize("case", DEAD)
def test_removes_what_nobody_reads(case: str) -> None:
    model = Model(lambda m, x: (DEAD[case](m, x), x.exp())[1])
    randomize(model.double().eval())
    inputs = inputs_like([(4, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert calls(fast) == 1
    assert NAME in fast.report.counts()
    assert_equivalent(model, fast, inputs, exact=True)


def test_without_example_inputs_only_what_is_pure_by_definition_goes() -> None:
    model = Model(lambda m, x: (m.linear(x.transpose(0, 1)), gone(x.mul_(2)), x.exp())[2])
    randomize(model.double().eval())

    fast = optimized(model)

    assert fast.report.counts() == {NAME: 2}
    assert_equivalent(model, fast, inputs_like([(3, 3)], "random", 0), exact=True)


KEPT: dict[str, Callable[[Any, Tensor], Any]] = {
    "a write of the input by a method": lambda m, x: gone(x.mul_(2)),
    "a write of the input by an operator": lambda m, x: gone(x.__imul__(2)),
    "a write of the input by an assignment": lambda m, x: x.__setitem__(0, 5.0),
    "a write under a mask": lambda m, x: x.__setitem__(x > 0, 5.0),
    "a write through a view": lambda m, x: gone(x.t()[0].zero_()),
    "a write by an in-place module": lambda m, x: gone(m.inplace(x)),
    "a write by a function": lambda m, x: gone(F.relu(x, inplace=True)),
    "a write to an argument that is returned": lambda m, x: gone(torch.add(x, 1, out=x)),
    "a write of a buffer": lambda m, x: gone(m.count.add_(1)),
    "a copy into a buffer": lambda m, x: gone(m.count.copy_(x.sum())),
    "random numbers": lambda m, x: gone(torch.rand(3)),
    "random numbers like a value": lambda m, x: gone(torch.rand_like(x)),
    "training-mode dropout": lambda m, x: gone(F.dropout(x, 0.5, True)),
    "training-mode statistics": lambda m, x: gone(F.batch_norm(x, m.mean, m.var, training=True)),
    "a write of a value that dies with it": lambda m, x: gone(m.inplace(x * 2)),
    "a module with a hook": lambda m, x: gone(m.hooked(x)),
    "an assertion": lambda m, x: torch._assert(x.shape[0] == 4, "four rows"),
    "an assertion on the device": lambda m, x: torch._assert_async(
        torch.ones_like(x).sum() == 12, "four rows"
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_keeps_what_does_something_else(case: str) -> None:
    model = Model(lambda m, x: (KEPT[case](m, x), x.exp())[1])
    randomize(model.double().eval())
    inputs = inputs_like([(4, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert calls(fast) >= 2
    assert_equivalent(model, fast, inputs, exact=True)


@pytest.mark.parametrize("case", ["an assertion", "an assertion on the device"])
def test_an_assertion_still_fails(case: str) -> None:
    model = Model(lambda m, x: (KEPT[case](m, x), x.exp())[1]).double().eval()

    fast = optimized(model, torch.ones(4, 3, dtype=torch.float64))

    with pytest.raises((AssertionError, RuntimeError), match="four rows"):
        fast(torch.ones(5, 3, dtype=torch.float64))


def test_a_write_to_a_value_that_is_read_stays() -> None:
    model = Model(lambda m, x: (y := x * 2, y.t().add_(1), y)[2]).eval()
    inputs = inputs_like([(4, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert calls(fast) >= 3
    assert_equivalent(model, fast, inputs, exact=True)


def test_an_argument_that_is_not_read_stays_an_argument() -> None:
    class Ignores(nn.Module):
        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return x.exp()

    inputs = inputs_like([(4, 3), (2,)], "random", 0)

    fast = optimized(Ignores().eval(), *inputs)

    assert_equivalent(Ignores(), fast, inputs, exact=True)
    with pytest.raises(TypeError):
        fast(inputs[0])


def test_a_set_that_is_given_is_added_to_though_tensors_have_an_add_too() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, seen: set[int]) -> Tensor:
            seen.add(7)
            return x.exp()

    seen: set[int] = set()
    fast = optimizer.optimize(Adds().eval(), (torch.ones(2), {1}), only=[NAME], check=None, level=1)

    fast(torch.ones(2), seen)

    assert seen == {7}


class Extends(nn.Module):
    def forward(self, x: Tensor, given: list[Tensor]) -> list[Tensor]:
        same = given
        same += [x]
        return given


def test_a_list_that_is_extended_in_place_is_extended() -> None:
    x = torch.ones(2)

    fast = optimizer.optimize(Extends().eval(), (x, [x]), only=[NAME], check=None, level=1)

    assert len(fast(x, [x])) == 2
