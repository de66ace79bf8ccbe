"""Convolutions that read one value and are added become one, at the taps that read the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer.core.guards import GUARDS
from optimizer.core.node import callee
from optimizer.testing import assert_equivalent, inputs_like, randomize, untouched

NAME = "merge_convolutions"
IMAGE = (2, 4, 7, 6)


class Branches(nn.Module):
    """`combine` of the model, whose `one` and `other` are two layers, and x."""

    def __init__(
        self, one: nn.Module, other: nn.Module, combine: Callable[[Any, Tensor], Any] | None = None
    ) -> None:
        super().__init__()
        self.one, self.other = one, other
        self.combine = combine or (lambda self, x: self.one(x) + self.other(x))
        self.register_buffer("constant", torch.rand(4, 1, 1) + 0.5)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.combine(self, x)


def conv(kernel: Any = 3, padding: Any = 1, inputs: int = 4, **settings: Any) -> nn.Module:
    return nn.Conv2d(inputs, 4, kernel, padding=padding, **settings)


def point(**settings: Any) -> nn.Module:
    return conv(1, 0, **settings)


def optimized(model: nn.Module, *inputs: Tensor) -> Any:
    with untouched(model):
        return optimizer.optimize(model, inputs or None, only=[NAME], check=None, level=1)


def callees(fast: Any) -> list[Any]:
    called = [callee(node) or node.target for node in fast.graph.nodes if node.op[:4] == "call"]
    return [each for each in called if each not in GUARDS]


def add_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    y += self.other(x)
    return y


MERGED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], type]] = {
    "one tap on the left": (lambda: Branches(point(), conv()), IMAGE, nn.Conv2d),
    "one tap on the right": (lambda: Branches(conv(), point()), IMAGE, nn.Conv2d),
    "one tap each": (lambda: Branches(point(), point()), IMAGE, nn.Conv2d),
    "no bias": (lambda: Branches(conv(bias=False), point(bias=False)), IMAGE, nn.Conv2d),
    "one bias": (lambda: Branches(conv(bias=False), point()), IMAGE, nn.Conv2d),
    "strides": (lambda: Branches(conv(stride=2), point(stride=2)), IMAGE, nn.Conv2d),
    "groups": (lambda: Branches(conv(groups=2), point(groups=2)), IMAGE, nn.Conv2d),
    "dilation of both": (
        lambda: Branches(conv(3, 2, dilation=2), conv(5, 4, dilation=2)),
        IMAGE,
        nn.Conv2d,
    ),
    "dilation around one tap": (
        lambda: Branches(conv(3, 2, dilation=2), point()),
        IMAGE,
        nn.Conv2d,
    ),
    "kernels that are not square": (
        lambda: Branches(conv((5, 3), (2, 1)), conv((1, 3), (0, 1))),
        IMAGE,
        nn.Conv2d,
    ),
    "more padding than the kernel needs": (
        lambda: Branches(conv(3, 2), conv(1, 1)),
        IMAGE,
        nn.Conv2d,
    ),
    "other channels": (
        lambda: Branches(conv(inputs=6), point(inputs=6)),
        (2, 6, 5, 5),
        nn.Conv2d,
    ),
    "one dimension": (
        lambda: Branches(nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 1)),
        (2, 4, 5),
        nn.Conv1d,
    ),
    "three dimensions": (
        lambda: Branches(nn.Conv3d(4, 4, 3, padding=1), nn.Conv3d(4, 4, 1)),
        (2, 4, 3, 3, 3),
        nn.Conv3d,
    ),
    "an image without a batch": (lambda: Branches(conv(), point()), IMAGE[1:], nn.Conv2d),
    "BatchNorm": (lambda: Branches(nn.BatchNorm2d(4), conv()), IMAGE, nn.Conv2d),
    "BatchNorm and groups": (
        lambda: Branches(conv(groups=2), nn.BatchNorm2d(4)),
        IMAGE,
        nn.Conv2d,
    ),
    "BatchNorm and a depthwise layer": (
        lambda: Branches(conv(groups=4), nn.BatchNorm2d(4)),
        IMAGE,
        nn.Conv2d,
    ),
    "a sum in place": (lambda: Branches(conv(), point(), add_in_place), IMAGE, nn.Conv2d),
    "a sum in place by its method": (
        lambda: Branches(conv(), point(), lambda self, x: self.one(x).add_(self.other(x))),
        IMAGE,
        nn.Conv2d,
    ),
    "three branches": (
        lambda: Branches(
            conv(), nn.BatchNorm2d(4), lambda self, x: self.one(x) + self.other(x) + self.one(x)
        ),
        IMAGE,
        nn.Conv2d,
    ),
}


@pytest.mark.parametrize("case", MERGED)
def test_merges(case: str) -> None:
    build, shape, kind = MERGED[case]
    model = randomize(build().double())
    inputs = inputs_like([shape], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == [kind]
    assert_equivalent(model, fast, inputs)
    for size in ((1, *shape[1:]), (*shape[:-1], 9)) if len(shape) > 3 else ():
        assert_equivalent(model, fast, inputs_like([size], "random", 1))


def test_a_block_that_is_called_twice_is_merged_once() -> None:
    block = Branches(conv(), nn.BatchNorm2d(4))
    model = randomize(nn.Sequential(block, nn.ReLU(), block).double().eval())
    inputs = inputs_like([IMAGE], "random", 0)

    fast = optimized(model, *inputs)

    calls = [node.target for node in fast.graph.nodes if node.op == "call_module"]
    assert fast.report.counts() == {NAME: 2}
    assert calls[0] == calls[-1]
    assert_equivalent(model, fast, inputs)


def test_what_asks_for_a_shape_is_no_reader() -> None:
    def combine(self: Any, x: Tensor) -> Tensor:
        y = self.one(x)
        return (y + self.other(x)).reshape(y.shape[0], -1)

    model = randomize(Branches(conv(), point(), combine).double())
    inputs = inputs_like([IMAGE], "random", 0)

    fast = optimized(model, *inputs)

    assert fast.report.counts() == {NAME: 1}
    assert_equivalent(model, fast, inputs)


def written_between(self: Any, x: Tensor) -> Tensor:
    x = x + 1
    y = self.one(x)
    x.relu_()
    return y + self.other(x)


def writes(name: str) -> Callable[[Any, Tensor], Tensor]:
    def combine(self: Any, x: Tensor) -> Tensor:
        getattr(self, name).weight.mul_(2)
        return self.one(x) + self.other(x)

    return combine


def in_training() -> nn.Module:
    model = Branches(conv(), nn.BatchNorm2d(4))
    model.other.train()
    return model


def large() -> nn.Module:
    model = Branches(conv(), point())
    for layer in (model.one, model.other):
        nn.init.constant_(layer.weight, 3e38)
    return model


def with_mean(mean: float) -> nn.Module:
    model = Branches(conv(), nn.BatchNorm2d(4))
    nn.init.constant_(model.other.running_mean, mean)
    return model


ALIKE = "the convolutions differ in stride or groups, or pad otherwise"
CENTRE = "no kernel is centred on the other"
READ = "the layer's output is read elsewhere"
REFUSALS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another stride": (lambda: Branches(conv(stride=2), point(stride=7)), ALIKE),
    "a stride that BatchNorm lacks": (lambda: Branches(conv(stride=7), nn.BatchNorm2d(4)), ALIKE),
    "other groups": (lambda: Branches(conv(groups=2), point()), ALIKE),
    "padding by reflection": (lambda: Branches(conv(padding_mode="reflect"), point()), ALIKE),
    "padding of the other by reflection": (
        lambda: Branches(conv(5, 2), conv(padding_mode="reflect")),
        ALIKE,
    ),
    "no padding": (lambda: Branches(conv(), conv((7, 6), 0)), CENTRE),
    "a kernel without a centre": (lambda: Branches(conv(4, 1), point()), CENTRE),
    "taps between the other's": (lambda: Branches(conv(2, 1, dilation=2), point()), CENTRE),
    "another dilation": (lambda: Branches(conv(3, 2, dilation=2), conv(3, 1)), CENTRE),
    "another dilation and as many steps": (
        lambda: Branches(conv((2, 1), 0, stride=2, dilation=2), conv((2, 1), 0, stride=2)),
        CENTRE,
    ),
    "a row and a column": (lambda: Branches(conv((3, 1), (1, 0)), conv((1, 3), (0, 1))), CENTRE),
    "padding by name": (lambda: Branches(conv(3, "same"), point()), CENTRE),
    "one output channel, broadcast": (
        lambda: Branches(conv(), nn.Conv2d(4, 1, 1)),
        CENTRE,
    ),
    "channels that change": (
        lambda: Branches(nn.Conv2d(4, 1, 1), nn.BatchNorm2d(4)),
        "the convolution changes the channels",
    ),
    "a second reader": (
        lambda: Branches(
            conv(), point(), lambda self, x: (y := self.one(x)) + self.other(x) + y.relu()
        ),
        READ,
    ),
    "a second reader of the other": (
        lambda: Branches(
            conv(), point(), lambda self, x: self.one(x) + (y := self.other(x)) + y.relu()
        ),
        READ,
    ),
    "a write between the two": (
        lambda: Branches(conv(), point(), written_between),
        "what they read is written between them",
    ),
    "a weight that the forward writes": (
        lambda: Branches(conv(), point(), writes("one")).requires_grad_(False),
        "the forward writes their tensors",
    ),
    "the other's weight": (
        lambda: Branches(conv(), point(), writes("other")).requires_grad_(False),
        "the forward writes their tensors",
    ),
    "a BatchNorm of volumes, which lies as its input does": (
        lambda: Branches(nn.Conv3d(4, 4, 1), nn.BatchNorm3d(4)),
        "it may lay its output out otherwise than a BatchNorm does",
    ),
    "training mode": (in_training, "BatchNorm is in training mode and uses batch statistics"),
    "weights beyond the dtype": (large, "the merged weights overflow"),
    "a mean far beyond the deviation": (
        lambda: with_mean(100.0),
        "the shift is so large that it would cancel after the layer only",
    ),
}

SHAPES = {
    "a kernel without a centre": (1, 4, 2, 2),  # 1 x 1 and 2 x 2 after the layers
    "a BatchNorm of volumes, which lies as its input does": (1, 4, 3, 3, 3),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    build, reason = REFUSALS[case]

    fast = optimized(build(), torch.randn(SHAPES.get(case, IMAGE)))

    assert fast.report.fired == ()
    assert reason in {refusal.reason for refusal in fast.report.refused}


def twice(self: Any, x: Tensor) -> Tensor:
    y = self.one(x)
    return y + y


IGNORED: dict[str, Callable[[Any, Tensor], Any]] = {
    "one value, twice": twice,
    "two inputs": lambda self, x: self.one(x) + self.other(x.relu()),
    "a residual": lambda self, x: self.one(x) + x,
    "a scaled sum": lambda self, x: self.one(x).add_(self.other(x), alpha=2),
    "a constant": lambda self, x: self.one(x) + self.constant,
    "a product, laid out as its input": lambda self, x: x * self.constant + self.one(x),
    "no convolution": lambda self, x: x * 2 + x * 3,
}


@pytest.mark.parametrize("case", IGNORED)
def test_ignores(case: str) -> None:
    model = randomize(Branches(conv(), point(), IGNORED[case]).double())
    inputs = inputs_like([IMAGE], "random", 0)

    fast = optimized(model, *inputs)

    assert (fast.report.fired, fast.report.refused) == ((), ())
    assert_equivalent(model, fast, inputs)


def test_autocast_that_gives_the_terms_two_dtypes() -> None:
    model = Branches(conv(), nn.BatchNorm2d(4))
    with torch.autocast("cpu", torch.bfloat16):
        fast = optimized(model, x := torch.randn(IMAGE))
        assert fast(x).dtype == model(x).dtype == torch.float32

    assert {each.reason for each in fast.report.refused} == {"autocast gives the terms two dtypes"}


def test_weights_of_two_dtypes_under_autocast() -> None:
    model = Branches(conv(), point(dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        fast = optimized(model, torch.randn(IMAGE))

    assert {each.reason for each in fast.report.refused} == {"dtype or device differ"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_merge_in_low_precision_is_as_near_to_the_truth_as_the_model(dtype: torch.dtype) -> None:
    def combine(self: Any, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x) + self.norm(x)

    model = Branches(conv(inputs=4), point(), combine)
    model.norm = nn.BatchNorm2d(4)
    model = randomize(model).to(dtype).eval()
    (x,) = inputs_like([(4, 4, 12, 12)], "random", 0, dtype)

    fast = optimized(model, x)

    with torch.no_grad():
        eager, merged = model(x).double(), fast(x).double()
        truth = model.double()(x.double())
    assert fast.report.counts() == {NAME: 2}
    assert (merged - truth).abs().max() <= 4 * (eager - truth).abs().max()


def test_without_example_inputs_nothing_is_merged() -> None:
    fast = optimized(Branches(conv(), point()))

    assert {each.reason for each in fast.report.refused} == {
        "the graph was captured without example inputs"
    }


def test_only_a_promise_merges_for_an_infinity_may_stand_where_eager_has_nan() -> None:
    model = Branches(point(), point())
    for layer, weight in ((model.one, 2.0), (model.other, -1.0)):
        nn.init.constant_(layer.weight, weight)
    x = torch.full((1, 4, 2, 2), torch.inf)

    careful = optimizer.optimize(model, x, level=1)
    promised = optimizer.optimize(model, torch.ones(1, 4, 2, 2), finite=True, level=1)

    assert careful.report.fired == ()
    assert promised.report.counts() == {NAME: 1}
    assert model(x).isnan().all()
    assert careful(x).isnan().all()
    assert promised(x).isposinf().all()
