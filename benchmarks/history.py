"""`python -m benchmarks history --commits N`: measure earlier commits with today's suite.

N commits, spread evenly over the first parents of HEAD, are measured: counts of graphs, peak memory
and paired ratios of the headline models. What a commit has of today's suite on this machine and
these versions is not measured again, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from . import measuring, stored, tiers
from ._git import git, git_or_nothing
from ._workloads import HEADLINE
from .measuring import CannotMeasureError, Place
from .progress import Part, Progress
from .running import TOO_LONG, asv, ended_by_signals

_NEEDED = ("optimizer", "models")
_PAIR = 2  # models of one part, so that little is lost where time is up


@dataclass
class Outcome:
    """What became of a commit.

    Attributes:
        measured: titles of the parts, with those that it had.
        left_out: titles of the parts for which there was no time.
        reason: why nothing of it can be measured, if so.
    """

    place: Place
    measured: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def text(self) -> str:
        """As a line says it."""
        if self.reason:
            return f"{self.place.commit[:8]}: not measured, because {self.reason}"
        also = f"; no time for {', '.join(self.left_out)}" if self.left_out else ""
        return f"{self.place.commit[:8]}: {', '.join(self.measured) or 'nothing'}{also}"


def main(arguments: Sequence[str]) -> int:
    """Measure, and say of each commit what became of it; 0 where nothing stopped it."""
    options = _options(arguments)
    outcomes = list[Outcome]()
    with ended_by_signals():
        try:
            status = _measured(options, outcomes)
            _tell(outcomes)
        except KeyboardInterrupt:
            print("Stopped; the same command goes on from here.")
            return measuring.STOPPED
    return status


def _measured(options: argparse.Namespace, outcomes: list[Outcome]) -> int:
    try:
        _measure(options, outcomes)
    except KeyboardInterrupt:
        print("Stopped; the same command goes on from here.")
        return measuring.STOPPED
    except CannotMeasureError as error:
        print(f"history: {error}")
        return 1
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks history", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--commits", type=int, required=True, metavar="N", help="how many")
    parser.add_argument("--minutes-each", type=float, default=4.0, metavar="M", help="4")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(HEADLINE))
    options = parser.parse_args(arguments)
    if options.commits < 1 or options.minutes_each <= 0:
        parser.error("--commits and --minutes-each are to be above 0.")
    return options


def _measure(options: argparse.Namespace, outcomes: list[Outcome]) -> None:
    newest = measuring.here("HEAD")
    places = [newest._replace(commit=commit) for commit in spread(_life(), options.commits)]
    measuring.discover(newest)
    parts = tiers.counted(_parts_of(options.models))
    if not parts:
        raise CannotMeasureError(f"the suite has none of {', '.join(options.models)}.")
    work = [(place, part) for place in places for part in parts]
    with Progress([part for _, part in work]) as progress:
        for number, place in enumerate(places, 1):
            outcomes.append(Outcome(place))
            where = f"commit {number} of {len(places)}, {place.commit[:8]}: "
            _of_commit(outcomes[-1], parts, progress, where, options.minutes_each * 60)


def _life() -> list[str]:
    """The first parents of HEAD, the newest first."""
    return git("rev-list", "--first-parent", "HEAD").split()


def spread(commits: Sequence[str], count: int) -> list[str]:
    """So many of some commits, evenly, with the first; all of them where there are no more."""
    if count >= len(commits):
        return list(commits)
    steps = max(count - 1, 1)
    return [commits[round(place * (len(commits) - 1) / steps)] for place in range(count)]


def _parts_of(models: Sequence[str]) -> list[Part]:
    pairs = [models[start : start + _PAIR] for start in range(0, len(models), _PAIR)]
    every = "|".join(models)
    counts = Part("graph counts", (rf"^graph\.(Graph|Work|Rewrites)\..*'({every})'",), tiers.COUNT)
    level_2 = Part("level 2", (rf"^graph\.(Lowered|Error)\..*'({every})'",), 0.2, tiers.GRAPHS)
    paired = [Part(f"Paired of {' and '.join(pair)}", (_of("Paired", pair),), tiers.PAIRED)
              for pair in pairs]  # fmt: skip
    memory = Part("Memory", (_of("Memory", models, "eager", "optimized-1"),), tiers.MEMORY)
    return [counts._replace(start=tiers.GRAPHS), *paired, memory, level_2]


def _of(kind: str, models: Iterable[str], *variants: str) -> str:
    rest = rf", '({'|'.join(variants)})'" if variants else ""
    return rf"^cpu\.{kind}\..*'({'|'.join(models)})'{rest}"


def _of_commit(
    outcome: Outcome, parts: Sequence[Part], progress: Progress, where: str, seconds: float
) -> None:
    """Measure what a commit lacks of the parts, as long as there is time."""
    outcome.reason = _obstacle(outcome.place)
    until = time.monotonic() + seconds
    for part in parts:
        if outcome.reason or _has(outcome.place, part):
            progress.skip(part)
            outcome.measured += [] if outcome.reason else [part.title]
        elif _one(outcome.place, part, progress, where, until):
            outcome.measured.append(part.title)
        else:
            outcome.left_out.append(part.title)


def _one(place: Place, part: Part, progress: Progress, where: str, until: float) -> bool:
    """Measure a part, if it can be done in time; tell whether it was."""
    left = until - time.monotonic()
    if part.guess * progress.rate() > left:
        progress.skip(part)
        return False
    measuring.require_room()
    progress.begin(part, where)
    status = measuring.run_part(place, part, progress, limit=left)
    if status == TOO_LONG:
        return False
    measuring.require(status, part)
    return True


def _obstacle(place: Place) -> str:
    """Why nothing of a commit can be measured; "" if something can."""
    for package in _NEEDED:
        if not git_or_nothing("ls-tree", place.commit, f"{package}/__init__.py"):
            return f"it has no package `{package}`"
    try:
        if place.file.exists():
            stored.read(place.file)
    except stored.UnreadableError as error:
        return str(error)
    return ""


def _has(place: Place, part: Part) -> bool:
    """Whether there are results of today's benchmarks for most models of a part.

    What is n/a on an old commit looks as if it had not been measured, and costs little to ask for.
    """
    if not place.file.exists():
        return False
    run, today = stored.read(place.file), stored.suite()
    cells = [cell for cell in tiers.listed() if tiers.matches(part, cell)]
    known = run.numbers.keys() | run.failed
    done = [cell for cell in cells if cell in known and _is_today(run, today, cell)]
    return len({_model(cell) for cell in done}) * 2 > len({_model(cell) for cell in cells})


def _is_today(run: stored.Run, today: dict[str, str], cell: str) -> bool:
    name = cell.partition("(")[0]
    return run.versions[name] == today[name]


def _model(cell: str) -> str:
    return cell.partition("(")[2].partition(",")[0].strip("')")


def _tell(outcomes: Sequence[Outcome]) -> None:
    """The last lines: what became of each commit, and which results are of an older suite."""
    if any(outcome.measured for outcome in outcomes) and asv("publish"):
        print("The results are kept; the dashboard could not be built. What asv said is above.")
    print()
    found, complaints = stored.runs()
    for line in (*(outcome.text for outcome in outcomes), *complaints):
        print(line)
    if stored.LISTING.exists() and (older := stored.older_suites(found, stored.suite())):
        print(older)
