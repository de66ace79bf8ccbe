"""What a call returns belongs to its caller, who may write it: no constant, and nothing twice.

The original and the result are called in turn, and whatever they return is written each time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import optimizer
from optimizer.testing import randomize
from tests.single_pass import Forward

FORWARDS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a parameter": lambda m, x: (x + 1, m.weight),
    "a buffer": lambda m, x: (x + 1, m.buffer),
    "a plain tensor": lambda m, x: (x + 1, m.plain),
    "a view of one": lambda m, x: (x + 1, m.buffer.t()),
    "a part of one": lambda m, x: (x @ m.buffer, m.buffer[1:]),
    "a detached one": lambda m, x: (x + 1, m.weight.detach()),
    "one twice": lambda m, x: (m.buffer, m.buffer, x + 1),
    "a factory's": lambda m, x: (x + 1, torch.zeros(4, 4)),
    "two factories'": lambda m, x: (torch.zeros(4, 4), torch.zeros(4, 4), x + 1),
    "one like another": lambda m, x: (torch.ones_like(m.buffer), torch.ones_like(m.buffer), x + 1),
    "a tensor of a number": lambda m, x: (torch.tensor(3.0), x + 1),
    "what is computed of one": lambda m, x: (x + 1, m.weight * 2),
    "a view of that": lambda m, x: (x + 1, (m.buffer * 2).t()),
    "the same computed twice": lambda m, x: (x + 1, m.weight * 2, m.weight * 2),
    "what is read as well": lambda m, x: (x @ (m.buffer * 2), m.buffer * 2),
    "deep in a structure": lambda m, x: {"a": [m.buffer * 2], "b": (x + 1,)},
    "parts of what is computed": lambda m, x: (*(m.buffer * 2).chunk(2), x + 1),
    "a copy": lambda m, x: (m.buffer.clone(), x.clone()),
    "no copy where it is contiguous": lambda m, x: (x.contiguous(), m.buffer.contiguous()),
    "a cast to what it is": lambda m, x: (m.buffer.to(torch.float32), m.buffer.double(), x + 1),
    "an idle dropout's": lambda m, x: (F.dropout(m.buffer, training=False), x + 1),
    "a layer's of a constant": lambda m, x: (m.linear(m.buffer), m.linear(m.buffer), x + 1),
    "two alike": lambda m, x: (x.tanh(), x.tanh()),
    "two alike and a view": lambda m, x: (x.tanh(), x.tanh().t()),
    "two copies": lambda m, x: (x.clone(), x.clone()),
    "parts of two alike": lambda m, x: (x.exp().chunk(2)[0], x.exp().chunk(2)[0]),
    "one value twice": lambda m, x: (lambda y: (y, y))(x.tanh()),
    "a folded layer's weight": lambda m, x: (m.norm(m.linear(x)), m.linear.weight),
    "a folded norm's statistics": lambda m, x: (m.norm(m.linear(x)), m.norm.running_mean),
    "a view of a folded scale": lambda m, x: (m.linear(x) * m.buffer[0], m.buffer.view(16)),
    "a folded scale": lambda m, x: (m.linear(x) * m.weight, m.weight),
    "a matrix": lambda m, x: (torch.addmm(m.buffer[0], x, m.weight), m.weight),
    "a bias of a call": lambda m, x: (F.linear(x, m.weight, m.buffer[0]), m.weight),
}


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("name", FORWARDS)
def test_who_writes_what_is_returned_sees_what_the_model_would_show(name: str, level: int) -> None:
    held = {"linear": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "buffer": torch.randn(4, 4)}
    model = Forward(FORWARDS[name], weight=nn.Parameter(torch.randn(4, 4)), **held)
    model.plain, x = torch.randn(4, 4), torch.randn(4, 4)
    randomize(model.eval())
    fast, model = optimizer.optimize(model, x, level=level), copy.deepcopy(model)
    inputs = x.clone(), x.clone()
    with torch.no_grad():
        for _ in range(3):
            expected, actual = (
                pytree.tree_leaves(run(given))
                for run, given in zip((model, fast), inputs, strict=True)
            )
            torch.testing.assert_close(actual, expected)
            assert sharing(*actual, inputs[1]) == sharing(*expected, inputs[0])
            for each in (*expected, *actual):
                each.add_(1.5)


def sharing(*tensors: Tensor) -> list[int]:
    """For each tensor, the first that shares its memory."""
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [memory.index(each) for each in memory]


class Viewed(nn.Module):
    """A buffer that is a view of a parameter, by which the forward writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("view", self.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        result = (x + self.weight) * 2
        self.view.add_(1)
        return result


def test_a_view_of_a_parameter_stays_its_view() -> None:
    model, other = Viewed().eval(), Viewed().eval()
    fast = optimizer.optimize(model, torch.ones(4), level=0)

    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(fast(torch.ones(4)), other(torch.ones(4)))
    assert not model.weight.any()
