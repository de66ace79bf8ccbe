"""Which program runs a region: each candidate is held to the region's answer, then timed."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import fx

from optimizer._check import BOUNDS, relative_error
from optimizer._copy import on_storage
from optimizer._report import Choice
from optimizer.lowering._onednn import Program, in_channels_last, is_available, on_onednn
from optimizer.lowering._regions import CONVOLUTIONS, WEIGHTED, name_of

AS_IT_IS = "as it is"
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 7
WORTH_IT = 0.98  # of the time of the region as it is, at most


def _on_onednn_in_channels_last(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program:
    return on_onednn(in_channels_last(region, inputs), inputs)


def _in_channels_last(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program:
    program = in_channels_last(region, inputs)
    program.forward(*inputs)  # raises where the code needs the layout that it was written for
    return program


CANDIDATES: dict[str, Callable[[fx.GraphModule, Sequence[torch.Tensor]], Program]] = {
    AS_IT_IS: lambda region, inputs: region,
    "oneDNN Graph": on_onednn,
    "oneDNN Graph, channels_last": _on_onednn_in_channels_last,
    "channels_last": _in_channels_last,
}


def candidates_for(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[str]:
    """The names of what may run a region on its device, the most promising first."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in inputs)
    floating = {tensor.dtype for tensor in inputs if tensor.is_floating_point()}
    images = any(name_of(node) in CONVOLUTIONS for node in region.graph.nodes)
    if on_cpu and is_available() and floating == {torch.float32}:
        return ["oneDNN Graph, channels_last" if images else "oneDNN Graph"]
    return ["channels_last"] if images else []


class Chooser:
    """Chooses for one region after another, within a budget of time.

    Args:
        seconds: how long the timing of all regions may take; every candidate gets two rounds in
            any case. With 0 nothing is timed, and only regions that convolve are lowered.
        known: what to choose, by the key of a region; regions not in it are timed.
    """

    def __init__(self, seconds: float, known: Mapping[str, str]) -> None:
        self.tunes = seconds > 0
        self.deadline = time.perf_counter() + seconds
        self.known = dict(known)
        self.choices: list[Choice] = []

    def __call__(self, region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program:
        """The program to run a region with inputs like these, which it leaves as they are."""
        key = key_of(region, inputs)
        if key not in self.known and not self.tunes:
            self.known[key] = self._by_policy(region, inputs)
        if key in self.known:
            return self._as_known(region, inputs, key)
        return self._timed(region, inputs, key)

    def _by_policy(self, region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> str:
        images = any(name_of(node) in CONVOLUTIONS for node in region.graph.nodes)
        return next(iter(candidates_for(region, inputs) if images else ()), AS_IT_IS)

    def _as_known(
        self, region: fx.GraphModule, inputs: Sequence[torch.Tensor], key: str
    ) -> Program:
        name = self.known[key]
        program = _prepared(name, region, inputs)
        rejected = {name: program} if isinstance(program, str) else {}
        self._note(region, key, AS_IT_IS if rejected else name, rejected=rejected)
        return region if isinstance(program, str) else program

    def _timed(self, region: fx.GraphModule, inputs: Sequence[torch.Tensor], key: str) -> Program:
        names = [AS_IT_IS, *candidates_for(region, inputs)]
        tried = {name: _verified(name, region, inputs) for name in names}
        rejected = {name: found for name, found in tried.items() if isinstance(found, str)}
        programs = {name: found for name, found in tried.items() if not isinstance(found, str)}
        seconds = self.race(programs, inputs) if len(programs) > 1 else {}
        best = min(seconds, key=seconds.__getitem__, default=AS_IT_IS)
        if seconds and seconds[best] > WORTH_IT * seconds[AS_IT_IS]:
            best = AS_IT_IS
        self.known[key] = best
        self._note(region, key, best, seconds, rejected)
        return programs[best]

    def race(
        self,
        programs: Mapping[str, Callable[..., Any]],
        inputs: Sequence[Any],
        fewest: int = _FEWEST_ROUNDS,
    ) -> dict[str, float]:
        """The median time of each, called in turn until the budget is spent."""
        times: dict[str, list[float]] = {name: [] for name in programs}
        for done in range(_MOST_ROUNDS):
            if done >= fewest and time.perf_counter() > self.deadline:
                break
            for name, program in programs.items():
                start = time.perf_counter()
                program(*inputs)
                times[name].append(time.perf_counter() - start)
        return {name: median(each) for name, each in times.items()}

    def _note(self, region: fx.GraphModule, key: str, chosen: str, *why: Any, **more: Any) -> None:
        counts = Counter(name for n in region.graph.nodes if (name := name_of(n)) in WEIGHTED)
        text = ", ".join(f"{count} x {name}" for name, count in counts.items())
        self.choices.append(Choice(text, key, chosen, *why, **more))


def _prepared(name: str, region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program | str:
    """A candidate, ready to run and warm; or why it cannot."""
    if name not in CANDIDATES:
        return "there is no such candidate"
    try:
        return CANDIDATES[name](region, inputs)
    except Exception as error:  # whatever a backend raises
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"


def _verified(name: str, region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program | str:
    program = _prepared(name, region, _copies(inputs))
    if name == AS_IT_IS or isinstance(program, str):
        return program
    return _wrong(region, program, inputs) or program


def _wrong(region: fx.GraphModule, program: Program, inputs: Sequence[torch.Tensor]) -> str:
    """What is wrong with a candidate: on the given inputs and on others, and what it overwrites."""
    given = _copies(inputs)
    others = [_other(tensor) for tensor in given]
    pairs = [(region(*inputs), program(*given)), (region(*others), program(*others))]
    for expected, actual in pairs:
        for one, other in zip(expected, actual, strict=True):
            if one.shape != other.shape or one.dtype != other.dtype:
                return "it returns another shape or dtype"
            error = relative_error(one, other)
            if error > BOUNDS.get(one.dtype, 0.0):
                return f"its answer is off by {error:.1g}"
    kept = all(map(torch.equal, given, inputs))
    return "" if kept else "it overwrites its inputs"


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the very strides, gaps included."""
    storages = [each.untyped_storage().clone() for each in tensors]  # type: ignore[no-untyped-call]
    return list(map(on_storage, tensors, storages))


def _other(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(1, -1) * 0.5 if tensor.is_floating_point() and tensor.dim() else tensor


def key_of(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> str:
    """The same for all regions that compute the same of alike inputs, with whatever weights."""
    places = {node: place for place, node in enumerate(region.graph.nodes)}
    parts: list[str] = [_machine(), *map(_geometry, inputs)]
    for node in region.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda arg: places[arg])
        held = _geometry(getattr(region, str(node.target))) if node.op == "get_attr" else ""
        parts.append(f"{node.op} {held or name_of(node)} {arguments}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _geometry(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device}"


def _machine() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__} {capability} {torch.get_num_threads()} threads"
