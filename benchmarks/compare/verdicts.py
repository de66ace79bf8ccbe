"""What the rounds say of each cell, and how sure that is.

The logarithm of new over base is taken in each round; the rounds are the sample, for what differs
between two processes differs in all calls of one. A change counts where a t-test is below a
false-discovery rate over all cells (Benjamini and Hochberg, 1995), is larger than what the base
shows against itself, and shows again in rounds of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from .rounds import AGAIN, BASE, NEW, Series

REGRESSED, INTENDED, IMPROVED, SAME, INCONCLUSIVE, FAILED, NOT_COMPARED = (
    "regressed", "intended", "improved", "same", "inconclusive", "failed", "not compared"
)  # fmt: skip
_RATE = 0.01  # of false discoveries among what is measured again
_AGAIN = 0.05  # of a change that is none to show again
_SMALL = 0.02  # a change that is not told of
_EQUAL = 0.05  # what an interval of "same" lies within
FEWEST_ROUNDS = 4


@dataclass(frozen=True)
class Change:
    """New over base: below 1 is less.

    Attributes:
        ratio: the geometric mean over the rounds.
        low: lower end of its 95 % interval.
        high: upper end.
        chance: of so large a mean where nothing changed.
        floor: the smallest logarithm that counts, from the base against itself.
        visible: the smallest change that would have been seen in four of five times.
    """

    ratio: float
    low: float
    high: float
    chance: float
    floor: float
    visible: float

    @classmethod
    def of(cls, rounds: Sequence[dict[str, float]]) -> Change:
        """The change that some rounds show, at least two."""
        from scipy import stats

        logs = [{role: math.log(value) for role, value in each.items()} for each in rounds]
        steps = [each[NEW] - (each[BASE] + each[AGAIN]) / 2 for each in logs]
        noise = [each[AGAIN] - each[BASE] for each in logs]
        mean, error = fmean(steps), stdev(steps) / math.sqrt(len(steps))
        degrees = len(steps) - 1
        wide = stats.t.ppf(0.975, degrees) * error
        chance = 2 * stats.t.sf(abs(mean) / error, degrees) if error else float(mean == 0)
        floor = max(math.log1p(_SMALL), 2 * math.hypot(*noise) / len(noise))
        least = max(floor, stats.t.ppf(1 - _RATE / 2, degrees) * error)
        visible = math.expm1(least + stats.t.ppf(0.8, degrees) * error)
        ends = (math.exp(mean), math.exp(mean - wide), math.exp(mean + wide))
        return cls(*ends, float(chance), floor, visible)

    @property
    def counts(self) -> bool:
        """Whether it is larger than what the base shows against itself."""
        return abs(math.log(self.ratio)) > self.floor


@dataclass(frozen=True)
class Verdict:
    """What is said of one cell.

    Attributes:
        name: of the cell.
        verdict: regressed, intended, improved, same, inconclusive, failed or not compared.
        base: the number before: the median over the rounds; None where there is none.
        new: the number after.
        change: where it is not exact.
        reason: why there is no comparison, or why the change is intended.
    """

    name: str
    unit: str
    verdict: str
    base: float | None = None
    new: float | None = None
    change: Change | None = None
    reason: str = ""


def flagged(several: Sequence[Series]) -> list[Series]:
    """The cells whose change is to be looked for again."""
    from scipy import stats

    timed = [s for s in several if not (s.exact or s.missing) and len(s.rounds) >= FEWEST_ROUNDS]
    changes = [Change.of(series.rounds) for series in timed]
    chances = [min(1.0, max(change.chance, 1e-300)) for change in changes]
    rates: Any = stats.false_discovery_control(chances) if chances else []
    found = zip(timed, changes, rates, strict=True)
    return [series for series, change, rate in found if rate <= _RATE and change.counts]


def verdict(series: Series, again: Series | None = None) -> Verdict:
    """What is said of a cell; `again` are the rounds that looked for its change once more."""
    cell = series.cell
    told = {"name": cell.name, "unit": cell.unit}
    if series.missing:
        return _without_numbers(series, told)
    base, new = (_middle(series, role) for role in (BASE, NEW))
    told |= {"base": base, "new": new}
    if series.exact:
        return _of_exact(series, told)
    if min(min(each.values()) for each in series.rounds) <= 0:
        return Verdict(verdict=NOT_COMPARED, reason="a number is not positive", **told)
    if len(series.rounds) < FEWEST_ROUNDS:
        return Verdict(verdict=NOT_COMPARED, reason="it was interrupted", **told)
    return _of_timed(series, again, told)


def _without_numbers(series: Series, told: dict[str, Any]) -> Verdict:
    whys = {role: series.missing[role] for role in (BASE, AGAIN, NEW) if role in series.missing}
    alike = len(whys) == len((BASE, AGAIN, NEW)) and len({*whys.values()}) == 1
    reasons = {*whys.values()} if alike else [f"{role}: {why}" for role, why in whys.items()]
    fails_now = NEW in series.failed and whys.keys() == {NEW}
    kind = FAILED if fails_now else NOT_COMPARED
    return Verdict(verdict=kind, reason="; ".join(reasons), **told)


def _middle(series: Series, role: str) -> float:
    return median(each[role] for each in series.rounds)


def _of_exact(series: Series, told: dict[str, Any]) -> Verdict:
    before = {each[role] for each in series.rounds for role in (BASE, AGAIN)}
    after = {each[NEW] for each in series.rounds}
    if len(before) > 1 or len(after) > 1:
        reason = "it differs from process to process"
        return Verdict(verdict=INCONCLUSIVE, reason=reason, **told)
    if before == after:
        return Verdict(verdict=SAME, **told)
    return Verdict(verdict=_direction(series, told["new"] > told["base"]), **told)


def _direction(series: Series, is_more: bool) -> str:
    return REGRESSED if is_more is series.cell.less_is_better else IMPROVED


def _of_timed(series: Series, again: Series | None, told: dict[str, Any]) -> Verdict:
    first = Change.of(series.rounds)
    if again is not None and len(again.rounds) >= FEWEST_ROUNDS:
        second = Change.of(again.rounds)  # by itself: the first was chosen for being large
        alike = (first.ratio > 1) is (second.ratio > 1)
        if alike and second.counts and second.chance < _AGAIN:
            found = _direction(series, second.ratio > 1)
            return Verdict(verdict=found, change=second, **told)
        first = Change.of([*series.rounds, *again.rounds])
    is_same = first.low >= 1 - _EQUAL and first.high <= 1 + _EQUAL
    return Verdict(verdict=SAME if is_same else INCONCLUSIVE, change=first, **told)
