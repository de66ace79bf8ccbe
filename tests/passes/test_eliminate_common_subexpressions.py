"""What is computed twice is computed once, where nothing can tell the two apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import assert_equivalent, inputs_like
from tests.single_pass import Forward, optimized_by

NAME = "eliminate_common_subexpressions"
optimized = partial(optimized_by, NAME)
SHAPE = (4, 4)


class Holder(Forward):
    """Runs a forward of a case over layers and a buffer."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(forward)
        self.linear, self.other = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.norm, self.drop = nn.BatchNorm1d(4).double(), nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))


def model_of(forward: Callable[[Any, Tensor], Any]) -> Holder:
    return Holder(forward).eval()


def given() -> tuple[Tensor, ...]:
    return inputs_like([SHAPE], "random", 0)


MERGED: dict[str, tuple[Callable[[Any, Tensor], Any], int]] = {
    "a method": (lambda m, x: x.tanh() - x.tanh() * 2, 1),
    "a function": (lambda m, x: torch.tanh(x) - torch.tanh(x) * 2, 1),
    "an operator": (lambda m, x: (x + 1).exp() * (x + 1), 1),
    "keywords": (lambda m, x: x.sum(dim=1, keepdim=True) * x.sum(dim=1, keepdim=True), 1),
    "a slice": (lambda m, x: x[:, 1:3] * x[:, 1:3], 1),
    "a layer called twice": (lambda m, x: m.linear(x) * m.linear(x).exp(), 1),
    "a chain": (lambda m, x: m.linear(x).exp().sum() + m.linear(x).exp().sum(), 3),
    "three of them": (lambda m, x: x.exp() * x.exp() - x.exp(), 2),
    "a size": (lambda m, x: x * x.shape[0] + x.shape[0], 2),
    "a buffer": (lambda m, x: x * (m.scale * 3) + m.scale * 3, 1),
    "a part of a tuple": (lambda m, x: x.chunk(2)[0] * x.chunk(2)[0], 2),
    "one that is returned": (lambda m, x: (x.exp(), x.exp() + 1), 1),
    "two operands": (lambda m, x: (x @ x.t()) * (x @ x.t()), 2),
}


@pytest.mark.parametrize("case", MERGED)
def test_merges(case: str) -> None:
    forward, merged = MERGED[case]
    model = model_of(forward)

    fast = optimized(model, *given())

    assert fast.report.counts() == {NAME: merged}
    assert_equivalent(model, fast, given(), exact=True)


LEFT: dict[str, Callable[[Any, Tensor], Any]] = {
    "an integer and a float": lambda m, x: (x + 1, x + 1.0),
    "an integer and a flag": lambda m, x: (x * 1, x * True),
    "zeros of two signs": lambda m, x: x / 0.0 + x / -0.0,
    "zeros in a list": lambda m, x: x.new_tensor([0.0, 1.0]) / x.new_tensor([-0.0, 1.0]),
    "zeros in keywords": lambda m, x: (
        torch.full_like(x, fill_value=0.0) / torch.full_like(x, fill_value=-0.0)
    ),
    "a list and a tuple": lambda m, x: x[[0, 1]].sum() + x[(0, 1)],
    "another flag": lambda m, x: x.sum(1, True) + x.sum(1, False),
    "another keyword": lambda m, x: x.sum(dim=1) + x.sum(axis=1),
    "another slice": lambda m, x: x[1:3] + x[0:2],
    "another start": lambda m, x: x[1:].sum() + x[2:].sum(),
    "another stop": lambda m, x: x[:, :2].sum() + x[:, :3].sum(),
    "another step": lambda m, x: x[::2] + x[::3],
    "another step beside others": lambda m, x: x[1:, 0:4:2] + x[1:, 0:4:3],
    "another place in an index": lambda m, x: x[..., None] + x[None, ...],
    "another function": lambda m, x: torch.exp(x) + torch.sin(x),
    "another method": lambda m, x: x.exp() + x.sin(),
    "another operator": lambda m, x: (x + 2.0) * (x - 2.0),
    "another argument": lambda m, x: x.sum(0) + x.sum(1),
    "another keyword's name": lambda m, x: x.clamp(min=0.5) + x.clamp(max=0.5),
    "another keyword's value": lambda m, x: x.sum(dim=0) + x.sum(dim=1),
    "another keyword's type": lambda m, x: (x.sum(dtype=torch.int64), x.sum(dtype=torch.float32)),
    "a number and its text": lambda m, x: (x.sum(0), x.type("torch.FloatTensor"), x.float()),
    "another layer": lambda m, x: m.linear(x) + m.other(x),
    "operands the other way round": lambda m, x: (x - m.scale) + (m.scale - x),
    "random choices": lambda m, x: F.dropout(x, 0.5, True) + F.dropout(x, 0.5, True),
    "a layer in training mode": lambda m, x: m.norm(x) + m.norm(x),
    "random numbers": lambda m, x: x + torch.rand(4).double() + torch.rand(4).double(),
}


