"""A copy that nobody can tell from what was copied is not made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizer.testing import assert_equivalent
from tests.single_pass import Forward, callees, optimized_by

NAME = "remove_clones"
optimized = partial(optimized_by, NAME)


def tensor(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64)


def residual(m: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    saved = y.clone()
    z = torch.relu(y)
    z += saved
    return z


def returned_source(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.tanh(x)
    return y, y.clone().exp()


def written_before(m: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    y.mul_(2.0)
    return torch.relu(torch.clone(y))


REMOVED: dict[str, Callable[..., Any]] = {
    "a residual": residual,
    "a method": lambda m, x: torch.relu(torch.tanh(x).clone()),
    "a function": lambda m, x: torch.clone(torch.tanh(x)).sum(-1),
    "two in a row": lambda m, x: torch.relu(torch.tanh(x).clone().clone()),
    "a source that is returned": returned_source,
    "a source that was written before": written_before,
}


@pytest.mark.parametrize("case", REMOVED)
def test_removes(case: str) -> None:
    model = Forward(REMOVED[case]).eval()

    fast = optimized(model, tensor(3, 4))

    assert not {"clone", torch.clone} & {*callees(fast)}
    for x in (tensor(3, 4), tensor(5, 6).t(), tensor(1, 4).expand(3, 4), tensor(6, 8)[::2, ::2]):
        assert_equivalent(model, fast, (x,), exact=True)
        assert torch.equal(fast(x)[0], model(x)[0])


def written_copy(m: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    z = y.clone()
    z[0] = 2.0
    return y + z.exp()


def written_later(m: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    z = y.clone().mul(3.0)
    y.mul_(2.0)
    return z + y


def written_through_a_view(m: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    z = y.clone()
    y[0].mul_(2.0)
    return z + y


OUTSIDE = "what is copied was not made here, and may lie anyhow in memory"
SEEN = "the copy or a view of it is seen"
LATER = "what is copied is written later"
REFUSALS: dict[str, tuple[Callable[..., Any], str]] = {
    "an input": (lambda m, x: torch.relu(x.clone()), OUTSIDE),
    "a view": (lambda m, x: torch.relu(torch.tanh(x).t().clone()), OUTSIDE),
    "a view of the copy": (lambda m, x: torch.tanh(x).clone().view(-1).exp(), SEEN),
    "a copy that is returned": (lambda m, x: torch.tanh(x).clone(), SEEN),
    "a copy that may be reshaped": (lambda m, x: torch.tanh(x).clone().flatten().exp(), SEEN),
    "a copy that is written": (written_copy, "the copy is written"),
    "a copy that is written in place": (lambda m, x: torch.tanh(x).clone().exp_().sum(), SEEN),
    "a source that is written": (written_later, LATER),
    "a source that is written in part": (written_through_a_view, LATER),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    forward, reason = REFUSALS[case]
    model = Forward(forward).eval()

    fast = optimized(model, tensor(3, 4))

    assert [refusal.reason for refusal in fast.report.refused] == [reason]
    assert fast.report.fired == ()
    assert_equivalent(model, fast, (tensor(3, 4),), exact=True)


def test_a_copy_in_another_layout_is_left_alone() -> None:
    function = lambda m, x: torch.relu(torch.tanh(x).clone(memory_format=torch.channels_last))  # noqa: E731
    model = Forward(function).eval()

    fast = optimized(model, tensor(2, 3, 4, 5))

    assert (fast.report.fired, fast.report.refused) == ((), ())
    assert_equivalent(model, fast, (tensor(2, 3, 4, 5),), exact=True)
