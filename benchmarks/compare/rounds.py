"""Rounds: each cell in three new processes, of the base, of the base again, and of the new version.

The order is drawn anew for each cell and round, so that what the machine does meets all three
alike. The base against itself tells how much two runs of the same code differ.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from .cells import Cell, NotObservedError, Observed, observe
from .trees import Tree

BASE, AGAIN, NEW = "base", "base again", "new"
_ROLES = (BASE, AGAIN, NEW)
# They show whether a number that changed is exact at all: what races on a clock is not.
_EXACT_ROUNDS = 4


@dataclass
class Series:
    """What all rounds found of one cell.

    Attributes:
        rounds: for each, the number of each role; of an exact one that is the same, of the base
            and the new version only.
        exact: whether the numbers are the same in every process.
        missing: why a role has no number.
        failed: the roles whose benchmark failed.
    """

    cell: Cell
    rounds: list[dict[str, float]] = field(default_factory=list)
    exact: bool = False
    missing: dict[str, str] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        """Whether a further round would tell nothing new."""
        settled = self.exact and (self.is_unchanged or len(self.rounds) >= _EXACT_ROUNDS)
        return bool(self.missing) or settled

    @property
    def is_unchanged(self) -> bool:
        """Whether all numbers so far are one."""
        return len({value for each in self.rounds for value in each.values()}) <= 1


@dataclass(frozen=True)
class Sides:
    """The base and the new version, checked out."""

    base: Tree
    new: Tree

    def of(self, role: str) -> Tree:
        """The version that plays a role."""
        return self.new if role == NEW else self.base

    @contextlib.contextmanager
    def servers(self) -> Iterator[dict[str, Any]]:
        """A server of new processes for each role, started for one round, all at once."""
        with contextlib.ExitStack() as stack:
            starting = [self.of(role).server() for role in _ROLES]
            with ThreadPoolExecutor(len(_ROLES)) as pool:
                started = list(pool.map(stack.enter_context, starting))
            yield dict(zip(_ROLES, started, strict=True))

    def close(self) -> None:
        """Remove what both left."""
        for tree in (self.base, self.new):
            tree.close()


def run_round(
    several: Iterable[Series],
    sides: Sides,
    draw: random.Random,
    has_time: Callable[[], bool],
    tell: Callable[[Series], None],
    keep: Callable[[Series], None],
) -> None:
    """Measure each once more, while there is time.

    Args:
        several: the cells, none of which is done.
        sides: the two versions.
        draw: the order of the processes.
        has_time: asked before each cell.
        tell: hears of each cell before it begins.
        keep: hears of it when it ends.
    """
    with sides.servers() as servers:
        for series in several:
            if not has_time():
                return
            tell(series)
            _measure(series, sides, servers, draw)
            keep(series)


def _measure(series: Series, sides: Sides, servers: dict[str, Any], draw: random.Random) -> None:
    found: dict[str, float] = {}
    waiting = draw.sample(_ROLES, len(_ROLES))
    while waiting and not (series.exact and _suffices(found)):
        role = waiting.pop(0)
        try:
            observed = _observed_once_more(series, sides.of(role), servers[role])
        except NotObservedError as error:
            series.missing[role] = str(error)
            series.failed |= {role} if error.failed else set()
        else:
            found[role], series.exact = observed.value, observed.exact
            waiting.sort(key=lambda each: series.exact and each == AGAIN)
    if not series.missing:
        series.rounds.append(found)


def _suffices(found: dict[str, float]) -> bool:
    """Whether exact numbers need no look at the base again: they are the same."""
    return found.keys() >= {BASE, NEW} and found[BASE] == found[NEW]


def _observed_once_more(series: Series, tree: Tree, server: Any) -> Observed:
    """A process that fails is tried once more: not every failure is of the version."""
    try:
        return observe(series.cell, tree, server)
    except NotObservedError as error:
        if not error.failed:
            raise
    return observe(series.cell, tree, server)
