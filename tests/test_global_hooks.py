"""Hooks of all modules of the process, which see each call of a layer and may change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules

import optimizer
from optimizer.lowering.module import LoweredModule


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 3), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.act(self.conv(x)) + 1.0


REGISTER: dict[str, Callable[[Any], Any]] = {
    "forward": all_modules.register_module_forward_hook,
    "forward pre": all_modules.register_module_forward_pre_hook,
}


@pytest.fixture(params=REGISTER)
def register(request: pytest.FixtureRequest) -> Iterator[Callable[[list[str]], Any]]:
    """Has the names of the classes that are called written to a list, until it is removed."""
    handles = []

    def hooked(seen: list[str]) -> Any:
        handle = REGISTER[request.param](lambda module, *_: seen.append(type(module).__name__))
        handles.append(handle)
        return handle

    yield hooked
    for handle in handles:
        handle.remove()


def of_torch(seen: list[str]) -> list[str]:
    return [name for name in seen if hasattr(nn, name)]


@pytest.mark.parametrize("level", [0, 1, 2])
@torch.no_grad()
def test_hooks_of_all_modules_are_not_built_in(
    register: Callable[[list[str]], Any], level: int
) -> None:
    """pytorch#149502: they would stay after they are removed."""
    model, x, seen = Chain().eval(), torch.randn(1, 3, 8, 8), list[str]()
    handle = register(seen)

    fast = optimizer.optimize(model, x, level=level, tune_seconds=0, engines=())

    assert "left as it is" in str(fast.report)
    assert "hooks" in str(fast.report)
    seen.clear()
    assert torch.equal(fast(x), model(x))
    assert sorted(of_torch(seen)) == ["Conv2d", "Conv2d", "ReLU", "ReLU"]
    handle.remove()
    seen.clear()
    assert torch.equal(fast(x), model(x))
    assert seen == []


@pytest.mark.parametrize("level", [0, 1, 2])
@torch.no_grad()
def test_hooks_of_all_modules_see_later_calls(
    register: Callable[[list[str]], Any], level: int
) -> None:
    model, x, seen = Chain().eval(), torch.randn(1, 3, 8, 8), list[str]()
    fast = optimizer.optimize(model, x, level=level, tune_seconds=0, engines=())
    assert level < 2 or "is not lowered" not in str(fast.report)

    handle = register(seen)
    torch.testing.assert_close(fast(x), model(x))
    called = of_torch(seen)
    handle.remove()
    seen.clear()
    torch.testing.assert_close(fast(x), model(x))

    assert called.count("Conv2d") == 2
    assert seen == []


@torch.no_grad()
def test_no_call_is_lowered_while_all_modules_have_hooks(
    register: Callable[[list[str]], Any],
) -> None:
    fast = optimizer.optimize(Chain().eval(), torch.randn(1, 3, 8, 8), tune_seconds=0, engines=())
    register([])

    assert isinstance(fast, LoweredModule)
    with pytest.raises(optimizer.InputError, match="hooks of all modules"):
        fast.lower(torch.randn(1, 3, 9, 9), tune_seconds=0)
