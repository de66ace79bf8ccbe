"""Numbers that follow from the sizes of the inputs become literals, where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import optimizer
from models._torchvision_import import import_torchvision
from optimizer.core.guards import expect_shape
from tests.single_pass import Forward

NAME = "specialize_shapes"
DEEP = torch.linspace(-1.0, 1.0, 24).reshape(2, 3, 4)


class Holder(Forward):
    def forward(self, x: Any, n: Any = 1) -> Any:
        return self.function(x, n)


def specialized(function: Callable[..., Any], *inputs: Any) -> Any:
    model = Holder(function).eval()
    return optimizer.optimize(model, inputs, static_shapes=True, capture="symbolic", level=1)


def asserted(x: Any, n: Any) -> Any:
    torch._assert(x.shape[0] == 2, "two")
    return x * 2


LITERAL: dict[str, Callable[..., Any]] = {
    "a size": lambda x, n: x * x.shape[1],
    "size()": lambda x, n: x * x.size(-1),
    "dim() and ndim": lambda x, n: x * (x.dim() + x.ndim),
    "numel()": lambda x, n: x * x.numel(),
    "arithmetic": lambda x, n: (
        x.reshape((x.shape[0] * x.shape[1] + 2) // 4, -1) * x.shape[2] ** -0.5
    ),
    "sizes of a slice": lambda x, n: x * (x.shape[1:][0] + x.shape[:-1][1]),
    "a comparison": lambda x, n: x * (x.shape[0] == 2),
    "the size of a result": lambda x, n: x.reshape(6, 4)[:3] * (x * 2).transpose(0, 1).shape[0],
    "an assertion": asserted,
    "two results": lambda x, n: (x * 2, x.shape[0]),
}
ALONE: dict[str, Callable[..., Any]] = {
    "a device": lambda x, n: x * 2 if x.device else x,
    "a stride": lambda x, n: x * x.stride(0),
    "a property of the layout": lambda x, n: x * x.is_contiguous(),
    "a number that is given": lambda x, n: x * (n + 1),
    "a method of a number": lambda x, n: x * x.shape[0].bit_length(),
    "how many a mask chooses": lambda x, n: x * x[x > 0].size(0),
    "what follows from it": lambda x, n: x * ((x[x > 0] * 2).relu().numel() > 12),
    "how many are not zero": lambda x, n: x * torch.nonzero(x > 0).shape[0],
    "a shape as it is": lambda x, n: (x * 2).reshape(x.shape),
}


@pytest.mark.parametrize("name", LITERAL)
def test_becomes_a_literal(name: str) -> None:
    model = Holder(LITERAL[name]).eval()

    fast = specialized(LITERAL[name], DEEP)

    assert NAME in fast.report.counts()
    read = ("'shape'", ".size(", ".dim(", ".numel(", "'ndim'", "//", "_assert")
    assert [word for word in read if word in fast.code] == []
    torch.testing.assert_close(fast(DEEP), model(DEEP))
    with pytest.raises(optimizer.InputError, match=r"shape \(2, 3, 4\) and got \(1, 3, 4\)"):
        fast(DEEP[:1])


@pytest.mark.parametrize("name", ALONE)
def test_is_left_alone(name: str) -> None:
    model = Holder(ALONE[name]).eval()

    fast = specialized(ALONE[name], DEEP, 2)

    if isinstance(fast, optimizer.OptimizedModule):
        assert expect_shape not in {node.target for node in fast.graph.nodes}
    for x in (DEEP, DEEP[:1], DEEP.transpose(0, 1)):
        torch.testing.assert_close(fast(x, 2), model(x, 2))


def test_without_being_asked_for_it_does_nothing() -> None:
    fast = optimizer.optimize(Holder(LITERAL["arithmetic"]).eval(), (DEEP,), level=1)

    assert NAME not in fast.report.counts()
    assert fast(DEEP.repeat(2, 1, 1)).shape == (3, 16)


def test_only_names_it_too() -> None:
    fast = optimizer.optimize(Holder(LITERAL["a size"]).eval(), (DEEP,), only=[NAME], level=1)

    assert NAME in fast.report.counts()


def test_a_number_that_is_given_stays_one() -> None:
    model = Holder(lambda x, n: x * (x.shape[0] // n)).eval()

    fast = specialized(model.function, DEEP, 1)

    assert fast.report.counts()[NAME] == 2
    for n in (1, 2, 3):
        torch.testing.assert_close(fast(DEEP, n), model(DEEP, n))


@pytest.mark.parametrize(("name", "count"), [("shufflenet_v2_x1_0", 96), ("maxvit_t", 352)])
def test_the_shapes_of_a_real_model(name: str, count: int) -> None:
    torch.manual_seed(0)
    model = import_torchvision().models.get_model(name, weights=None).eval()
    x: Tensor = torch.randn(1, 3, 224, 224)

    fast = optimizer.optimize(model, x, static_shapes=True, check=None, level=1)

    assert fast.report.counts()[NAME] == count
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
