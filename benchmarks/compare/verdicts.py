"""What the rounds say of each cell, and how sure that is.

The logarithm of new over base is fitted over the rounds, for what differs between two processes
differs in all calls of one. Screen liberally, confirm strictly: what a t-test leaves below a
false-discovery rate over all cells (Benjamini and Hochberg, 1995) is measured in rounds of its
own, and told where those are below 5 % divided by their number (Bonferroni; Dunn, 1961).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .robust import fit
from .rounds import AGAIN, BASE, NEW, Series

REGRESSED, INTENDED, IMPROVED, CHANGED, SAME, INCONCLUSIVE, FAILED, NOT_COMPARED = (
    "regressed", "intended", "improved", "changed", "same", "inconclusive", "failed", "not compared"
)  # fmt: skip
_RATE = 0.1  # of false discoveries among what is measured again
_CHANCE = 0.05  # of any that is none to be told
_SMALL = math.log1p(0.02)  # a change that is not told of
_SETTLED = math.log1p(0.03)  # what an interval lies within that needs no further rounds
_EQUAL = 0.05  # what an interval of "same" lies within
_SEEN = 0.8  # of the changes of the size that is seen
FEWEST_ROUNDS = 4


@dataclass(frozen=True)
class Looks:
    """How many cells the first rounds compared, and how many of them the second."""

    first: int = 1
    second: int = 1

    @classmethod
    def of(cls, first: Sequence[Series], second: Sequence[Series]) -> Looks:
        """As many, at least one: what would be measured again is one of those that were."""
        return cls(*(max(1, len(_timed(several))) for several in (first, second)))

    @property
    def chances(self) -> tuple[float, float]:
        """Below which the first and the second rounds must be where one cell changed."""
        return _RATE / self.first, _CHANCE / self.second


@dataclass(frozen=True)
class Change:
    """New over base: below 1 is less.

    Attributes:
        ratio: over all rounds.
        low: lower end of its 95 % interval.
        high: upper end.
        chance: of so large a change where nothing changed.
        error: the standard error of the logarithm.
        degrees: of freedom.
    """

    ratio: float
    low: float
    high: float
    chance: float
    error: float
    degrees: float

    @classmethod
    def of(cls, rounds: Sequence[dict[str, float]]) -> Change:
        """The change that some rounds show, at least two."""
        from scipy import stats

        found = fit(rounds)
        mean, error = found.mean, found.error
        wide = float(stats.t.ppf(0.975, found.degrees)) * error
        chance = 2 * stats.t.sf(abs(mean) / error, found.degrees) if error else mean == 0
        ends = (math.exp(mean), math.exp(mean - wide), math.exp(mean + wide))
        return cls(*ends, float(chance), error, found.degrees)

    @property
    def counts(self) -> bool:
        """Whether it is large enough to be told of."""
        return abs(math.log(self.ratio)) > _SMALL

    @property
    def is_same(self) -> bool:
        """Whether the interval is narrow, and nothing that is told of shows in it."""
        is_narrow = self.low >= 1 - _EQUAL and self.high <= 1 + _EQUAL
        return is_narrow and (self.low <= 1 <= self.high or not self.counts)

    @property
    def is_surely_same(self) -> bool:
        """Whether so few rounds as there are leave no room for a change that should be told."""
        far = max(-math.log(self.low), math.log(self.high))
        return self.is_same and far < _SETTLED

    def visible(self, looks: Looks) -> float:
        """The smallest change that both rounds see in four of five times, with this error."""
        from scipy import optimize, stats

        if not self.error:
            return math.expm1(_SMALL)
        quantiles = [stats.t.ppf(1 - chance / 2, self.degrees) for chance in looks.chances]
        least = [max(_SMALL / self.error, quantile) for quantile in quantiles]

        def missed(size: float) -> float:
            passed = stats.t.cdf([size - each for each in least], self.degrees)
            return _SEEN - float(passed.prod())

        size: float = optimize.brentq(missed, 0, 2 * max(least) + 9)
        return math.expm1(size * self.error)


@dataclass(frozen=True)
class Verdict:
    """What is said of one cell.

    Attributes:
        name: of the cell.
        verdict: regressed, intended, improved, changed (neither way is better), same,
            inconclusive, failed or not compared.
        base: the number before: the median over the rounds; None where there is none.
        new: the number after.
        change: where it is not exact.
        visible: the smallest change that would have been told in four of five times.
        reason: why there is no comparison, or why the change is intended.
        params: of the cell, such as its model and variant.
    """

    name: str
    unit: str
    verdict: str
    base: float | None = None
    new: float | None = None
    change: Change | None = None
    visible: float | None = None
    reason: str = ""
    params: dict[str, str] = field(default_factory=dict)


def flagged(several: Sequence[Series]) -> list[Series]:
    """The cells whose change is to be looked for again."""
    from scipy import stats

    timed = _timed(several)
    changes = [Change.of(series.rounds) for series in timed]
    chances = [change.chance for change in changes]
    rates: Any = stats.false_discovery_control(chances) if chances else []
    found = zip(timed, changes, rates, strict=True)
    return [series for series, change, rate in found if rate <= _RATE and change.counts]


def is_settled(series: Series) -> bool:
    """Whether further rounds of a timed cell would hardly say anything else of it."""
    timed = _timed([series])
    return not timed or Change.of(series.rounds).is_surely_same


def _timed(several: Sequence[Series]) -> list[Series]:
    timed = [each for each in several if not (each.exact or each.missing)]
    return [each for each in timed if len(each.rounds) >= FEWEST_ROUNDS and _is_positive(each)]


def _is_positive(series: Series) -> bool:
    return all(value > 0 for each in series.rounds for value in each.values())


def verdicts(first: Sequence[Series], second: Sequence[Series] = ()) -> list[Verdict]:
    """What is said of each cell; `second` are the rounds of those that were flagged."""
    looks = Looks.of(first, second)
    again = {series.cell.name: series for series in second}
    return [verdict(series, again.get(series.cell.name), looks) for series in first]


def verdict(series: Series, again: Series | None = None, looks: Looks = Looks()) -> Verdict:
    """What is said of a cell; `again` are the rounds that looked for its change once more."""
    cell = series.cell
    told: dict[str, Any] = {"name": cell.name, "unit": cell.unit, "params": cell.params}
    if series.missing:
        return _without_numbers(series, told)
    if not series.rounds:
        return Verdict(verdict=NOT_COMPARED, reason="it was not reached", **told)
    base, new = (_middle(series, role) for role in (BASE, NEW))
    told |= {"base": base, "new": new}
    if series.exact:
        return _of_exact(series, told)
    if not _is_positive(series):
        return Verdict(verdict=NOT_COMPARED, reason="a number is not positive", **told)
    if len(series.rounds) < FEWEST_ROUNDS:
        reason = f"{len(series.rounds)} of {FEWEST_ROUNDS} rounds were reached"
        return Verdict(verdict=NOT_COMPARED, reason=reason, **told)
    return _of_timed(series, again, looks, told)


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
    before = {each[role] for each in series.rounds for role in (BASE, AGAIN) if role in each}
    after = {each[NEW] for each in series.rounds}
    if len(before) > 1 or len(after) > 1:
        reason = "it differs from process to process"
        return Verdict(verdict=INCONCLUSIVE, reason=reason, **told)
    if before == after:
        return Verdict(verdict=SAME, **told)
    return Verdict(verdict=_direction(series, told["new"] > told["base"]), **told)


def _direction(series: Series, is_more: bool) -> str:
    if series.cell.less_is_better is None:
        return CHANGED
    return REGRESSED if is_more is series.cell.less_is_better else IMPROVED


def _of_timed(series: Series, again: Series | None, looks: Looks, told: dict[str, Any]) -> Verdict:
    change, kind = Change.of(series.rounds), None
    if again is not None and _timed([again]):
        second = Change.of(again.rounds)  # by itself: the first was chosen for being large
        if _confirms(second, change, looks):
            change, kind = second, _direction(series, second.ratio > 1)
        else:
            change = Change.of([*series.rounds, *again.rounds])
    kind = kind or (SAME if change.is_same else INCONCLUSIVE)
    return Verdict(verdict=kind, change=change, visible=change.visible(looks), **told)


def _confirms(second: Change, first: Change, looks: Looks) -> bool:
    alike = (first.ratio > 1) is (second.ratio > 1)
    return alike and second.counts and second.chance < looks.chances[1]
