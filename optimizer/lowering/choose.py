"""Choose the program that runs a region, or a whole call, by timing those that are right."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from optimizer.core.device import Program, device_of
from optimizer.core.errors import InputError, Refused, require
from optimizer.core.inputs import Call, require_flags, require_seconds, tensors_in
from optimizer.core.node import attribute_of, name_of_call, run_nodes, tensors_of
from optimizer.core.report import Choice
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES, Maker, laid_out, policy_of
from optimizer.lowering.engines import Engines, compiled, engines_here, engines_named
from optimizer.lowering.partition import WEIGHTED, extract_regions
from optimizer.lowering.precision import Precision
from optimizer.lowering.trace import exact_copy
from optimizer.rewrite.contract import LOWERED, REDUCED
from optimizer.verify.equivalence import Answer, compare_answers, difference

_MOMENT = 1e-3  # seconds: shorter ones say more of the clock and the machine
SHORT = 0.1  # seconds that a race may take in any case, and takes before it is clear
_CLEARLY = 0.9  # of the time of any other, at most
_BY_FAR = 0.75  # the same, where nothing else needs to be tried
WORTH_IT = 0.98  # of the time of what is as it is, at most
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 7
Runs = Mapping[str, Callable[..., Any]]  # what is timed, by name


class Times:
    """The seconds of calls with some inputs, by the name of the program.

    Level 2 takes time nowhere else: a test replaces `race` or `call`. What disturbs the machine
    lasts longer than a moment: before `SHORT` seconds were timed, nothing is clear. Parts of what
    will be a CUDA graph race as `graphs`: launched one by one, their launches would be timed.
    """

    def __init__(self, inputs: Sequence[Any], graphs: bool = False) -> None:
        self.inputs, self.graphs, self.spent = inputs, graphs, 0.0
        self.wait = device_of(tensors_in(inputs)).synchronize
        self.seconds = defaultdict[str, list[float]](list)
        self.results: dict[str, Any] = {}  # of the first call of each
        self.expected: list[Answer] = []  # of what is as it is, to calls that verify others

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
        shortest = _MOMENT if name in self.results else SHORT  # a first call allocates and packs
        if elapsed >= shortest and (fill or not self.graphs):
            self.seconds[name].append(elapsed / calls)
            self.spent += elapsed
        self.results.setdefault(name, result)
        return result

    def answers(self, name: str, run: Callable[..., Any], calls: Iterable[Call]) -> list[Answer]:
        """Return the tensors that a program returns for some calls, which are timed."""
        return [Answer(tuple(self.call(name, run, call.args)), ()) for call in calls]

    def race(self, runs: Runs, deadline: float, fewest: int = _FEWEST_ROUNDS) -> dict[str, float]:
        """Return the median time of each: they take turns until one clearly wins, or time is up."""
        if self.graphs:
            with contextlib.suppress(Exception):  # of a backend, any: the call cannot be one either
                record = CANDIDATES["CUDA graph"]
                runs = {name: record(program, self.inputs) for name, program in runs.items()}
        deadline = max(deadline, time.perf_counter() + SHORT)
        while (done := min(len(self.seconds[name]) for name in runs)) < _MOST_ROUNDS:
            clear = any(self.is_clearly_faster(name, runs) for name in runs)
            over = (clear and self.spent >= SHORT) or time.perf_counter() > deadline
            if over and done >= fewest:
                break
            for name, program in runs.items():
                self.call(name, program, self.inputs, fill=True)
        return {name: median(self.seconds[name]) for name in runs}

    def slower(self, runs: Runs, deadline: float) -> str:
        """Return why the "plan" is not worth it beside the "portable" code; empty if it is.

        It may lose one round of seven, which chance allows once in 16 races of so many rounds.
        """
        try:
            seconds = self.race(runs, deadline, fewest=1)
        except Exception as error:  # whatever a call raises on inputs that the one before wrote
            return f"called again with the same inputs, it raises {_reason(error)}"
        if (ratio := seconds["plan"] / seconds["portable"]) > WORTH_IT:
            return f"{ratio:.2f} of the time"
        rounds = [*zip(self.seconds["plan"], self.seconds["portable"], strict=False)]
        lost = sum(plan >= portable for plan, portable in rounds)
        return f"slower in {lost} of {len(rounds)} rounds" * (lost > len(rounds) // _MOST_ROUNDS)

    def is_clearly_faster(self, name: str, others: Iterable[str], share: float = _CLEARLY) -> bool:
        """Return whether all times of one are far below all of the others, of at least two each."""
        times, rest = self.seconds[name], [self.seconds[each] for each in others if each != name]
        several = all(len(each) > 1 for each in (times, *rest))
        return several and all(max(times) <= share * min(each) for each in rest)


def region_key(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor], engines: Iterable[str] = ()
) -> str:
    """Return one key for all regions that compute the same of alike inputs, by other weights.

    It differs where other engines are offered, or other versions of them.
    """
    places = {node: f"%{i}" for i, node in enumerate(region.graph.nodes)}
    policy, tensors = policy_of(inputs), [*inputs, *region.buffers()]
    parts = [f"torch {torch.__version__} {policy.hardware()} {policy.settings()}", *engines]
    parts += [f"{tuple(each.shape)} {each.dtype} {each.device}" for each in tensors]
    for node in region.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda arg: places[arg])
        called = "" if node.op in ("get_attr", "placeholder") else name_of_call(node)
        parts.append(f"{node.op} {called} {arguments}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class Tuning(NamedTuple):
    """The options of `optimize` for levels 2 and 3, by their names there."""

    tune_seconds: float = 1.0
    precision: str | None = None
    error_budget: float | None = None
    cuda_graph: bool = True
    engines: Engines = "auto"

    def at(self, level: int) -> Tuning:
        """Return the same with the names of engines; raise an InputError for what is wrong."""
        require_seconds(self.tune_seconds)
        require_flags(cuda_graph=self.cuda_graph)
        if (self.reduced is None) is (level == REDUCED):
            raise InputError("level=3 and precision='bf16', 'fp16' or 'int8' go together only.")
        return self._replace(engines=engines_named(self.engines) if level >= LOWERED else ())

    @property
    def reduced(self) -> Precision | None:
        """The precision of products, where it is not the model's own."""
        return Precision.of(self.precision, self.error_budget)


