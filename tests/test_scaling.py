"""Optimizing a graph of ten thousand nodes takes ten times what one of a thousand does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer


class Repeated(nn.Module):
    """One step after the other, so many times, and what they return added up."""

    def __init__(self, step: Callable[[Any, Tensor, int], Tensor], times: int) -> None:
        super().__init__()
        self.step, self.times = step, times
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number in range(self.times):
            y = self.step(self, y, number)
        return y


def masked(y: Tensor, number: int) -> Tensor:
    y[y > number] = 0.0
    return y


STEPS: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "a residual block": lambda m, y, _: y + torch.relu(m.linear(y)),
    "one layer, called again": lambda m, y, _: torch.relu(m.linear(y)),
    "one matrix, read again": lambda m, y, _: y @ m.linear.weight.t(),
    "a copy": lambda m, y, _: y.clone() + 1,
    "a transpose": lambda m, y, _: torch.neg(y.t()),
    "a spelled out activation": lambda m, y, _: y * torch.sigmoid(y),
    "what depends on no input": lambda m, y, number: y + torch.tanh(m.linear.bias) * number,
    "a masked write": lambda m, y, number: masked(y * 2, number),
    "a write": lambda m, y, _: (y * 2).add_(1),
}


class Fan(Repeated):
    """So many readers of one value."""

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(x)
        return [torch.relu(y + number) for number in range(self.times)]


class Rows(Repeated):
    """So many views of one value."""

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(x)
        return [y[number % 4 :] * number for number in range(self.times)]


MODELS: dict[str, Callable[[int], nn.Module]] = {
    name: lambda times, step=step: Repeated(step, times)  # type: ignore[misc]
    for name, step in STEPS.items()
} | {"readers": lambda times: Fan(print, times), "views": lambda times: Rows(print, times)}  # type: ignore[arg-type]


def calls(model: nn.Module) -> int:
    """How many calls Python makes to optimize a model: a time that no neighbour disturbs."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        optimizer.optimize(model, torch.ones(4, 4), check=None, level=1)
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize("name", MODELS)
def test_four_times_the_nodes_are_four_times_the_work(name: str) -> None:
    calls(MODELS[name](1).eval())  # what is made ready once

    few, many = (calls(MODELS[name](times).eval()) for times in (40, 160))

    assert many < 4.15 * few  # counted, it is at most 3.98
