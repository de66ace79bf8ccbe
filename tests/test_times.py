"""How long programs are timed before one of them is chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optimizer.core.inputs import Call
from optimizer.lowering import choose as _times
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES
from optimizer.lowering.choose import Times
from optimizer.lowering.trace import straight_line


class Slept:
    """A clock that only programs move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.runs: list[str] = []
        monkeypatch.setattr(_times.time, "perf_counter", lambda: self.now)

    def program(self, name: str, *seconds: float) -> Callable[..., Any]:
        """One whose calls take so long, in turn and over again."""
        each = itertools.cycle(seconds)

        def run(*inputs: Any) -> str:
            self.now += next(each)
            self.runs.append(name)
            return name

        return run


def test_a_race_is_over_once_no_time_of_the_fastest_comes_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Slept(monkeypatch)
    runs = {"slow": clock.program("slow", 0.3), "fast": clock.program("fast", 0.2)}

    assert Times(()).race(runs, 100) == pytest.approx({"slow": 0.3, "fast": 0.2})
    assert clock.runs == ["slow", "fast"] * 2


@pytest.mark.parametrize(("other", "rounds"), [((0.2, 0.31), 7), ((0.29,), 7), ((0.26,), 2)])
def test_a_race_goes_on_while_it_is_close(
    monkeypatch: pytest.MonkeyPatch, other: tuple[float, ...], rounds: int
) -> None:
    clock = Slept(monkeypatch)
    runs = {"one": clock.program("one", 0.3), "other": clock.program("other", *other)}
    Times(()).race(runs, 100)

    assert len(clock.runs) == 2 * rounds


def test_a_race_of_moments_takes_all_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Slept(monkeypatch)
    runs = {"one": clock.program("one", 0.003), "other": clock.program("other", 0.0015)}
    Times(()).race(runs, 100, fewest=1)

    assert len(clock.runs) == 2 * 7


@pytest.mark.parametrize("fewest", [1, 2])
def test_a_race_takes_its_fewest_rounds_though_time_is_up(
    monkeypatch: pytest.MonkeyPatch, fewest: int
) -> None:
    clock = Slept(monkeypatch)
    runs = {"one": clock.program("one", 0.3), "other": clock.program("other", 0.29)}
    Times(()).race(runs, 0, fewest=fewest)

    assert len(clock.runs) == 2 * fewest


def test_a_race_takes_enough_time_though_it_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Slept(monkeypatch)
    runs = {"one": clock.program("one", 0.01), "other": clock.program("other", 0.0095)}
    Times((), least=0.05).race(runs, 0)

    assert len(clock.runs) == 2 * 3


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ((0.9,), ""),
        ((0.9, 0.9, 0.9, 1.1, 0.9, 0.9, 0.9), ""),
        ((0.9, 1.1, 0.9, 1.1, 0.9, 0.9, 0.9), "slower in 2 of 7 rounds"),
        ((0.99,), "0.99 of the time"),
    ],
)
def test_a_plan_is_worth_it_if_it_is_faster_and_surely_so(
    monkeypatch: pytest.MonkeyPatch, plan: tuple[float, ...], why: str
) -> None:
    clock = Slept(monkeypatch)
    runs = {"plan": clock.program("plan", *plan), "portable": clock.program("portable", 1.0)}

    assert Times(()).slower(runs, 100) == why


def test_a_plan_of_few_rounds_must_win_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Slept(monkeypatch)
    runs = {"plan": clock.program("plan", 0.5, 1.1), "portable": clock.program("portable", 1.0)}

    assert Times(()).slower(runs, 3) == "slower in 1 of 2 rounds"


def test_what_was_verified_is_timed_unless_it_is_over_in_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, times = Slept(monkeypatch), Times(())
    runs = {"slow": clock.program("slow", 0.3), "fast": clock.program("fast", 0.2)}
    for name in ("slow", "fast", "slow", "fast"):
        assert times.call(name, runs[name], ()) == name
    times.call("short", clock.program("short", 0.0005), ())
    clock.runs.clear()

    assert times.race(runs, 100) == pytest.approx({"slow": 0.3, "fast": 0.2})
    assert not clock.runs
    assert not times.seconds["short"]


def test_a_candidate_is_timed_while_it_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def call(self: Times, name: str, program: Any, inputs: Any) -> Any:
        calls.append(name)
        return program(*inputs)

    monkeypatch.setattr(Times, "call", call)
    x = torch.randn(2, 3, 4, 4)
    region, inputs = straight_line(Tupled(), [], Call((x,), {})).module, [x]
    make = CANDIDATES["channels_last"]
    _times._verified("channels_last", make, region, Times(inputs), timed=True)

    assert calls == [AS_IT_IS, "channels_last"] * 2


class Tupled(nn.Module):
    """A region: it returns a tuple."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.relu(),)
