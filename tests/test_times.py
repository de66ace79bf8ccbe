"""How long programs are timed before one of them is chosen."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.internals import AS_IT_IS, Chooser, Times, Tuning, choose
from tests.level_2 import line_of
from tests.single_pass import rows


@pytest.fixture
def slept(monkeypatch):
    """Programs by name, whose calls take so many seconds in turn; only they move the clock."""
    now = [0.0]
    monkeypatch.setattr(choose.time, "perf_counter", lambda: now[0])

    def program(seconds):
        each = itertools.cycle(seconds)

        def run(*inputs):
            now[0] += next(each)

        return run

    return lambda **seconds: {name: program(each) for name, each in seconds.items()}


RACES: dict[str, tuple[Any, ...]] = {
    # seconds of both, the deadline, and options of the race; so many rounds
    "close in one round": ((0.3,), (0.2, 0.31), 100, {}, 7),
    "clear": ((0.3,), (0.26,), 100, {}, 2),
    "clear but for what warms up": ((0.03,), (0.04, *[0.02] * 9), 100, {}, 2),
    "clear in moments": ((0.003,), (0.0015,), 100, {"fewest": 1}, 7),
    "no time": ((0.3,), (0.29,), 0, {"fewest": 1}, 1),
    "no time for the fewest": ((0.3,), (0.29,), 0, {"fewest": 2}, 2),
    "no time, but for the least": ((0.01,), (0.0095,), 0, {}, 5),
}


@rows("one other deadline race rounds", RACES)
def test_a_race_goes_on_while_it_is_close(slept, one, other, deadline, race, rounds):
    times, programs = Times(()), slept(one=one, other=other)
    found = times.race(programs, deadline, **race)
    assert [len(times.seconds[name]) for name in programs] == [rounds] * 2
    assert rounds < 7 or times.race(dict.fromkeys(programs), 0) == found  # these are known


@pytest.mark.parametrize("graphs", [True, False])
def test_launches_do_not_count_beside_graphs(slept, graphs):
    times = Times((), graphs=graphs)
    times.call("one", slept(one=(0.3,))["one"], ())
    assert (not times.seconds) is graphs


PLANS: dict[str, tuple[Any, ...]] = {
    "always faster": ((0.9,), 100, ""),
    "slower once": ((0.9, 0.9, 0.9, 1.1, 0.9, 0.9, 0.9), 100, ""),
    "slower twice": ((0.9, 1.1, 0.9, 1.1, 0.9, 0.9, 0.9), 100, "slower in 2 of 7 rounds"),
    "hardly faster": ((0.99,), 100, "0.99 of the time"),
    "slower once of two": ((0.5, 1.1), 3, "slower in 1 of 2 rounds"),
}


@rows("plan deadline why", PLANS)
def test_a_plan_is_worth_it_if_it_is_faster_and_surely_so(slept, plan, deadline, why):
    assert Times(()).slower(slept(plan=plan, portable=(1.0,)), deadline) == why


def test_a_race_ends_when_the_device_is_done(monkeypatch):
    events = []
    device = SimpleNamespace(synchronize=lambda: events.append("wait"))
    monkeypatch.setattr(choose, "device_of", lambda tensors: device)
    Times((torch.ones(1),)).race({"one": lambda x: events.append("run")}, 0, fewest=1)
    assert events[:3] == ["wait", "run", "wait"]


def test_beside_an_engine_that_is_by_far_faster_no_kernel_is_tried(slept):
    chooser, times = Chooser(Tuning(engines=())), Times(())
    chooser.engines = {"engine": None}
    times.seconds |= {AS_IT_IS: [1.0, 1.0], "engine": [0.7, 0.7]}
    programs = slept(**{AS_IT_IS: (1.0,), "engine": (0.7,)})
    makers = {name: lambda _, made=each: made for name, each in programs.items()}
    made = chooser.choose("", "", makers, ["engine", "kernel"], [], times)
    assert (made, chooser.choices[0].rejected) == (programs["engine"], {})


def test_a_region_answers_once_for_all_candidates_and_for_regions_that_are_alike(monkeypatch):
    calls = []

    def call(self, name, program, inputs, fill=False):
        calls.append(name)
        self.seconds[name].append(1.0)
        return program(*inputs)

    monkeypatch.setattr(Times, "call", call)
    layers, x = nn.ModuleList(nn.Conv2d(4, 4, 1, groups=2) for _ in "ab"), torch.randn(2, 4, 4, 4)
    run = lambda x: layers[1](layers[0](x).flip(0))  # noqa: E731
    line = line_of(run, layers.parameters(), x).module
    (chooser := Chooser(Tuning(engines=()))).by_region(line, [x])
    first, second = "packed weights, channels_last", "packed Linear, channels_last"
    assert calls[:6] == [AS_IT_IS] * 2 + [first] * 2 + [second] * 2
    assert [bool(each.seconds) for each in chooser.choices] == [True, False]  # which is alike
