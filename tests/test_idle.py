"""Calls that give back what they are given are left out of straight-line code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from optimizer.core.inputs import Call
from optimizer.lowering.trace import straight_line

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


def eight_times(run: Callable[[Any], Any], x: Any) -> Any:
    for _ in range(8):
        x = run(x)
    return x


IDLE: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x.relu(), 0.5, False).exp(),
    "dropout by keyword": lambda x: F.dropout(x.relu(), training=False).exp(),
    "dropout of torch": lambda x: torch.dropout(x.relu(), 0.5, False).exp(),
    "padding": lambda x: F.pad(x.relu(), (0, 0, 0, 0)).exp(),
    "padding by keyword": lambda x: F.pad(input=x.relu(), pad=[0, 0]).exp(),
    "padding of what is given": lambda x: F.pad(x, (0, 0)).exp(),
    "one after another": lambda x: F.pad(F.dropout(x, training=False), (0, 0)).exp(),
    "growing from nothing": lambda x: torch.cat([torch.tensor([]), x.relu()], -1).exp(),
    "growing by nothing": lambda x: torch.cat([x, x[:, :0]], -1).exp(),
    "a view of it": lambda x: F.pad(x.relu(), (0, 0)).view(3, 2).exp(),
    # The memory of what is gone is given to others, and so may be that of the padding.
    "wherever the output lies": lambda x: eight_times(lambda y: F.pad(y.exp(), (0, 0)).sin(), x),
}
AT_WORK: dict[str, Callable[[Any], Any]] = {
    "padding": lambda x: F.pad(x, (0, 1)).exp(),
    "cropping": lambda x: F.pad(x, (0, -1)).exp(),
    "moving": lambda x: F.pad(x, (1, -1)).exp(),
    "laying out otherwise": lambda x: x.t().contiguous().exp(),
    "a copy that is returned": lambda x: x.clone(),
    "padding that is returned": lambda x: F.pad(x, (0, 0)),
    "a view that is returned": lambda x: F.pad(x, (0, 0)).view(3, 2),
    "growing": lambda x: torch.cat([x, x[:, :1]], -1).exp(),
    "growing by itself": lambda x: torch.cat([x, x]).exp(),
    "another dtype": lambda x: torch.cat([x, x.double()[:0]]).exp(),
    "both are returned": lambda x: (y := x.relu(), F.pad(y, (0, 0))),
}


_COPIES = ("pad", "cat", "clone", "contiguous")


def line_of(run: Callable[..., Any]) -> fx.GraphModule:
    return straight_line(run, [], Call((X,), {})).module


def idle_in(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.name.startswith(_COPIES)]


@pytest.mark.parametrize("run", IDLE.values(), ids=IDLE)
def test_what_does_nothing_is_left_out(run: Callable[..., Any]) -> None:
    module = line_of(run)

    assert not idle_in(module)
    assert torch.equal(module(X)[0], run(X))


@pytest.mark.parametrize("run", AT_WORK.values(), ids=AT_WORK)
def test_what_makes_new_values_or_new_memory_stays(run: Callable[..., Any]) -> None:
    module = line_of(run)
    outputs = module(X)

    assert len(idle_in(module)) == 1
    addresses = {tensor.data_ptr() for tensor in (X, *outputs)}
    assert len(addresses) == 1 + len(outputs)


def test_a_copy_by_padding_that_is_written_is_one() -> None:
    def run(x: Any) -> Any:
        padded = F.pad(y := x.relu(), (0, 0))
        padded.add_(1)
        return y.exp(), padded.exp()

    module = line_of(run)

    assert not idle_in(module)
    assert all(map(torch.equal, module(X), run(X)))
