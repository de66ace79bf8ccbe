"""Which program runs a region: what is offered, and right, is timed in turn."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from optimizer._errors import InputError
from optimizer._graph import tensors_of
from optimizer._inputs import require_seconds
from optimizer._report import Choice
from optimizer.lowering._candidates import (
    CANDIDATES,
    Makers,
    Program,
    prepared,
    tried,
    verified,
)
from optimizer.lowering._key import key_of
from optimizer.lowering._policies import AS_IT_IS, Policy, policy_of
from optimizer.lowering._regions import WEIGHTED, name_of
from optimizer.lowering._times import BRIEF, Times
from optimizer.lowering.engines import Compiled, engines_here

Made = TypeVar("Made", bound=Callable[..., Any])
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 7
WORTH_IT = 0.98  # of the time of the region as it is, at most


class Chooser:
    """Chooses for one region after another, within a budget of time.

    Args:
        seconds: how long the timing of all regions may take; every candidate gets two rounds in
            any case. With 0 nothing is timed, and only regions that convolve are lowered.
        known: what to choose, by the key of a region; regions not in it are timed.
        engines: the names of those that may run a region on the CPU.

    Raises:
        InputError: one of them cannot be used.
    """

    def __init__(
        self, seconds: float, known: Mapping[str, str], engines: Iterable[str] = ()
    ) -> None:
        if not isinstance(known, Mapping):
            raise InputError(f"decisions is {known!r}: pass a mapping from regions to choices.")
        self.tunes = require_seconds(seconds) > 0
        self.deadline = time.perf_counter() + seconds
        self.known = dict(known)
        self.choices: list[Choice] = []
        here = engines_here(engines)
        self.engines = {name: functools.partial(Compiled, each) for name, each in here.items()}
        self.verified: set[str] = set()  # keys of regions, of which another has been prepared here
        self.in_graphs = True  # on a device that has them

    def __call__(
        self, region: fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> tuple[Program, Sequence[torch.Tensor]]:
        """The program to run a region with inputs like these, and what it makes of them.

        It leaves the inputs as they are.
        """
        device = policy_of(inputs) or Policy()
        engines = self.engines if device.takes_engines else {}
        untimed = next(iter(engines), device.untimed(region, inputs))
        offered = [*engines, *device.offered(region, inputs)]
        what, key = _described(region), key_of(region, inputs, engines)
        times = Times(inputs, BRIEF)
        program = self._run_by(offered, what, key, region, times, untimed)
        if program is not region:
            held = sum(each.numel() * each.element_size() for each in tensors_of(region))
            self.choices[-1] = replace(self.choices[-1], held=held)
        made = times.first.get(self.known[key])
        return program, program(*inputs) if made is None else made

    def for_call(
        self, program: Program, line: fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> Program:
        """What runs a whole call of `line`, of which `program` runs each region as was chosen."""
        offered = (policy_of(inputs) or Policy()).offered_for_calls() if self.in_graphs else []
        if not offered:
            return program
        key = f"call {key_of(line, inputs)}"
        return self._run_by(offered, "the whole call", key, program, Times(inputs), offered[0])

    def _run_by(
        self,
        offered: Sequence[str],
        what: str,
        key: str,
        program: Program,
        times: Times,
        untimed: str,
    ) -> Program:
        makers: Makers = CANDIDATES | self.engines
        given = program, times.inputs
        ready: dict[str, Callable[[], Program | str]]
        if self.settled(key, untimed, makers):
            prepare = prepared if key in self.verified else tried
            ready = {
                name: functools.partial(prepare, make, *given) for name, make in makers.items()
            }
        else:
            names = [AS_IT_IS, *offered]
            ready = {n: functools.partial(verified, makers[n], *given, n, times.run) for n in names}
        self.verified.add(key)
        return self.pick(what, key, ready, untimed, times)

    def settled(self, key: str, policy: str, names: Container[str]) -> str:
        """What needs no timing: an earlier decision, or the policy where nothing is timed.

        A decision for what is not among `names`, of another version maybe, counts for nothing.
        """
        found = self.known.get(key, "")
        return found if found in names else "" if self.tunes else policy

    def pick(
        self,
        what: str,
        key: str,
        makers: Mapping[str, Callable[[], Made | str]],
        policy: str,
        times: Times,
    ) -> Made:
        """The fastest of what can be made, or what is settled; `AS_IT_IS` where that is no good.

        A maker that cannot returns why. What is chosen for `what` is noted.
        """
        settled = self.settled(key, policy, makers)
        spent = dict[str, float]()
        offered = {settled: makers[settled]} if settled else makers
        made = dict(self._made(offered, times, spent))
        rejected = {name: found for name, found in made.items() if isinstance(found, str)}
        good = {name: found for name, found in made.items() if not isinstance(found, str)}
        seconds = self.race(good, times) if len(good) > 1 else {}
        best = settled if settled in good else _fastest(seconds)
        self.known[key] = best
        self.choices.append(Choice(what, key, best, seconds, rejected, spent))
        chosen = good[best] if best in good else makers[best]()
        assert not isinstance(chosen, str), "what is as it is can always be made"
        return chosen

    def _made(
        self, makers: Mapping[str, Callable[[], Made | str]], times: Times, spent: dict[str, float]
    ) -> Iterator[tuple[str, Made | str]]:
        """What can be made, or why not: nothing after an engine that is clearly faster.

        The seconds that each took are noted in `spent`.
        """
        won = False
        for name, make in makers.items():
            if won and name not in self.engines:
                return
            start = time.perf_counter()
            made = make()
            spent[name] = time.perf_counter() - start
            yield name, made
            if name in self.engines and not isinstance(made, str):
                won = won or times.is_clearly_faster(name, AS_IT_IS)

    def race(
        self,
        programs: Mapping[str, Callable[..., Any]],
        times: Times,
        fewest: int = _FEWEST_ROUNDS,
    ) -> dict[str, float]:
        """The median time of each until the device is done.

        They take turns until one is faster beyond doubt, or the budget is spent.
        """
        deadline = max(self.deadline, time.perf_counter() + times.enough)
        while (done := times.rounds(programs)) < _MOST_ROUNDS:
            if done >= fewest and (times.are_clear(programs) or time.perf_counter() > deadline):
                break
            for name, program in programs.items():
                times.add(name, program)
        return times.medians(programs)


def _fastest(seconds: Mapping[str, float]) -> str:
    best = min(seconds, key=seconds.__getitem__, default=AS_IT_IS)
    return best if seconds and seconds[best] <= WORTH_IT * seconds[AS_IT_IS] else AS_IT_IS


def _described(region: fx.GraphModule) -> str:
    counts = Counter(name for n in region.graph.nodes if (name := name_of(n)) in WEIGHTED)
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "attention"