@pytest.mark.parametrize("case", LEFT)
def test_leaves_alone(case: str) -> None:
    model = model_of(LEFT[case])
    model.norm.train()

    fast = optimized(model, *given())

    assert (fast.report.fired, fast.report.refused) == ((), ())
    for inputs in (given(), (torch.arange(16).reshape(SHAPE),)):
        if inputs[0].is_floating_point() or "integer" in case:
            assert_equivalent(model, fast, inputs, exact=True)


CHANGED = "what it reads may be written in between"
WRITTEN = "a result is written, which the other must not see"


def input_written(m: Any, x: Tensor) -> Tensor:
    before = x.exp()
    x.add_(1.0)
    return before + x.exp()


def view_written(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    before, part = y.exp(), y[0]
    part.zero_()
    return before + y.exp()


def second_operand_written(m: Any, x: Tensor) -> Tensor:
    y, z = x * 2, x + 1
    before = y * z
    z.add_(1.0)
    return before + y * z


def buffer_written(m: Any, x: Tensor) -> Tensor:
    before = x * m.scale
    m.scale.add_(1.0)
    return before + x * m.scale


def layer_written(m: Any, x: Tensor) -> Tensor:
    y = x * 2
    before = m.linear(y)
    m.linear.weight.mul_(2.0)
    return before + m.linear(y)


def first_written(m: Any, x: Tensor) -> Tensor:
    first, again = x.exp(), x.exp()
    first.add_(1.0)
    return first * again


def second_written(m: Any, x: Tensor) -> Tensor:
    first, again = x.exp(), x.exp()
    again[0] = 0.0
    return first * again


def copy_written_in_some_calls(m: Any, x: Tensor) -> Tensor:
    first, again = x.exp(), x.exp().float()
    again.add_(1.0)
    return first * again


REFUSALS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a written input": (input_written, CHANGED),
    "a written view": (view_written, CHANGED),
    "a written second operand": (second_operand_written, CHANGED),
    "a written buffer": (buffer_written, CHANGED),
    "a written layer": (layer_written, CHANGED),
    "a written result": (first_written, WRITTEN),
    "an assigned result": (second_written, WRITTEN),
    "a result that is written where it is no copy": (copy_written_in_some_calls, WRITTEN),
    "two results": (lambda m, x: (x.exp(), x.exp()), "both are returned"),
    "views of two results": (lambda m, x: [x.exp().t(), {"y": x.exp()[0]}], "both are returned"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    forward, reason = REFUSALS[case]
    model = model_of(forward)

    fast = optimized(model, *given())

    assert fast.report.fired == ()
    assert [refusal.reason for refusal in fast.report.refused] == [reason]
    for inputs in (given(), tuple(each.float() for each in given())):
        if "layer" not in case:
            assert_equivalent(model, fast, inputs, exact=True)


class FillsAList(nn.Module):
    def forward(self, xs: list[Tensor]) -> Tensor:
        first, again = xs[:1], xs[:1]
        first[0] = xs[1]
        return first[-1] - again[-1]


def test_a_list_that_may_be_filled_is_not_shared() -> None:
    x, y = inputs_like([SHAPE] * 2, "random", 0)

    fast = optimizer.optimize(FillsAList().eval(), ([x, y],), only=[NAME], check=None, level=1)

    assert NAME not in fast.report.counts()
    assert torch.equal(fast([x, y]), y - x)


def test_nothing_is_merged_without_example_inputs() -> None:
    fast = optimized(model_of(MERGED["a layer called twice"][0]))

    assert (fast.report.fired, fast.report.refused) == ((), ())


def read_another(first: fx.Node) -> None:
    first.args = (first.next,)


def go(first: fx.Node) -> None:
    first.replace_all_uses_with(first.next)
    first.graph.erase_node(first)


def move_behind(first: fx.Node) -> None:
    last = next(iter(reversed(first.graph.nodes)))
    last.prepend(first)


@pytest.mark.parametrize("change", [read_another, go, move_behind])
def test_what_was_seen_earlier_may_have_changed(change: Callable[[fx.Node], None]) -> None:
    model = Forward(lambda _, x: [torch.tanh(x), torch.exp(x), torch.tanh(x)]).eval()
    graph = optimizer.capture(model, torch.ones(3)).graph
    first, again = [node for node in graph.nodes if node.target is torch.tanh]
    apply = next(each for each in optimizer.all_passes() if each.name == NAME).apply
    assert apply(first) is None

    change(first)

    assert apply(again) is None
