"""Which program runs a region: what is offered, and right, is timed in turn."""

from __future__ import annotations

import copy
import functools
import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import torch
from torch import fx

from optimizer.core.device import device_of
from optimizer.core.inputs import require_seconds, tensors_in
from optimizer.core.node import tensors_of
from optimizer.core.report import Choice
from optimizer.lowering.candidates import CANDIDATES, Makers, Program, prepared, tried, verified
from optimizer.lowering.engines import Compiled, engines_here
from optimizer.lowering.partition import WEIGHTED, extract_layers, name_of
from optimizer.lowering.policies import AS_IT_IS, Policy, describe_device, policy_of

_MOMENT = 1e-3  # seconds: shorter ones say more of the clock and the machine
SHORT = 0.05  # seconds that a race may take in any case, and takes before it is clear
BRIEF = 0.02  # the same for one region of several
_CLEARLY = 0.9  # of the time of any other, at most


class Times:
    """What calls with some inputs took, by the name of the program.

    What disturbs the machine lasts longer than a moment: before `enough` seconds, nothing is clear.
    """

    def __init__(self, inputs: Sequence[Any], enough: float = SHORT) -> None:
        self.inputs, self.enough = inputs, enough
        self.wait = device_of(tensors_in(inputs)).synchronize
        self.seconds = defaultdict[str, list[float]](list)
        self.first: dict[str, Any] = {}  # what the first call of each returned
        self.spent = 0.0

    def run(self, name: str, program: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """A call with inputs like these; it counts where it fills a moment."""
        self.wait()
        start = time.perf_counter()
        result = program(*inputs)
        self.wait()
        elapsed = time.perf_counter() - start
        if elapsed >= _MOMENT:
            self._note(name, elapsed, 1)
        self.first.setdefault(name, result)
        return result

    def add(self, name: str, program: Callable[..., Any]) -> None:
        """What a call takes, on average over as many as fill a moment."""
        self.wait()
        calls, start, elapsed = 0, time.perf_counter(), 0.0
        while elapsed < _MOMENT:
            program(*self.inputs)
            self.wait()
            calls, elapsed = calls + 1, time.perf_counter() - start
        self._note(name, elapsed, calls)

    def _note(self, name: str, elapsed: float, calls: int) -> None:
        self.seconds[name].append(elapsed / calls)
        self.spent += elapsed

    def rounds(self, names: Iterable[str]) -> int:
        """How often each of them was timed, at least."""
        return min(len(self.seconds[name]) for name in names)

    def medians(self, names: Iterable[str]) -> dict[str, float]:
        """Seconds of a call."""
        return {name: median(self.seconds[name]) for name in names}

    def are_clear(self, names: Iterable[str]) -> bool:
        """Whether no time of the fastest comes near to any of another."""
        if self.spent < self.enough:
            return False
        best, *others = sorted(names, key=lambda name: median(self.seconds[name]))
        return all(self.is_clearly_faster(best, other) for other in others)

    def is_clearly_faster(self, name: str, other: str) -> bool:
        """Whether no time of the one comes near to any of the other, of at least two each."""
        one, two = self.seconds[name], self.seconds[other]
        return min(len(one), len(two)) > 1 and max(one) <= _CLEARLY * min(two)


def key_of(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor], engines: Iterable[str] = ()
) -> str:
    """The same for all regions that compute the same of alike inputs, with whatever weights.

    Another where other engines are offered, or other versions of them.
    """
    places = {node: place for place, node in enumerate(region.graph.nodes)}
    parts = [f"torch {torch.__version__}", *engines, describe_device(inputs)]
    parts += map(_geometry, inputs)
    for node in region.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda arg: places[arg])
        held = _geometry(getattr(region, str(node.target))) if node.op == "get_attr" else ""
        parts.append(f"{node.op} {held or name_of(node)} {arguments}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _geometry(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device}"


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
        InputError: `seconds` is no time.
    """

    def __init__(
        self, seconds: float, known: Mapping[str, str], engines: Iterable[str] = ()
    ) -> None:
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
        untimed = (*engines, device.untimed(region, inputs))
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
        return self._run_by(offered, "the whole call", key, program, Times(inputs), offered[:1])

    def _run_by(
        self,
        offered: Sequence[str],
        what: str,
        key: str,
        program: Program,
        times: Times,
        untimed: Sequence[str],
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

    def settled(self, key: str, policy: Sequence[str], names: Container[str]) -> Sequence[str]:
        """What needs no timing, the first that can be made: an earlier decision, or the policy.

        The policy counts where nothing is timed. A decision for what is not among `names`, of
        another version maybe, counts for nothing.
        """
        decided = [self.known[key]] if self.known.get(key) in names else []
        return [*decided, *policy] if decided or not self.tunes else []

    def pick(
        self,
        what: str,
        key: str,
        makers: Mapping[str, Callable[[], Made | str]],
        policy: Sequence[str],
        times: Times,
    ) -> Made:
        """The fastest of what can be made, or what is settled; `AS_IT_IS` where that is no good.

        A maker that cannot returns why. What is chosen for `what` is noted.
        """
        settled = self.settled(key, policy, makers)
        spent = dict[str, float]()
        offered = {name: makers[name] for name in settled or makers}
        made = dict(self._made(offered, times, spent, first=bool(settled)))
        rejected = {name: found for name, found in made.items() if isinstance(found, str)}
        good = {name: found for name, found in made.items() if not isinstance(found, str)}
        seconds = self.race(good, times) if len(good) > 1 else {}
        best = next(iter(good), AS_IT_IS) if settled else _fastest(seconds)
        self.known[key] = best
        self.choices.append(Choice(what, key, best, seconds, rejected, spent))
        chosen = good[best] if best in good else makers[best]()
        assert not isinstance(chosen, str), "what is as it is can always be made"
        return chosen

    def _made(
        self,
        makers: Mapping[str, Callable[[], Made | str]],
        times: Times,
        spent: dict[str, float],
        *,
        first: bool,
    ) -> Iterator[tuple[str, Made | str]]:
        """What can be made, or why not: nothing after an engine that is clearly faster.

        With `first`, nothing after the first that can. The seconds of each are noted in `spent`.
        """
        won = False
        for name, make in makers.items():
            if won and name not in self.engines:
                return
            start = time.perf_counter()
            made = make()
            spent[name] = time.perf_counter() - start
            yield name, made
            if first and not isinstance(made, str):
                return
            if name in self.engines and not isinstance(made, str):
                won = won or times.is_clearly_faster(name, AS_IT_IS)

    def race(
        self, programs: Mapping[str, Callable[..., Any]], times: Times, fewest: int = _FEWEST_ROUNDS
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


def by_region(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], chooser: Chooser
) -> tuple[fx.GraphModule, Sequence[torch.Tensor]]:
    """The same code, with each region a module that it calls; and what it makes of `inputs`."""
    program = fx.GraphModule(module, copy.deepcopy(module.graph))
    extract_layers(program)
    program.recompile()
    return program, _Choosing(program, chooser).run(*inputs)


class _Choosing(fx.Interpreter):
    """Runs a program once and puts, for each region that it comes to, the best in its place."""

    def __init__(self, program: fx.GraphModule, chooser: Chooser) -> None:
        super().__init__(program)
        self.chooser = chooser

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region = self.module.get_submodule(target)
        assert isinstance(region, fx.GraphModule)
        chosen, outputs = self.chooser(region, args)
        self.module.set_submodule(target, chosen)
        return outputs
