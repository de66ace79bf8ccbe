"""A layer whose tensors are not where its class keeps them is folded rightly, or refused alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer.testing import randomize


def as_buffer(layer: nn.Module, name: str) -> None:
    value = getattr(layer, name).detach().clone()
    delattr(layer, name)
    layer.register_buffer(name, value)


def as_plain_tensor(layer: nn.Module, name: str) -> None:
    value = getattr(layer, name).detach().clone()
    delattr(layer, name)
    setattr(layer, name, value)


class Both(nn.Module):
    """One of each pair, of which one has an odd layer."""

    def __init__(self, make: Callable[[], nn.Sequential]) -> None:
        super().__init__()
        self.odd, self.usual = make(), make()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.odd(x), self.usual(x)


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def linears_after() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))


def convolutions() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))


def padded() -> nn.Sequential:
    return nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(4, 4, 3))


def pooled() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.AvgPool2d(4))


def activated() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


ROW, ROWS, IMAGE = torch.ones(3, 4), torch.ones(3, 4, 5), torch.ones(2, 4, 8, 8)
# What is made, which of the two is odd, its tensor, an input, and the pass that takes the pair.
PAIRS = [
    (linears, 0, "weight", ROW, "fold_affine"),
    (linears, 0, "bias", ROW, "fold_affine"),
    (linears, 1, "weight", ROW, "fold_affine"),
    (linears, 1, "bias", ROW, "fold_affine"),
    (linears, 1, "running_mean", ROW, "fold_affine"),
    (linears, 1, "running_var", ROW, "fold_affine"),
    (linears_after, 0, "running_var", ROW, "fold_affine_forward"),
    (linears_after, 1, "weight", ROW, "fold_affine_forward"),
    (linears_after, 1, "bias", ROW, "fold_affine_forward"),
    (convolutions, 0, "weight", ROWS, "fold_affine"),
    (convolutions, 0, "bias", ROWS, "fold_affine"),
    (padded, 1, "weight", IMAGE, "fold_padding"),
    (padded, 1, "bias", IMAGE, "fold_padding"),
    (pooled, 0, "weight", IMAGE, "sink_convolutions"),
    (activated, 0, "weight", ROW, "fuse_linear_relu"),
    (activated, 0, "bias", ROW, "fuse_linear_relu"),
]


def made(make: Any, place: int, name: str, change: Any) -> nn.Module:
    model = randomize(Both(make).eval().double())
    change(model.get_submodule(f"odd.{place}"), name)
    return model


@pytest.mark.parametrize(("make", "place", "name", "x", "by"), PAIRS)
@pytest.mark.parametrize(("change", "times"), [(as_buffer, 2), (as_plain_tensor, 1)])
def test_only_the_odd_layer_is_left_alone(
    make: Any, place: int, name: str, x: Tensor, by: str, change: Any, times: int
) -> None:
    model, x = made(make, place, name, change), torch.randn(x.shape, dtype=torch.float64)
    fast = optimizer.optimize(model, x, level=1, only=[by])

    assert fast.report.counts() == {by: times}
    assert not fast.report.remarks
    assert len(fast.report.refused) == 2 - times
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize(("make", "place", "name", "x", "by"), PAIRS)
def test_a_tensor_that_a_layer_lacks(make: Any, place: int, name: str, x: Tensor, by: str) -> None:
    model = made(make, place, name, lambda layer, name: setattr(layer, name, None))
    optional = name == "bias" or isinstance(model.get_submodule(f"odd.{place}"), nn.BatchNorm1d)
    if not optional or name.startswith("running"):
        with pytest.raises(optimizer.InputError, match="rejects"):
            optimizer.optimize(model, x.double())
        return
    fast = optimizer.optimize(model, x.double(), level=1, only=[by])

    assert fast.report.counts() == {by: 2}
    torch.testing.assert_close(fast(x.double()), model(x.double()))


def test_a_buffer_in_the_place_of_a_weight_is_moved_with_the_result() -> None:
    model = made(activated, 0, "weight", as_buffer)
    fast = optimizer.optimize(model, ROW.double(), level=1)

    assert {tensor.dtype for tensor in fast.float().state_dict().values()} == {torch.float32}
    assert not fast.get_parameter("odd_0_relu.weight").requires_grad
