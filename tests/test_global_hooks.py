"""Hooks of all modules of the process, which see each call of a layer and may change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as all_modules

import optimizer
from optimizer.lowering.module import LoweredModule
from tests.single_pass import Forward

LEVELS = pytest.mark.parametrize("level", [0, 1, 2])
X = torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)
KINDS = (
    all_modules.register_module_forward_hook,
    all_modules.register_module_forward_pre_hook,
)


@pytest.fixture(params=KINDS)
def register(request: pytest.FixtureRequest) -> Iterator[Callable[[list[str]], Any]]:
    """Has the classes of torch that are called written to a list, until it is removed."""
    handles = []

    def hooked(seen: list[str]) -> Any:
        def note(module: nn.Module, *_: Any) -> None:
            seen.extend([type(module).__name__] * hasattr(nn, type(module).__name__))

        handles.append(request.param(note))
        return handles[-1]

    yield hooked
    for handle in handles:
        handle.remove()


def chain() -> nn.Module:
    return Forward("m.act(m.conv(x)) + 1.0", conv=nn.Conv2d(3, 4, 3), act=nn.ReLU()).eval()


def optimized(model: nn.Module, level: int) -> Any:
    return optimizer.optimize(model, X, level=level, tune_seconds=0, engines=())


@LEVELS
@torch.no_grad()
def test_hooks_of_all_modules_are_not_built_in(
    register: Callable[[list[str]], Any], level: int
) -> None:
    """pytorch#149502: they would stay after they are removed."""
    model, seen = chain(), list[str]()
    handle = register(seen)

    fast = optimized(model, level)

    assert "left as it is: hooks" in str(fast.report)
    seen.clear()
    assert torch.equal(fast(X), model(X))
    assert seen == ["Conv2d", "ReLU"] * 2
    handle.remove()
    seen.clear()
    assert torch.equal(fast(X), model(X))
    assert seen == []


@LEVELS
@torch.no_grad()
def test_hooks_of_all_modules_see_later_calls(
    register: Callable[[list[str]], Any], level: int
) -> None:
    model, seen = chain(), list[str]()
    fast = optimized(model, level)
    assert isinstance(fast, LoweredModule) is (level == 2)

    handle = register(seen)
    torch.testing.assert_close(fast(X), model(X))

    assert seen.count("Conv2d") == 2
    if level == 2:
        with pytest.raises(optimizer.InputError, match="hooks of all modules"):
            fast.lower(torch.randn(1, 3, 9, 9), tune_seconds=0)
    handle.remove()
    seen.clear()
    torch.testing.assert_close(fast(X), model(X))
    assert seen == []
