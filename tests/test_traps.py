"""Forwards that break graph optimizers, each held to what eager does, without the final check."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import optimizer
from optimizer.frontend.module import Unchanged
from tests.trap_models import Trap
from tests.trap_models_capture import TRAPS


@pytest.mark.parametrize("with_example", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("name", TRAPS)
def test_every_call_of_a_trap_is_what_eager_does(name: str, with_example: bool) -> None:
    trap = TRAPS[name]
    torch.manual_seed(0)
    model = trap.build().eval()
    fast = optimized(model, trap, with_example)
    eager = copy.deepcopy(model)

    for call in trap.calls:
        assert_same(observed(eager, call), observed(fast, call))


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_rewritten_or_left_alone_as_it_must(name: str) -> None:
    trap = TRAPS[name]
    fast = optimized(trap.build().eval(), trap, with_example=True)
    outcome = "left alone" if isinstance(fast, Unchanged) or not fast.report.fired else "rewritten"

    assert outcome == trap.outcome


@pytest.mark.parametrize("name", TRAPS)
def test_optimizing_a_trap_leaves_model_inputs_and_random_state_alone(name: str) -> None:
    trap = TRAPS[name]
    model = trap.build().eval()
    inputs = copy.deepcopy(trap.calls[0])
    state, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    optimizer.optimize(model, inputs, check=None, level=1)

    assert_same((state, trap.calls[0]), (dict(model.state_dict()), inputs))
    assert torch.equal(random_state, torch.get_rng_state())


def optimized(model: nn.Module, trap: Trap, with_example: bool) -> Any:
    example = copy.deepcopy(trap.calls[0]) if with_example else None
    return optimizer.optimize(model, example, check=None, level=1)


def observed(model: nn.Module, call: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a call returns, what it leaves in its inputs, and which outputs share their storage."""
    inputs = copy.deepcopy(call)
    torch.manual_seed(1)
    with torch.no_grad():
        output = model(*inputs)
    given = [storage(leaf) for leaf in pytree.tree_leaves(inputs)]
    shared = [[storage(leaf) == each for each in given] for leaf in pytree.tree_leaves(output)]
    return output, inputs, shared


def storage(leaf: Any) -> object:
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, torch.Tensor) else object()


def assert_same(expected: Any, actual: Any) -> None:
    expected, actual = ([*pytree.tree_leaves(each)] for each in (expected, actual))
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(other, one, check_stride=True, equal_nan=True)
        else:
            assert one == other