Candidate = TypeVar("Candidate", bound=Callable[..., Any])


class Chooser:
    """Choose for one region after another, within a budget of time.

    Args:
        tuning: how long the timing of all regions may take, though every candidate gets two
            rounds; with 0 seconds nothing is timed: engines run all, or kernels convolutions.
        decisions: what to choose, by the key of a region; regions not in it are timed.
    """

    def __init__(self, tuning: Tuning, decisions: Mapping[str, str] | None = None) -> None:
        self.tuning = tuning
        self.deadline = time.perf_counter() + tuning.tune_seconds
        self.decisions = dict(decisions or {})
        self.choices: list[Choice] = []
        self.engines = engines_here(tuning.engines)

    def choose(
        self,
        what: str,
        key: str,
        makers: Mapping[str, Callable[[bool], Candidate]],
        offered: Sequence[str],
        defaults: Sequence[str],
        times: Times,
    ) -> Candidate:
        """Return the fastest candidate of those offered that can be made; record the choice.

        Not timed is what was decided for the key before and, where nothing is timed, the first of
        `defaults` that can be made. A decision for what has no maker, of another version maybe, is
        ignored. A maker takes whether its candidate is timed, and raises what is wrong with it.
        """
        decided = [self.decisions[key]] if self.decisions.get(key) in makers else []
        timed = bool(self.tuning.tune_seconds) and not decided
        names = [AS_IT_IS, *offered] if timed else [*decided, *defaults, AS_IT_IS]
        good, rejected, spent = dict[str, Candidate](), dict[str, str](), dict[str, float]()
        for name in dict.fromkeys(names):
            if (good and not timed) or self._is_needless(name, good, times):
                break
            start = time.perf_counter()
            try:
                good[name] = makers[name](timed)
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

    def _is_needless(self, name: str, good: Iterable[str], times: Times) -> bool:
        """Return whether an engine is by far faster, or time is up: others are not worth a try."""
        share = _CLEARLY if time.perf_counter() > self.deadline else _BY_FAR
        fast = (each for each in good if times.is_clearly_faster(each, [AS_IT_IS], share))
        return name not in self.engines and not self.engines.keys().isdisjoint(fast)

    def for_region(
        self, region: fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> tuple[Program, Sequence[torch.Tensor]]:
        """Return the program to run a region with inputs like these, and its outputs for them."""
        policy, kind = policy_of(inputs), device_of(inputs).name.partition(":")[0]
        times = Times(inputs, self.tuning.cuda_graph and bool(policy.for_calls))
        engines = [name for name, each in self.engines.items() if kind in each.devices]
        kernels = policy.offered(region, inputs)
        defaults = [*engines, *kernels[: policy.pays(region, inputs)]]
        counts = Counter(name for n in region.graph.nodes if (name := name_of_call(n)) in WEIGHTED)
        what = ", ".join(f"{count} x {name}" for name, count in counts.items()) or "attention"
        key, makers = region_key(region, inputs, engines), self._makers(region, times)
        program = self.choose(what, key, makers, [*engines, *kernels], defaults, times)
        if program is not region:
            size = sum(each.numel() * each.element_size() for each in tensors_of(region))
            self.choices[-1] = replace(self.choices[-1], held=size)
        outputs = times.results.get(self.decisions[key])
        return program, program(*inputs) if outputs is None else outputs

    def by_region(self, line: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
        """Run a copy of some code once, and put the best program in the place of each region."""
        module = fx.GraphModule(line, copy.deepcopy(line.graph))
        extract_regions(module)
        module.recompile()

        def run(node: fx.Node, *args: torch.Tensor) -> Sequence[torch.Tensor]:
            program, outputs = self.for_region(attribute_of(node), args)
            delattr(module, str(node.target))
            setattr(module, str(node.target), program)
            return outputs

        given = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
        programs = {node: partial(run, node) for node in module.graph.find_nodes(op="call_module")}
        found = run_nodes(module.graph.nodes, given, lambda n: programs.get(n) or attribute_of(n))
        deque(found, maxlen=0)
        return module

    def for_call(
        self, line: fx.GraphModule, example: Sequence[torch.Tensor], is_open: bool
    ) -> Program:
        """Return what runs a whole call; one that `is_open` writes memory of the caller's."""
        inputs = list(map(exact_copy, example))
        by_region = self.by_region(line, inputs)
        offered = policy_of(inputs).for_calls if self.tuning.cuda_graph and not is_open else ()
        if not offered:
            return by_region
        key, times = f"call {region_key(line, inputs)}", Times(inputs)
        makers = self._makers(by_region, times)
        return self.choose("the whole call", key, makers, offered, offered[:1], times)

    def _makers(self, code: fx.GraphModule, times: Times) -> dict[str, Callable[[bool], Program]]:
        engines = {name: partial(compiled, each) for name, each in self.engines.items()}
        makers: dict[str, Maker] = CANDIDATES | engines
        return {name: partial(_verified, name, makers[name], code, times) for name in makers}


def _verified(name: str, make: Maker, region: fx.GraphModule, times: Times, timed: bool) -> Program:
    """Return a candidate; require the region's answers to two inputs, which it must not write.

    One that is not timed only has to run: the answer of the whole call is compared.
    """
    program: Program = make(region, list(map(exact_copy, times.inputs)))
    if program is region:
        return program
    program, inputs = laid_out(program, region), list(map(exact_copy, times.inputs))
    if not timed:
        times.call(name, program, inputs)
    else:
        calls = [Call(tuple(tensors), {}) for tensors in (inputs, map(varied, inputs))]
        expected = times.expected = times.expected or times.answers(AS_IT_IS, region, calls)
        for call, *both in zip(calls, expected, times.answers(name, program, calls), strict=True):
            differs = compare_answers(region, call, *both, exact=False)
            require(differs is None, str(differs))
    overwritten = difference(Answer((), [*times.inputs]), Answer((), inputs), exact=True)
    require(overwritten is None, "it overwrites its inputs")
    return program


def _reason(error: Exception) -> str:
    last = str(error).strip().rpartition("\n")[2]
    return str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {last[:200]}"


def varied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same layout with other values, or itself if it may hold indices."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:  # of float8, no sums
        return tensor
    result = exact_copy(tensor)
    flat = torch.empty(0, dtype=result.dtype, device=result.device).set_(result.untyped_storage())
    flat.copy_(flat.roll(1) * 0.5 + 0.25)
    return result
