"""How often `python -m benchmarks compare` is right: `python -m tests.quality.verdicts`.

Simulates both stages on numbers that are drawn, for each line of a table: one of the cells changed.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from benchmarks.compare import verdicts as _said
from benchmarks.compare.cells import Cell
from benchmarks.compare.rounds import AGAIN, BASE, NEW, Series
from benchmarks.compare.verdicts import FEWEST_ROUNDS, Looks, flagged, is_settled, verdict

_ROUNDS = 8
_DRIFT = 0.03  # of the machine from round to round, which all processes of one share


@dataclass(frozen=True)
class Setting:
    """What is simulated."""

    change: float = 0.0  # of the first cell, upwards; the others have none
    cells: int = 50  # so many timed ones
    noise: float = 0.01  # how much processes differ
    spiked: float = 0.0  # the share of processes that meet a spike
    spike: float = 0.1  # how much longer one takes then
    noisier: float = 1.0  # how many times more processes of the new version differ

    def __str__(self) -> str:
        told = [f"{100 * self.change:.0f} %" if self.change else "none", f"{self.cells} cells"]
        told.append(f"noise {100 * self.noise:g} %")
        if self.spiked:
            told.append(f"{100 * self.spiked:g} % of processes {100 * self.spike:g} % longer")
        if self.noisier != 1:
            told.append(f"the new {self.noisier:g} times as noisy")
        return ", ".join(told)


SETTINGS = (
    Setting(0.03), Setting(0.05), Setting(0.05, cells=100), Setting(0.05, cells=300),
    Setting(0.03, spiked=0.1), Setting(0.05, spiked=0.1), Setting(0.05, spiked=0.1, spike=0.3),
    Setting(), Setting(noise=0.03), Setting(spiked=0.1), Setting(noise=0.005, noisier=3),
    Setting(noise=0.005, noisier=6),
)  # fmt: skip


@dataclass(frozen=True)
class Tally:
    """What was said in all runs."""

    runs: int  # so many
    said: Counter[str]  # of the first cell, how often each verdict
    false: int  # runs in which another cell, or the first in the wrong direction, was told of


def rounds(draw: random.Random, setting: Setting, count: int = _ROUNDS) -> list[dict[str, float]]:
    """Numbers of a cell that changed."""
    return [_round(draw, setting) for _ in range(count)]


def _round(draw: random.Random, setting: Setting) -> dict[str, float]:
    drift = draw.gauss(0, _DRIFT)
    found = {}
    for role in (BASE, AGAIN, NEW):
        noise = setting.noise * (setting.noisier if role == NEW else 1)
        spike = setting.spike if draw.random() < setting.spiked else 0.0
        change = setting.change if role == NEW else 0.0
        found[role] = math.exp(drift + draw.gauss(0, noise)) * (1 + spike) * (1 + change)
    return found


def simulate(setting: Setting, runs: int) -> Tally:
    """Compare in so many runs, each with a seed of its own."""
    said, false, told = Counter[str](), 0, {_said.REGRESSED, _said.IMPROVED}
    right = {_said.REGRESSED} if setting.change else set[str]()
    for seed in range(runs):
        first, *others = _run(random.Random(seed), setting)
        said[first] += 1
        false += first in told - right or not told.isdisjoint(others)
    return Tally(runs, said, false)


def _run(draw: random.Random, setting: Setting) -> list[str]:
    """What is said of the first cell, and of those others that were measured again.

    As where there is time for all: what is settled after the fewest rounds has no more.
    """
    settings = [setting, *[replace(setting, change=0.0)] * (setting.cells - 1)]
    first = [_series(draw, str(place), each, FEWEST_ROUNDS) for place, each in enumerate(settings)]
    for series, each in zip(first, settings, strict=True):
        if not is_settled(series):
            series.rounds += rounds(draw, each, _ROUNDS - FEWEST_ROUNDS)
    places = [int(each.cell.name) for each in flagged(first)]
    again = {place: _series(draw, str(place), settings[place]) for place in places}
    looks = Looks.of(first, [*again.values()])
    return [verdict(first[at], again.get(at), looks).verdict for at in sorted({0, *places})]


def _series(draw: random.Random, name: str, setting: Setting, count: int = _ROUNDS) -> Series:
    cell = Cell(name, less_is_better=True, unit="seconds", index=None, benchmark={})
    return Series(cell, rounds(draw, setting, count))


def table(settings: Iterable[Setting], runs: int) -> Iterator[str]:
    """A line of Markdown for each."""
    yield f"| change of one cell | told | could not be told | same | false, of {runs} runs |"
    yield "|---|---|---|---|---|"
    for setting in settings:
        found = simulate(setting, runs)
        told = (
            found.said[_said.REGRESSED] + found.said[_said.IMPROVED],
            found.said[_said.INCONCLUSIVE],
        )
        shares = [f"{100 * each / runs:.1f} %" for each in (*told, found.said[_said.SAME])]
        yield f"| {setting} | {' | '.join(shares)} | {found.false} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.quality.verdicts", description=__doc__)
    parser.add_argument("--runs", type=int, default=400)
    for line in table(SETTINGS, parser.parse_args().runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
