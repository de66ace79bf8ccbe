"""What the tests of level 2 share: images, models of a layer, a stub engine, what was chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import optimizer
from optimizer.lowering import engines
from optimizer.lowering.choose import Times
from optimizer.lowering.module import LoweredModule

Seconds = dict[str, float]


class Then(nn.Module):
    """A layer, and a function of what it gives."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.function = layer or nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


class Running(nn.Module):
    """A program that runs a function."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *given: torch.Tensor) -> Any:
        return self.run(*given)


class StubEngine:
    """Runs a region by torch; like the kernels of engines, it loses what is not finite."""

    name, title, module = "stub", "Stub", "torch"

    def compile(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor], threads: int) -> Any:
        return lambda given: [each.nan_to_num(0, 0, 0) for each in graph(*given)]


def offer(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let "auto" be these engines, of which "stub" is one."""
    monkeypatch.setitem(engines.ENGINES, "stub", StubEngine())
    monkeypatch.setattr(engines, "AUTOMATIC", names)


def racing(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[list[str]], Seconds]
) -> list[list[str]]:
    """Nothing is timed: a function says what each takes. Return what was raced."""
    raced: list[list[str]] = []

    def race(self: Any, runs: Any, *rest: Any, **more: Any) -> Seconds:
        raced.append(list(runs))
        return seconds(list(runs))

    monkeypatch.setattr(Times, "race", race)
    return raced


def all_alike(names: list[str]) -> Seconds:
    return dict.fromkeys(names, 1.0)


def last_wins(names: list[str]) -> Seconds:
    """The plan is faster than anything, then an engine, then what is offered last."""
    order = sorted(names, key=lambda name: name in engines.engines_here(engines.ENGINES))
    seconds = {name: 1.0 / place for place, name in enumerate(order, 1)}
    return {"plan": 0.1, "portable": 1.0} if "plan" in names else seconds


def image(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3, 8, 8)), generator=torch.Generator().manual_seed(seed))


def lowered(model: nn.Module, *inputs: Any, train: bool = False, **options: Any) -> LoweredModule:
    """The model for calls like this one, at level 2 if nothing else is said."""
    options = {"level": 2} | options
    fast = optimizer.optimize(model.train(train), inputs or None, **options)
    assert isinstance(fast, LoweredModule)
    return fast


def plan_of(fast: LoweredModule, *args: Any, **kwargs: Any) -> Any:
    """What runs instead of the portable code for a call, or None."""
    with torch.no_grad():
        return fast.plan_for(args, kwargs)


def chosen(fast: LoweredModule) -> list[str]:
    return [choice.chosen for choice in fast.report.choices]
