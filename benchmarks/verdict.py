"""The last lines of a run: what differs from the last commit that was measured on this machine.

Exact numbers differ where they are not equal. Paired ratios differ where their intervals do not
overlap; whether that is the commit's doing is not said: a process has its luck, which its interval
does not see. `compare` measures both commits in turn, and decides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ._git import git_or_nothing
from .stored import Number, Run

# Level 2 runs what was fastest when it was prepared: other code, and other bytes, another time.
_EXACT = re.compile(r"^(graph\.|(\w+\.)?Memory\.(?!.*'optimized-2))")
_RATIO = re.compile(r"^(\w+\.)?Paired\.")
_MORE_IS_NO_WORSE = re.compile(r"^graph\.Rewrites\.")
_SHOWN = 12
_SAME = 0.05  # a ratio that changed by less, by the widest reading of its intervals, did not change


class Difference(NamedTuple):
    """A cell that changed. `worse` is None where neither way is, or that is not known."""

    cell: str
    before: Number
    after: Number
    worse: bool | None

    @property
    def is_ratio(self) -> bool:
        """Whether it is of calls in turn in one process, and has an interval."""
        return bool(_RATIO.search(self.cell))

    @property
    def text(self) -> str:
        """As a line says it."""
        return f"  {self.cell}: {_text(self.before)} to {_text(self.after)}, {self._word}"

    @property
    def _word(self) -> str:
        if not self.is_ratio:
            return {None: "differs", True: "worse", False: "better"}[self.worse]
        way = "slower" if self.after.value > self.before.value else "faster"
        return f"{100 * self.moved:.1f} % {way}"

    @property
    def moved(self) -> float:
        """How much a number changed, as a part of what it was."""
        return abs(self.after.value / self.before.value - 1) if self.before.value else math.inf


def earlier(found: Sequence[Run], commit: str, place: str, environment: str) -> Run | None:
    """The nearest ancestor that was measured on this machine with the same versions."""
    here = [run for run in found if run.file.parent.name == place]
    known = {run.commit: run for run in here if run.environment == environment}
    ancestors = (each for each in git_or_nothing("rev-list", commit).split() if each != commit)
    return next((known[each] for each in ancestors if each in known), None)


def lines(now: Run, before: Run | None) -> Iterator[str]:
    """What to say at the end."""
    if before is None:
        yield "No earlier commit was measured on this machine with these versions: nothing differs."
        return
    found = list(differences(now, before))
    ratios = [each for each in found if each.is_ratio]
    exact = [each for each in found if not each.is_ratio]
    title = f"Against {before.commit[:8]}, the last that was measured here:"
    yield f"{title} {_counted_exact(exact)}; {_counted_ratios(ratios, before, now)}."
    for shown in (exact, ratios):
        yield from (each.text for each in shown[:_SHOWN])
        if len(shown) > _SHOWN:
            yield f"  and {len(shown) - _SHOWN} more; the dashboard has them"


def undecided(now: Run, before: Run) -> Iterator[Difference]:
    """The paired ratios whose intervals overlap, and are too wide to say that nothing changed."""
    for cell in sorted(now.numbers.keys() & before.numbers.keys()):
        pair = (before.numbers[cell], now.numbers[cell])
        if _RATIO.search(cell) and _could_be_either(*pair):
            yield Difference(cell, *pair, None)


def _could_be_either(before: Number, after: Number) -> bool:
    if None in (*before, *after) or before.high < after.low or after.high < before.low:  # type: ignore[operator]
        return False
    if not (before.low and before.high):
        return False  # nothing takes no time
    least, most = after.low / before.high, after.high / before.low  # type: ignore[operator]
    return least < 1 - _SAME or most > 1 + _SAME


def differences(now: Run, before: Run) -> Iterator[Difference]:
    """What both measured, by the same definition, and found different; the worse first."""
    same = {name for name, version in now.versions.items() if before.versions.get(name) == version}
    both = (cell for cell in now.numbers.keys() & before.numbers.keys())
    pairs = [(cell, before.numbers[cell], now.numbers[cell]) for cell in both
             if cell.partition("(")[0] in same]  # fmt: skip
    found = [Difference(*pair, _worse(*pair)) for pair in pairs if _differ(*pair)]
    yield from sorted(found, key=lambda each: (each.worse is not True, each.cell))


def _differ(cell: str, before: Number, after: Number) -> bool:
    if _EXACT.search(cell):
        return before.value != after.value
    if not _RATIO.search(cell) or None in (*before, *after):
        return False
    return before.high < after.low or after.high < before.low  # type: ignore[operator]


def _worse(cell: str, before: Number, after: Number) -> bool | None:
    if _MORE_IS_NO_WORSE.search(cell) or _RATIO.search(cell):
        return None
    return after.value > before.value


def _counted_exact(found: Sequence[Difference]) -> str:
    if not found:
        return "no counts and bytes differ"
    worse, better = (sum(each.worse is way for each in found) for way in (True, False))
    rest = len(found) - worse - better
    also = f", {rest} neither" if rest else ""
    differ = "count differs" if len(found) == 1 else "counts and bytes differ"
    return f"{len(found)} {differ} ({worse} larger, {better} smaller{also})"


def _counted_ratios(found: Sequence[Difference], before: Run, now: Run) -> str:
    if not found:
        return "no paired ratio moved"
    slower = sum(each.after.value > each.before.value for each in found)
    most = 100 * max(each.moved for each in found)
    decides = f"`python -m benchmarks compare {before.commit[:8]} {now.commit[:8]}` decides"
    what = "paired ratio" if len(found) == 1 else "paired ratios"
    return (
        f"{len(found)} {what} moved by up to {most:.1f} % ({slower} slower,"
        f" {len(found) - slower} faster), which separate runs cannot tell from noise: {decides}"
    )


def _text(number: Number) -> str:
    if number.low is None or number.high is None:
        return f"{number.value:.10g}"
    return f"{number.value:.3f} [{number.low:.3f}, {number.high:.3f}]"
