"""What the tests of the passes share: a model of one forward, one pass alone, what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import optimizer
from optimizer.core.guards import GUARDS
from optimizer.core.node import callee
from optimizer.testing import assert_equivalent, inputs_like, untouched


class Forward(nn.Module):
    """Runs `forward(self, x)` of a case over some layers, parameters and buffers."""

    def __init__(self, forward: Callable[..., Any], **held: nn.Module | Tensor | None) -> None:
        super().__init__()
        for name, value in held.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def optimized_by(name: str, model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """What one pass makes of a model at level 1, unchecked; the model is left as it was."""
    options = {"level": 1, "check": None} | options
    with untouched(model):
        return optimizer.optimize(model, inputs or None, only=[name], **options)


def assert_as_near_to_the_truth(
    name: str, model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Assert that a pass fires once, and errs no more than four times as much as the model."""
    (x,) = inputs_like([shape], "random", 0, dtype)
    model = model.to(dtype)

    fast = optimized_by(name, model, x)

    with torch.no_grad():
        eager, folded = model(x).double(), fast(x).double()
        truth = model.double()(x.double())
    bound = max(4 * (eager - truth).abs().max(), 1e-15 * truth.abs().max())
    assert fast.report.counts() == {name: 1}
    assert (folded - truth).abs().max() <= bound


def assert_left_alone(model: nn.Module, fast: Any, inputs: tuple[Any, ...], *reasons: str) -> None:
    """Assert that nothing fired, for these reasons, and that the answer is the same to the bit."""
    assert tuple(refusal.reason for refusal in fast.report.refused) == reasons
    assert fast.report.fired == ()
    assert_equivalent(model, fast, inputs, exact=True)


def callees(fast: Any) -> list[Any]:
    """The functions, classes and methods that a graph calls, in order, but for its guards."""
    called = [callee(node) or node.target for node in fast.graph.nodes if node.op[:4] == "call"]
    return [each for each in called if each not in GUARDS]
