"""Choose the program that runs a region, or a whole call, by timing those that are right."""

from __future__ import annotations

import copy
import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from optimizer.core.device import device_of
from optimizer.core.errors import InputError, Refused, require
from optimizer.core.inputs import Call, require_flags, require_seconds, tensors_in
from optimizer.core.node import name_of_call, tensors_of
from optimizer.core.report import Choice
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES, LaidOut, Maker, Program, policy_of
from optimizer.lowering.engines import Compiled, Engines, engines_here, engines_named
from optimizer.lowering.partition import WEIGHTED, extract_layers
from optimizer.lowering.precision import Precision
from optimizer.lowering.trace import exact_copy
from optimizer.rewrite.contract import LOWERED, REDUCED
from optimizer.verify.equivalence import Answer, compare_answers, difference

_MOMENT = 1e-3  # seconds: shorter ones say more of the clock and the machine
SHORT = 0.05  # seconds that a race may take in any case, and takes before it is clear
BRIEF = 0.02  # the same for one region of several
_CLEARLY = 0.9  # of the time of any other, at most
_BY_FAR = 0.75  # the same, where nothing else needs to be tried
WORTH_IT = 0.98  # of the time of what is as it is, at most
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 7
Runs = Mapping[str, Callable[..., Any]]  # what is timed, by name


class Times:
    """The seconds of calls with some inputs, by the name of the program.

    Level 2 takes time nowhere else: a test replaces `race` or `call`. What disturbs the machine
    lasts longer than a moment: before `enough` seconds, nothing is clear.
    """

    def __init__(self, inputs: Sequence[Any], enough: float = SHORT) -> None:
        self.inputs, self.enough, self.spent = inputs, enough, 0.0
        self.wait = device_of(tensors_in(inputs)).synchronize
        self.seconds = defaultdict[str, list[float]](list)
        self.first: dict[str, Any] = {}  # what the first call of each returned

    def call(
        self, name: str, program: Callable[..., Any], inputs: Sequence[Any], fill: bool = False
    ) -> Any:
        """Return what a call returns, timed if it fills a moment; repeat it to `fill` one."""
        self.wait()
        calls, start, elapsed = 0, time.perf_counter(), 0.0
        while not calls or (fill and elapsed < _MOMENT):
            result = None  # its memory is free for the next
            result = program(*inputs)
            self.wait()
            calls, elapsed = calls + 1, time.perf_counter() - start
        if elapsed >= _MOMENT:
            self.seconds[name].append(elapsed / calls)
            self.spent += elapsed
        self.first.setdefault(name, result)
        return result

    def race(self, runs: Runs, deadline: float, fewest: int = _FEWEST_ROUNDS) -> dict[str, float]:
        """Return the median time of each: they take turns until one clearly wins, or time is up."""
        deadline = max(deadline, time.perf_counter() + self.enough)
        while (done := min(len(self.seconds[name]) for name in runs)) < _MOST_ROUNDS:
            clear = any(self.is_clearly_faster(name, runs) for name in runs)
            over = (clear and self.spent >= self.enough) or time.perf_counter() > deadline
            if over and done >= fewest:
                break
            for name, program in runs.items():
                self.call(name, program, self.inputs, fill=True)
        return {name: median(self.seconds[name]) for name in runs}

    def slower(self, runs: Runs, deadline: float) -> str:
        """Return why the "plan" is not worth it beside the "portable" code; empty if it is.

        It may lose one round of seven: were it no faster, chance would let it in once in 16 races.
        """
        seconds = self.race(runs, deadline, fewest=1)
        ratio = seconds["plan"] / seconds["portable"]
        if ratio > WORTH_IT:
            return f"{ratio:.2f} of the time"
        rounds = [*zip(self.seconds["plan"], self.seconds["portable"], strict=False)]
        lost = sum(plan >= portable for plan, portable in rounds)
        return f"slower in {lost} of {len(rounds)} rounds" * (lost > len(rounds) // _MOST_ROUNDS)

    def is_clearly_faster(self, name: str, others: Iterable[str], share: float = _CLEARLY) -> bool:
        """Return whether all times of one are far below all of the others, of at least two each."""
        times, rest = self.seconds[name], [self.seconds[each] for each in others if each != name]
        several = all(len(each) > 1 for each in (times, *rest))
        return several and all(max(times) <= share * min(each) for each in rest)


def key_of(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor], engines: Iterable[str] = ()
) -> str:
    """Return one key for all regions that compute the same of alike inputs, by other weights.

    It differs where other engines are offered, or other versions of them.
    """
    places, policy = {node: i for i, node in enumerate(region.graph.nodes)}, policy_of(inputs)
    device = f"{policy.hardware()} {policy.settings()}"
    parts = [f"torch {torch.__version__}", *engines, device, *map(_geometry, inputs)]
    for node in region.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda arg: places[arg])
        weight = _geometry(getattr(region, str(node.target))) if node.op == "get_attr" else ""
        parts.append(f"{node.op} {weight or name_of_call(node)} {arguments}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _geometry(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device}"


class Tuning(NamedTuple):
    """The options of a caller for level 2.

    Attributes:
        seconds: how long candidates are timed; 0 times none.
        precision: of matrix products and convolutions, where it is not to be the model's own.
        cuda_graph: whether a whole call may be one.
        engines: the names of those that may run a region on the CPU.
    """

    seconds: float = 1.0
    precision: Precision | None = None
    cuda_graph: bool = True
    engines: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        level: int,
        seconds: float = 1.0,
        precision: str | None = None,
        error_budget: float | None = None,
        cuda_graph: bool = True,
        engines: Engines = "auto",
    ) -> Tuning:
        """Return what a caller asks for, or raise an InputError."""
        require_flags(cuda_graph=cuda_graph)
        reduced = Precision.of(precision, error_budget)
        if (reduced is None) is (level == REDUCED):
            raise InputError(
                "level=3 goes with precision='bf16', 'fp16' or 'int8', and each of these with"
                " level=3."
            )
        names = engines_named(engines) * (level >= LOWERED)
        return cls(require_seconds(seconds), reduced, cuda_graph, names)

    def options(self) -> dict[str, Any]:
        """Return the options with which `optimize` makes the same of other weights."""
        return {
            "precision": self.precision and self.precision.name,
            "error_budget": self.precision and self.precision.budget,
            "cuda_graph": self.cuda_graph,
            "engines": self.engines,
        }


