"""Which cells are measured when, and when to stop.

What was asked for first comes first, a few cells at a time: each gets the fewest rounds that tell
anything before the next few begin, so that what is reached in the time is told of. What is settled
stops; the rest of the first rounds goes to what is not. Then comes what may have changed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeAlias

from .rounds import Series
from .verdicts import FEWEST_ROUNDS, flagged, is_settled

_TOGETHER = 8  # timed cells that share servers, and a few minutes
_FIRST = 0.7  # of the time, for the first rounds
_LAST = 0.97  # of the time, within which the last cell begins

HasTime: TypeAlias = Callable[[], bool]
# Measures cells once more each, while there is time.
Round: TypeAlias = Callable[[Sequence[Series], HasTime], None]


@dataclass
class Schedule:
    """The first rounds of all cells, and the second ones of those that may have changed.

    Attributes:
        first: in the order in which they are measured.
        second: likewise; what an earlier run measured may be among them.
        rounds: the most of either.
        minutes: for all of it.
        started: when they began.
        current: the cell that is measured.
    """

    first: list[Series]
    second: list[Series]
    rounds: int
    minutes: float
    started: float = field(default_factory=time.monotonic)
    current: str = "beginning"

    def run(self, measure: Round) -> None:
        """Fill both."""
        self._run_first(measure, self._has_time_for_first)
        known = {each.cell for each in self.second}
        self.second += [Series(s.cell) for s in flagged(self.first) if s.cell not in known]
        self._until(self.second, self._is_short, measure, self.has_time)
        if not self.second:
            self._run_first(measure, self.has_time)

    def _run_first(self, measure: Round, has_time: HasTime) -> None:
        for several in _together(self.first):
            self._until(several, self._is_unknown, measure, has_time)
        self._until(self.first, self._is_undecided, measure, has_time)

    def begin(self, series: Series) -> None:
        """Hear of the cell that is measured from now on."""
        self.current = series.cell.name

    def line(self) -> str:
        """How much is reached, what is measured, and until when it takes at most."""
        left = self.started + 60 * self.minutes - time.monotonic()
        until = datetime.now() + timedelta(seconds=left)
        reached = sum(s.is_done or len(s.rounds) >= FEWEST_ROUNDS for s in self.first)
        told = f"{reached} of {len(self.first)} reached"
        told += f", {len(self.second)} are measured again" if self.second else ""
        return f"{told}: {self.current}; until {until:%H:%M:%S} at the latest"

    def has_time(self) -> bool:
        """Whether the time is not over."""
        return time.monotonic() < self.started + 60 * self.minutes * _LAST

    def _has_time_for_first(self) -> bool:
        return time.monotonic() < self.started + 60 * self.minutes * _FIRST

    def _until(
        self,
        several: Sequence[Series],
        wants: Callable[[Series], bool],
        measure: Round,
        has_time: HasTime,
    ) -> None:
        while has_time() and (waiting := [s for s in several if not s.is_done and wants(s)]):
            measure(waiting, has_time)

    def _is_unknown(self, series: Series) -> bool:
        return len(series.rounds) < min(FEWEST_ROUNDS, self.rounds)

    def _is_short(self, series: Series) -> bool:
        return len(series.rounds) < self.rounds

    def _is_undecided(self, series: Series) -> bool:
        is_reached = len(series.rounds) >= FEWEST_ROUNDS
        return is_reached and self._is_short(series) and not is_settled(series)


def _together(several: Iterable[Series]) -> Iterator[list[Series]]:
    """What shares its rounds: all numbers that follow each other, and a few timed cells."""
    for is_timed, alike in itertools.groupby(several, lambda each: each.cell.is_timed):
        rest = list(alike)
        size = _TOGETHER if is_timed else len(rest)
        yield from (rest[place : place + size] for place in range(0, len(rest), size))
