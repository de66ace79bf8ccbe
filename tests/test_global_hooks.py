"""Hooks of all modules of the process, or of a result, which may change what a call answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as all_modules

import optimizer
from tests.internals import LoweredModule
from tests.single_pass import Forward

X = torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)
KINDS = all_modules.register_module_forward_hook, all_modules.register_module_forward_pre_hook


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("register", KINDS)
@torch.no_grad()
def test_hooks_of_all_modules_see_each_call_and_are_not_built_in(register: Any, level: int) -> None:
    """pytorch#149502: they would stay after they are removed."""
    seen: list[str] = []

    def note(module: nn.Module, *_: Any) -> None:
        seen.extend([type(module).__name__] * hasattr(nn, type(module).__name__))

    def optimized() -> Any:
        return optimizer.optimize(model, X, level=level, tune_seconds=0, engines=())

    model = Forward("m.act(m.conv(x)) + 1.0", conv=nn.Conv2d(3, 4, 3), act=nn.ReLU()).eval()
    before = optimized()
    assert isinstance(before, LoweredModule) is (level == 2)
    with register(note):
        during = optimized()
        assert "left as it is: hooks" in str(during.report)
        seen.clear()
        assert torch.equal(during(X), model(X))
        assert seen == ["Conv2d", "ReLU"] * 2
        torch.testing.assert_close(before(X), model(X))
        assert seen.count("Conv2d") == 4
        if level == 2:
            with pytest.raises(optimizer.InputError, match="hooks of all modules"):
                before.lower(torch.randn(1, 3, 9, 9), tune_seconds=0)
    seen.clear()
    for each in (before, during):
        torch.testing.assert_close(each(X), model(X))
    assert seen == []


@pytest.mark.parametrize("example", [None, X])
def test_hooks_of_a_result_are_kept_when_it_is_optimized_again(example: Any) -> None:
    fast = optimizer.optimize(nn.Conv2d(3, 4, 3).eval(), X, level=1)
    fast.register_forward_hook(lambda module, given, y: y + 1)

    again = optimizer.optimize(fast, example, level=1, check=None)

    torch.testing.assert_close(again(X), fast(X))
