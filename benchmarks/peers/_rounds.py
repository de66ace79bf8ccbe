"""Peers side by side: each in its own process, asked in turn, in another order each round.

What the machine does meanwhile meets them all alike. A round asks each peer for one block of calls
and keeps the block's median; a speed-up is a ratio of two blocks of one round.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

from benchmarks.subjects import EAGER

from ._process import PeerError, Worker

Cell = dict[str, Any]
_MOST_CALLS = 100
_DISCARDED = 2


class Plan(NamedTuple):
    """How long to measure: rounds, seconds of one block, and seconds that an answer may take."""

    rounds: int = 15
    block_seconds: float = 0.25
    limit: float = 1200


def measured(peers: Iterable[str], start: Callable[[str], Worker], plan: Plan) -> dict[str, Cell]:
    """A cell for each peer, and for eager, which goes first: what was measured, or the reason.

    Args:
        peers: their names.
        start: the process of a peer, which prepares at once; nothing else is running then.
        plan: how long to measure.
    """
    with contextlib.ExitStack() as processes:
        race = _Race(plan)
        for peer in dict.fromkeys([EAGER, *peers]):
            if EAGER not in race.reasons:
                race.enter(peer, processes.enter_context(start(peer)))
        for number in range(plan.rounds):
            race.run(number)
        return race.cells()


class _Race:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.workers: dict[str, Worker] = {}
        self.prepared: dict[str, Cell] = {}
        self.blocks: dict[str, list[Cell]] = {}
        self.reasons: dict[str, str] = {}

    def enter(self, peer: str, worker: Worker) -> None:
        self.workers[peer], self.blocks[peer] = worker, []
        with self._failing_alone(peer):
            self.prepared[peer] = worker.answer()

    def run(self, number: int) -> None:
        order = list(self.workers)
        random.Random(number).shuffle(order)
        for peer in order:
            latency = self.prepared[peer]["first"][-1]
            calls = min(_MOST_CALLS, max(1, round(self.plan.block_seconds / latency)))
            with self._failing_alone(peer):
                block = self.workers[peer].ask(discarded=min(calls, _DISCARDED), timed=calls)
                self.blocks[peer].append(block)

    @contextlib.contextmanager
    def _failing_alone(self, peer: str) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            self.reasons[peer] = str(error)
            self.workers.pop(peer).close()

    def cells(self) -> dict[str, Cell]:
        return {peer: self._cell(peer) for peer in self.blocks}

    def _cell(self, peer: str) -> Cell:
        if peer in self.reasons:
            return {"reason": self.reasons[peer]}
        if EAGER in self.reasons:
            return {"reason": f"nothing to compare with: {self.reasons[EAGER]}"}
        seconds = self._seconds(peer)
        prepared, first = self.prepared[peer], self.prepared[peer]["first"]
        # What compiles when it is first called is not ready before.
        beyond = sum(first) - len(first) * median(seconds)
        peaks = [block["peak_memory"] for block in self.blocks[peer]]
        return {
            "seconds": seconds,
            "eager_seconds": self._seconds(EAGER),
            "prepared": prepared["preparing"] + max(0, beyond),
            "peak_memory": None if None in peaks else max(peaks),
            "difference": prepared["difference"],
            "budget": prepared.get("budget", 0),
        }

    def _seconds(self, peer: str) -> list[float]:
        return [median(block["seconds"]) for block in self.blocks[peer]]
