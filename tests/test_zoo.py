"""Real models in processes of their own: what is right, what is wrong, what ends its process."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import zoo


class Returns(nn.Module):
    """What a function makes of its input."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def killed(x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def only_small(x: torch.Tensor) -> torch.Tensor:
    """NaN for the second inputs that are tried, and for no others."""
    return x if x.max() > 1 else x * math.nan


KINDS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "right": (lambda x: x, 0),
    "wrong": (lambda x: x * 1.001, 1),
    "wrong at other values": (only_small, 1),
    "raised": (lambda x: x @ torch.ones(99), 1),
    "SIGKILL": (killed, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_outcome(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    function, failed = KINDS[kind]
    fast = Returns(function)
    fast.report = type("Report", (), {"choices": (), "remarks": ()})()  # type: ignore[assignment]
    monkeypatch.setattr(zoo, "load", lambda name: (nn.Identity(), (torch.full((3,), 1.7),)))
    monkeypatch.setattr("optimizer.optimize", lambda model, inputs, **options: fast)

    assert zoo.main(["any"]) == failed
    assert capsys.readouterr().out.startswith(f"any: {kind.partition(' ')[0]}")


def test_what_cannot_be_made_or_is_large_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(zoo, "_LARGE", 3)
    monkeypatch.setattr(zoo, "load", lambda name: {"large": (nn.Linear(2, 2), ())}[name])

    assert zoo.main(["large", "none"]) == 0
    assert capsys.readouterr().out.count("skipped") == 3  # and once in the sum