Candidate = TypeVar("Candidate", bound=Callable[..., Any])


class Chooser:
    """Choose for one region after another, within a budget of time.

    Args:
        seconds: how long the timing of all regions may take; every candidate gets two rounds in
            any case. With 0 nothing is timed, and only regions that convolve are lowered.
        decisions: what to choose, by the key of a region; regions not in it are timed.
        engines: the names of those that may run a region on the CPU.
    """

    def __init__(
        self, seconds: float, decisions: Mapping[str, str], engines: Iterable[str] = ()
    ) -> None:
        self.tunes = require_seconds(seconds) > 0
        self.deadline = time.perf_counter() + seconds
        self.decisions = dict(decisions)
        self.choices: list[Choice] = []
        self.engines = {n: partial(Compiled, each) for n, each in engines_here(engines).items()}
        self.in_graphs = True  # on a device that has them

    def choose(
        self,
        what: str,
        key: str,
        makers: Mapping[str, Callable[[bool], Candidate]],
        offered: Sequence[str],
        untimed: Sequence[str],
        times: Times,
    ) -> Candidate:
        """Return the fastest of what is offered and can be made; record the choice for `what`.

        Settled, and not timed, is what was decided for the key before, and where nothing is timed,
        what is `untimed`: the first of it that can be made. A decision for what has no maker, of
        another version maybe, is ignored. A maker takes whether its candidate is settled, and
        raises what is wrong. After an engine that is faster by far, nothing but engines is tried.
        """
        decided = [self.decisions[key]] if self.decisions.get(key) in makers else []
        settled = bool(decided) or not self.tunes
        names = [*decided, *untimed, AS_IT_IS] if settled else [AS_IT_IS, *offered]
        good, rejected, spent = dict[str, Candidate](), dict[str, str](), dict[str, float]()
        for name in dict.fromkeys(names):
            far = [n for n in good if times.is_clearly_faster(n, [AS_IT_IS], _BY_FAR)]
            fast = self.engines.keys() & far
            if (good and settled) or (fast and name not in self.engines):
                break
            start = time.perf_counter()
            try:
                good[name] = makers[name](settled)
            except Exception as error:  # whatever a backend raises
                if name == AS_IT_IS:
                    raise
                rejected[name] = _reason(error)
            spent[name] = time.perf_counter() - start
        seconds = times.race(good, self.deadline) if len(good) > 1 else {}
        best = min(good, key=lambda name: seconds.get(name, 0.0))
        if seconds and seconds[best] > WORTH_IT * seconds[AS_IT_IS]:
            best = AS_IT_IS
        self.decisions[key] = best
        self.choices.append(Choice(what, key, best, seconds, rejected, spent))
        return good[best]

    def for_region(
        self, region: fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> tuple[Program, Sequence[torch.Tensor]]:
        """Return the program to run a region with inputs like these, and its outputs for them."""
        policy, times = policy_of(inputs), Times(inputs, BRIEF)
        engines = self.engines if policy.takes_engines else {}
        kernels = policy.offered(region, inputs)
        untimed = [*engines, *kernels[: policy.pays(region, inputs)]]
        counts = Counter(name for n in region.graph.nodes if (name := name_of_call(n)) in WEIGHTED)
        what = ", ".join(f"{count} x {name}" for name, count in counts.items()) or "attention"
        key, makers = key_of(region, inputs, engines), self._makers(region, times)
        program = self.choose(what, key, makers, [*engines, *kernels], untimed, times)
        if program is not region:
            size = sum(each.numel() * each.element_size() for each in tensors_of(region))
            self.choices[-1] = replace(self.choices[-1], held=size)
        outputs = times.first.get(self.decisions[key])
        return program, program(*inputs) if outputs is None else outputs

    def for_call(
        self, program: Program, line: fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> Program:
        """Return what runs a whole call of `line`, whose regions `program` runs as was chosen."""
        offered = policy_of(inputs).for_calls if self.in_graphs else ()
        if not offered:
            return program
        key, times = f"call {key_of(line, inputs)}", Times(inputs)
        makers = self._makers(program, times)
        return self.choose("the whole call", key, makers, offered, offered[:1], times)

    def _makers(self, program: Program, times: Times) -> dict[str, Callable[[bool], Program]]:
        makers: dict[str, Maker] = CANDIDATES | self.engines
        return {name: partial(_verified, name, makers[name], program, times) for name in makers}


def _verified(name: str, make: Maker, region: Program, times: Times, settled: bool) -> Program:
    """Return a candidate; require the region's answers to two inputs, which it must not write.

    One that is settled only has to run: the answer of the whole call is compared.
    """
    program = make(region, list(map(exact_copy, times.inputs)))
    if program is region:
        return program
    if isinstance(region, fx.GraphModule):
        program = LaidOut(program, region)
    inputs = list(map(exact_copy, times.inputs))
    if settled:
        times.call(name, program, inputs)
    else:
        calls = [Call(tuple(tensors), {}) for tensors in (inputs, map(varied, inputs))]
        both = {AS_IT_IS: region, name: program}.items()
        answers = [[Answer(tuple(times.call(*each, c.args)), ()) for each in both] for c in calls]
        for call, (expected, actual) in zip(calls, answers, strict=True):
            differs = compare_answers(region, call, expected, actual, exact=False)
            require(differs is None, str(differs))
    overwritten = difference(Answer((), [*times.inputs]), Answer((), inputs), exact=True)
    require(overwritten is None, "it overwrites its inputs")
    return program


def _reason(error: Exception) -> str:
    if isinstance(error, Refused):
        return str(error)
    last = str(error).strip().rpartition("\n")[2]
    return f"{type(error).__name__}: {last[:200]}"


def varied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same layout with other values, or itself if it may hold indices."""
    if not tensor.is_floating_point():
        return tensor
    result = exact_copy(tensor)
    flat = torch.empty(0, dtype=result.dtype, device=result.device).set_(result.untyped_storage())
    flat.copy_(flat.roll(1) * 0.5 + 0.25)
    return result


class ByRegion(fx.Interpreter):
    """Run a copy of some code once, and put the best program in the place of each region."""

    def __init__(self, module: fx.GraphModule, chooser: Chooser) -> None:
        copied = fx.GraphModule(module, copy.deepcopy(module.graph))
        extract_layers(copied)
        copied.recompile()
        super().__init__(copied)
        self.choose = chooser.for_region

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        region: Any = self.module.get_submodule(target)
        program, outputs = self.choose(region, args)
        self.module.set_submodule(target, program)
        return outputs
