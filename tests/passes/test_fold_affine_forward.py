"""BatchNorm and constants fold into the layer that reads them, where no border sees the fold."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.single_pass import Forward, assert_as_near_to_the_truth, callees, optimized_by

NAME = "fold_affine_forward"
optimized = partial(optimized_by, NAME)
IMAGE = (2, 4, 6, 6)


class Before(nn.Module):
    """`layer(function(x, constant))`, where the constant is a buffer of the model."""

    def __init__(self, function: Callable[..., Tensor], layer: nn.Module, *shape: int) -> None:
        super().__init__()
        self.layer, self.function = layer, function
        self.register_buffer("constant", torch.rand(shape) + 0.5)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.function(x, self.constant))


def times(x: Tensor, constant: Tensor) -> Tensor:
    return x * constant


def plus(x: Tensor, constant: Tensor) -> Tensor:
    return x + constant


def valid(kernel: int = 3, **settings: Any) -> nn.Module:
    return nn.Conv2d(4, 6, kernel, **settings)


def behind(norm: nn.Module, layer: nn.Module) -> nn.Module:
    return randomize(nn.Sequential(norm, layer).eval())


def norm(channels: int = 4) -> nn.Module:
    return nn.BatchNorm2d(channels)


FOLDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm2d": (lambda: behind(norm(), valid()), IMAGE),
    "BatchNorm2d without bias": (lambda: behind(norm(), valid(1, bias=False)), IMAGE),
    "BatchNorm3d": (lambda: behind(nn.BatchNorm3d(4), nn.Conv3d(4, 6, 2)), (2, 4, 3, 3, 3)),
    "BatchNorm1d and Conv1d": (lambda: behind(nn.BatchNorm1d(4), nn.Conv1d(4, 6, 2)), (2, 4, 5)),
    "BatchNorm1d and Linear": (lambda: behind(nn.BatchNorm1d(4), nn.Linear(4, 6)), (5, 4)),
    "groups": (lambda: behind(norm(), valid(groups=2)), IMAGE),
    "depthwise": (lambda: behind(norm(), nn.Conv2d(4, 8, 3, groups=4)), IMAGE),
    "stride and dilation": (lambda: behind(norm(), valid(2, stride=2, dilation=2)), IMAGE),
    "padding by name, of nothing": (lambda: behind(norm(), valid(padding="valid")), IMAGE),
    "padding to the same size, of nothing": (
        lambda: behind(norm(), valid(1, padding="same")), IMAGE,
    ),
    "padding by reflection": (
        lambda: behind(norm(), valid(padding=1, padding_mode="reflect")), IMAGE,
    ),
    "padding by wrapping around": (
        lambda: behind(norm(), valid(padding=2, padding_mode="circular")), IMAGE,
    ),
    "a product and zeros": (lambda: Before(times, valid(padding=1), 4, 1, 1), IMAGE),
    "a product and a transposed layer": (
        lambda: Before(times, nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), 1, 4, 1, 1), IMAGE,
    ),
    "a sum": (lambda: Before(plus, valid(), 4, 1, 1), IMAGE),
    "a sum over the last dimension": (lambda: Before(plus, nn.Linear(4, 6), 4), (2, 3, 4)),
    "an image without a batch": (lambda: Before(plus, valid(), 4, 1, 1), IMAGE[1:]),
    "the normalization of an input": (
        lambda: Before(lambda x, c: (x - 0.485) / c, valid(), 1, 4, 1, 1), IMAGE,
    ),
    "a second reader of its shape": (
        lambda: Before(lambda x, c: (y := x * c, y.ndim)[0], valid(), 4, 1, 1), IMAGE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDS)
def test_folds(case: str) -> None:
    build, shape = FOLDS[case]
    model = randomize(build().double().eval())
    inputs = inputs_like([shape], "random", 0)

    fast = optimized(model, *inputs)

    assert set(fast.report.counts()) == {NAME}
    assert not {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d} & set(callees(fast))
    assert {operator.mul, operator.add, operator.sub}.isdisjoint(callees(fast))
    assert_equivalent(model, fast, inputs)


WIDENED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an input": times,
    "the normalization of an input": lambda x, c: (x - 0.485) / c,
    "two constants": lambda x, c: (x * c) / c,
    "what else computes": lambda x, c: x.relu() * c,
}


@pytest.mark.parametrize("case", WIDENED)
@pytest.mark.parametrize("shape", [IMAGE, IMAGE[1:]], ids=str)
def test_constants_repeat_a_single_channel(case: str, shape: tuple[int, ...]) -> None:
    model = randomize(Before(WIDENED[case], valid(), 4, 1, 1).double().eval())

    fast = optimized(model, *inputs_like([shape], "random", 0))

    assert NAME in fast.report.counts()
    gray = (*shape[:-3], 1, *shape[-2:])
    assert_equivalent(model, fast, inputs_like([gray], "random", 1))


def test_an_example_of_a_single_channel_binds_nobody() -> None:
    model = randomize(Before(lambda x, c: x * c * c, valid(), 4, 1, 1).double().eval())

    fast = optimized(model, *inputs_like([(2, 1, 6, 6)], "random", 0))

    assert fast.report.counts() == {NAME: 1}
    assert_equivalent(model, fast, inputs_like([IMAGE], "random", 1))


def test_other_readers_see_a_single_channel() -> None:
    scale = torch.rand(4, 1, 1) + 0.5
    model = Forward(lambda m, x: (m.layer((y := x - 0.5) * m.c), y), layer=valid(), c=scale)
    randomize(model.double().eval())

    fast = optimized(model, *inputs_like([IMAGE], "random", 0))

    assert fast.report.counts() == {NAME: 1}
    assert_equivalent(model, fast, inputs_like([(2, 1, 6, 6)], "random", 1))


def test_a_layer_fixes_its_channels() -> None:
    scale = torch.rand(4) + 0.5
    model = Forward(lambda m, x: m.layer(m.layer(x) * m.c), layer=nn.Linear(4, 4), c=scale)
    randomize(model.double().eval())

    fast = optimized(model, *inputs_like([(3, 4)], "random", 0))

    assert [node.op for node in fast.graph.nodes if node.op == "call_method"] == []


def test_a_layer_fixes_no_other_axis() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Before(times, valid(), 4, 1, 1))
    model = randomize(model.double().eval())

    fast = optimized(model, *inputs_like([IMAGE], "random", 0))

    assert fast.report.counts() == {NAME: 1}
    assert_equivalent(model, fast, inputs_like([(2, 1, 6, 6)], "random", 1))


def test_a_pair_that_is_called_twice_is_folded_once() -> None:
    block = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    model = randomize(nn.Sequential(block, nn.ReLU(), block).double().eval())
    inputs = inputs_like([IMAGE], "random", 0)

    fast = optimized(model, *inputs)

    calls = [node.target for node in fast.graph.nodes if node.op == "call_module"]
    assert fast.report.counts() == {NAME: 2}
    assert calls[0] == calls[-1]
    assert_equivalent(model, fast, inputs)


def training() -> nn.Module:
    model = nn.Sequential(norm(), valid()).eval()
    model[0].train()
    return model


def with_mean(mean: float) -> nn.Module:
    model = nn.Sequential(norm(), valid()).eval()
    nn.init.constant_(model[0].running_mean, mean)
    return model


class Written(Before):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.mul_(2)
        return self.layer(x * 2)


class Both(Before):
    def forward(self, x: Tensor) -> Any:
        y = self.function(x, self.constant)
        return self.layer(y), y


ZEROS = "the layer pads with zeros, which are not shifted"
SHAPE = "the constant changes the shape"
REFUSALS: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "zero padding": (lambda: behind(norm(), valid(padding=1)), torch.randn(IMAGE), ZEROS),
    "zero padding on one side": (
        lambda: behind(norm(), valid(2, padding="same")), torch.randn(IMAGE), ZEROS,
    ),
    "a transposed layer": (
        lambda: behind(norm(), nn.ConvTranspose2d(4, 6, 3)), torch.randn(IMAGE), ZEROS,
    ),
    "training mode": (
        training, torch.randn(IMAGE), "BatchNorm is in training mode and uses batch statistics",
    ),
    "BatchNorm2d and Linear": (
        lambda: behind(norm(), nn.Linear(4, 4)), torch.randn(2, 4, 4, 4),
        "BatchNorm normalizes another axis than the layer's",
    ),
    "a second reader": (
        lambda: Before(lambda x, c: (y := x * c) + y.mean(), valid(), 4, 1, 1), torch.randn(IMAGE),
        "",
    ),
    "an output": (
        lambda: Both(times, valid(), 4, 1, 1), torch.randn(IMAGE),
        "the layer's output is read elsewhere",
    ),
    "an image of bytes": (
        lambda: Before(lambda x, c: x / 255.0, valid(), 1),
        torch.randint(0, 256, IMAGE, dtype=torch.uint8), "dtype or device differ",
    ),
    "one channel made four": (
        lambda: Before(times, valid(), 4, 1, 1), torch.randn(2, 1, 6, 6), SHAPE,
    ),
    "a dimension that the constant adds": (
        lambda: Before(times, valid(), 4, 1, 1), torch.randn(6, 6), SHAPE,
    ),
    "weights that the forward writes": (
        lambda: Written(times, valid(), 1).requires_grad_(False), torch.randn(IMAGE),
        "the forward writes their tensors",
    ),
    "a mean far beyond the deviation": (
        lambda: with_mean(100.0), torch.randn(IMAGE),
        "the shift is so large that it would cancel after the layer only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    build, x, reason = REFUSALS[case]
    model = build()

    fast = optimizer.optimize(model, x, only=[NAME], check=None, level=1)

    assert {refusal.reason for refusal in fast.report.refused} == ({reason} if reason else set())
    assert fast.report.fired == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_fold_in_low_precision_is_as_near_to_the_truth_as_the_model(dtype: torch.dtype) -> None:
    model = behind(norm(16), nn.Conv2d(16, 32, 3))

    assert_as_near_to_the_truth(NAME, model, (4, 16, 12, 12), dtype)


def test_another_dtype_than_the_example_is_an_error() -> None:
    model = Before(lambda x, c: x / 255.0, valid(), 1).eval()
    fast = optimized(model, torch.rand(IMAGE))

    with pytest.raises(optimizer.InputError, match=r"torch\.float32 and got torch\.uint8"):
        fast(torch.randint(0, 256, IMAGE, dtype=torch.uint8))


def test_without_example_inputs_nothing_is_folded() -> None:
    model = nn.Sequential(norm(), valid()).eval()

    fast = optimized(model)

    assert {each.reason for each in fast.report.refused} == {
        "the graph was captured without example inputs"
    }


def test_a_batchnorm_may_lay_its_output_out_anew() -> None:
    model = Forward(
        lambda m, x: torch.stack((y := m.pair(torch.relu(x[:, :1])), y), 1),
        pair=nn.Sequential(norm(1), nn.Conv2d(1, 1, 1)),
    ).eval()
    x = torch.rand(2, 4, 4, 4).contiguous(memory_format=torch.channels_last)
    fast = optimized(model, x)

    reasons = [r.reason for r in fast.report.refused if r.name == NAME]
    assert reasons == ["the affine lays its output out otherwise"]
    assert fast(x).stride() == model(x).stride()


def test_a_batchnorm_of_no_elements_takes_any_channels() -> None:
    layer, scale = nn.Conv1d(2, 2, 1), torch.rand(2, 1)
    model = Forward(lambda m, x: m.c(m.bn(x) * m.s), bn=nn.BatchNorm1d(2), c=layer, s=scale).eval()
    fast = optimized(model, torch.empty(0, 2, 3))

    assert fast.report.counts()[NAME] >= 1
    assert_equivalent(model, fast, (torch.empty(0, 1, 3),))


def test_what_the_layer_would_keep_for_gradients_must_not_be_written_later() -> None:
    class Written(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = x + 1.0
            y = super().forward(x * 0.5)
            return y + x.mul_(2.0).sum()

    model, x = Written(3, 3).eval(), torch.randn(2, 3, requires_grad=True)
    fast = optimized(model, x.detach())

    reasons = [r.reason for r in fast.report.refused if r.name == NAME]
    assert reasons == ["what the layer would keep for gradients is written later"]
    fast(x).sum().backward()
    assert x.grad is not None
