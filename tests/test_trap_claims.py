"""Traps that are not the answer of one model: what a result is, and when it is made."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import optimizer

IMAGE = torch.linspace(-1.0, 1.0, 384).reshape(2, 3, 8, 8)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    nn.init.normal_(layers[1].running_mean)
    return layers.eval()


def test_autocast_around_the_result_gives_the_dtype_of_the_model(model: nn.Module) -> None:
    fast, truth = optimizer.optimize(model, IMAGE, level=1), model(IMAGE)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(IMAGE), fast(IMAGE)

    assert actual.dtype == expected.dtype == torch.bfloat16
    assert torch.dist(actual, truth) <= 2 * torch.dist(expected, truth)


def test_a_result_is_not_overwritten_by_the_next_call(model: nn.Module) -> None:
    fast = optimizer.optimize(model, IMAGE, level=1)
    first = fast(IMAGE)
    kept = first.clone()
    fast(-IMAGE)

    assert torch.equal(first, kept)


def test_the_result_has_the_state_that_the_model_had(model: nn.Module) -> None:
    fast = optimizer.optimize(model, IMAGE, level=1)
    before = model(IMAGE)
    model[1].running_mean.zero_()
    model[0].weight.data.zero_()

    torch.testing.assert_close(fast(IMAGE), before)


def test_what_is_made_in_inference_mode_is_no_inference_tensor(model: nn.Module) -> None:
    with torch.inference_mode():
        fast = optimizer.optimize(model, IMAGE, level=1)

    assert not any(parameter.is_inference() for parameter in fast.parameters())
    fast(IMAGE.clone().requires_grad_()).sum().backward()


def test_the_code_is_that_of_the_graph(model: nn.Module) -> None:
    fast = optimizer.optimize(model, IMAGE, level=1)

    assert fast.code == copy.deepcopy(fast).graph.python_code("self").src
