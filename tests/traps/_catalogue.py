"""The list that the traps of each family are entered in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Trap:
    """A legal model that a careless rewrite gets wrong.

    Attributes:
        number: in the catalogue; one trap may have several models.
        what: the trap, in a few words.
        build: makes the model.
        calls: the arguments of each call; the first ones are the example inputs.
        rewritten: whether the optimizer must find something to rewrite all the same.
    """

    number: int
    what: str
    build: Callable[[], nn.Module]
    calls: tuple[tuple[Any, ...], ...]
    rewritten: bool


TRAPS: list[Trap] = []


class Holder(nn.Module):
    """Runs a forward that is given, over members that are given."""

    def __init__(self, forward: Forward, members: dict[str, Callable[[], Any]]) -> None:
        super().__init__()
        self.function = forward
        for name, make in members.items():
            setattr(self, name, make())

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class HolderOfOne(Holder):
    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class HolderOfTwo(Holder):
    def forward(self, x: Any, y: Any) -> Any:
        return self.function(self, x, y)


class HolderOfOneOrTwo(Holder):
    def forward(self, x: Any, y: Any = None) -> Any:
        return self.function(self, x, y)


def trap(
    number: int,
    what: str,
    *calls: Any,
    rewritten: bool = False,
    change: Callable[[Any], Any] = lambda model: None,
    **members: Callable[[], Any],
) -> Callable[[Forward], Forward]:
    """Enter a forward; `change` is done to the model in eval mode before it is optimized."""

    def register(forward: Forward) -> Forward:
        def build() -> nn.Module:
            torch.manual_seed(0)
            kinds = {(2, None): HolderOfOne, (3, None): HolderOfTwo, (3, (None,)): HolderOfOneOrTwo}
            kind = kinds[forward.__code__.co_argcount, forward.__defaults__]
            model = randomized(kind(forward, members).eval())
            change(model)
            return model

        given = tuple(each if isinstance(each, tuple) else (each,) for each in calls)
        TRAPS.append(Trap(number, what, build, given, rewritten))
        return forward

    return register


def randomized(model: nn.Module) -> nn.Module:
    """Weights and statistics that hide nothing, in float64, where a formula shows."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            low, high = (0.5, 2.0) if name.endswith("var") else (-1.0, 1.0)
            values = torch.rand(tensor.shape, generator=generator) * (high - low) + low
            tensor.data = values.to(tensor.dtype)
    return model.double()


ROWS = torch.linspace(-2.0, 2.0, 12, dtype=torch.float64).reshape(3, 4)
SQUARE = torch.linspace(-2.0, 2.0, 16, dtype=torch.float64).reshape(4, 4)
DEEP = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).reshape(2, 3, 4)
CUBE = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64).reshape(4, 4, 4)
IMAGE = torch.linspace(-1.0, 1.0, 512, dtype=torch.float64).reshape(2, 4, 8, 8)
WHOLE = torch.arange(12).reshape(3, 4)


def conv(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(4, 4, 3, **settings)


def up(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.ConvTranspose2d(4, 4, 3, **settings)


def linear(columns: int = 4, rows: int = 4, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(columns, rows, **settings)


def norm(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.BatchNorm2d(4, **settings)


def norm1(features: int = 4, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: nn.BatchNorm1d(features, **settings)
