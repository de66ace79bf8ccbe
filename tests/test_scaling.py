"""Optimizing a graph of ten thousand nodes takes ten times what one of a thousand does."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from tests.single_pass import Forward, function_of

# What is repeated; or a list of so many readers or views of one value.
STEPS = {
    "a residual block": "y + torch.relu(m.linear(y))",
    "one layer, called again": "torch.relu(m.linear(y))",
    "one matrix, read again": "y @ m.linear.weight.t()",
    "a copy": "y.clone() + 1",
    "a transpose": "torch.neg(y.t())",
    "a spelled out activation": "y * torch.sigmoid(y)",
    "what depends on no input": "y + torch.tanh(m.linear.bias) * number",
    "a masked write": "y = y * 2; y[y > number] = 0.0; return y",
    "a write": "(y * 2).add_(1)",
}
LISTS = {"readers": "torch.relu(y + number)", "views": "y[number % 4 :] * number"}


def repeated(name: str, times: int) -> nn.Module:
    """One step after the other, or each on the same value, so many times."""
    step = function_of("m, y, number", (STEPS | LISTS)[name])

    def forward(m: Any, x: Tensor) -> Any:
        y = torch.tanh(x)
        if name in LISTS:
            return [step(m, y, number) for number in range(times)]
        for number in range(times):
            y = step(m, y, number)
        return y

    return Forward(forward, linear=nn.Linear(4, 4)).eval()


def calls(model: nn.Module) -> int:
    """How many calls Python makes to optimize a model: a time that no neighbour disturbs."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        optimizer.optimize(model, torch.ones(4, 4), check=None, level=1)
    finally:
        sys.setprofile(None)
    return events.count("call")


@pytest.mark.parametrize("name", [*STEPS, *LISTS])
def test_four_times_the_nodes_are_four_times_the_work(name: str) -> None:
    calls(repeated(name, 1))  # what is made ready once
    few, many = (calls(repeated(name, times)) for times in (40, 160))
    assert many < 4.15 * few  # counted, it is at most 3.98
