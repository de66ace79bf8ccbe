"""Measure one commit, publish, and say what it made larger or slower.

The headline models are measured, in ten minutes on two idle cores; --all takes every model. What
else is given is asv's, such as --quick, which keeps nothing. asv keeps what a part measured when
the part ends, so an interruption loses one part only.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from asv.commands import make_argparser
from asv.util import UserError

from . import stored, tiers, verdict
from ._git import git_or_nothing
from ._machine import register
from .compare.trees import ComparisonError
from .progress import Part, Progress
from .running import asv, ended_by_signals, launch

_HTML = ".asv/html"
_ADDRESS = "http://127.0.0.1:8000/"
_SERVE = f"python -m http.server --bind 127.0.0.1 --directory {_HTML} 8000"
_FEWEST_BYTES = 100 * 2**20  # of a checkout, the pages and the results, several times over
_FAILED = 2  # how asv ends where a benchmark failed
_MEASURED = (0, _FAILED)
STOPPED = 128 + signal.SIGINT


class CannotMeasureError(Exception):
    """Nothing more can be measured; the message says what to do."""


class Place(NamedTuple):
    """What is measured, and where it is kept."""

    commit: str
    machine: str
    environment: str

    @property
    def run(self) -> list[str]:
        """The arguments with which asv measures it."""
        return ["run", f"{self.commit}^!", "--machine", self.machine, *launch()]

    @property
    def file(self) -> stored.Path:
        """The results of it."""
        name = f"{self.commit[:8]}-{self.environment}.json"
        return stored.RESULTS / self.machine / name


def main(arguments: Sequence[str], commands: str = "") -> int:
    """Measure, and return 0; 2 where a benchmark failed, 1 where it could not be measured.

    Args:
        arguments: of the command line.
        commands: what --help says of other commands.
    """
    options, rest = _options(arguments, commands)
    if "--quick" in rest:
        rest.append("--dry-run")
    with ended_by_signals():
        try:
            return _measure(options, rest)
        except CannotMeasureError as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # before or after the parts, which have more to say
            print("Stopped.", file=sys.stderr)
            return STOPPED


def _options(arguments: Sequence[str], commands: str = "") -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        usage="%(prog)s [COMMAND] [options]",
        description=__doc__,
        epilog=commands,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--all", action="store_true", help="every model, an hour or so")
    parser.add_argument("-b", "--bench", action="append", help="a regular expression, as of asv")
    parser.add_argument("--commit", default="HEAD", help="HEAD, if not given")
    options, rest = parser.parse_known_args(arguments)
    if unknown := _unknown(rest):
        parser.error(f"neither this command nor `asv run` knows {' '.join(unknown)}; see --help.")
    return options, rest


def _unknown(rest: Sequence[str]) -> list[str]:
    """The arguments that asv does not know either, which it would say only of the first part."""
    parser, _ = make_argparser()
    known: tuple[argparse.Namespace, list[str]] = parser.parse_known_args(["run", "HEAD^!", *rest])
    return known[1]


def _measure(options: argparse.Namespace, rest: list[str]) -> int:
    place = here(options.commit)
    _say_what_is_not_measured()
    discover(place)
    wanted = tiers.everything if options.all else tiers.headline
    parts = tiers.counted(tiers.chosen(options.bench) if options.bench else wanted())
    if not parts:
        raise CannotMeasureError(
            f"no benchmark matches {options.bench} on this machine; `asv show` lists names."
        )
    status = _parts(place, parts, rest)
    if status in _MEASURED:
        status = max(status, _publish())
    _tell(place)
    return status


def here(commit: str) -> Place:
    """A commit, on this machine and this Python; what hinders is told before anything is measured.

    Raises:
        CannotMeasureError: there is no such commit, no room, or results that cannot be read.
    """
    known = git_or_nothing("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if not known:
        raise CannotMeasureError(
            f"there is no commit {commit!r} here: commit first, or name one that git knows."
        )
    try:
        place = Place(known, register(), stored.environment())
    except (ComparisonError, UserError, OSError) as error:
        raise CannotMeasureError(str(error)) from error
    if place.file.exists():
        require_readable(place)
    return place


def require_readable(place: Place) -> None:
    """Refuse what asv would stop at: it adds to the results of a commit.

    Raises:
        CannotMeasureError: they cannot be read.
    """
    try:
        stored.read(place.file)
    except stored.UnreadableError as error:
        raise CannotMeasureError(str(error)) from error


def _say_what_is_not_measured() -> None:
    changed = git_or_nothing("status", "--porcelain", "--", "optimizer", "models")
    if changed:
        count = len(changed.splitlines())
        print(f"{count} files have changes: the commit is measured, not they. Commit them first.")
    if tiers.absent():
        print(f"Not on this machine, and not measured: {', '.join(tiers.absent())}.")


def discover(place: Place) -> None:
    """Let asv check the commit out and list the suite.

    Raises:
        CannotMeasureError: it cannot.
    """
    print("asv looks the suite through.", flush=True)
    if asv(*place.run, "--bench", "just-discover"):
        raise CannotMeasureError("asv cannot list the benchmarks; what it said of it is above.")


def require_room() -> None:
    """Raise CannotMeasureError where the disk is nearly full."""
    free = shutil.disk_usage(".").free
    if free < _FEWEST_BYTES:
        raise CannotMeasureError(
            f"the disk has {free // 2**20} MB left, and {_FEWEST_BYTES // 2**20} are needed: make"
            " room and run again. What was measured before is kept."
        )


def _parts(place: Place, parts: Sequence[Part], rest: Sequence[str]) -> int:
    """Measure part by part and return the worst status; say which part stopped it."""
    worst, ended = 0, list[Part]()
    began = time.monotonic()
    try:
        with Progress(parts) as progress:
            for part in parts:
                require_room()
                progress.begin(part)
                worst = max(worst, require(run_part(place, part, progress, *rest), part))
                ended.append(part)
    except (KeyboardInterrupt, CannotMeasureError) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        print("Stopped." if stopped else f"benchmarks: {error}", file=sys.stderr)
        _say_what_is_left(ended, parts)
        return STOPPED if stopped else 1
    print(f"Measured in {(time.monotonic() - began) / 60:.1f} minutes.")
    return worst


def require(status: int, part: Part) -> int:
    """The status of asv, where it measured; raise CannotMeasureError where it did not."""
    if status not in _MEASURED:
        raise CannotMeasureError(f"{part.title}: asv stopped; why is above.")
    return status


def run_part(
    place: Place, part: Part, progress: Progress, *rest: str, limit: float | None = None
) -> int:
    """Let asv measure a part of a commit; return its status."""
    patterns = [word for pattern in part.patterns for word in ("--bench", pattern)]
    return asv(*place.run, *patterns, *rest, told=progress.told, limit=limit)


def _say_what_is_left(ended: Sequence[Part], parts: Sequence[Part]) -> None:
    kept = ", ".join(part.title for part in ended) or "nothing"
    print(f"Kept: {kept}. What is left is measured by:")
    for part in parts:
        if part not in ended:
            patterns = " ".join(f'--bench "{pattern}"' for pattern in part.patterns)
            print(f"  python -m benchmarks {patterns}")


def _publish() -> int:
    if not asv("publish"):
        return 0
    print("The results are kept; the dashboard could not be built. What asv said is above.")
    return 1


def _tell(place: Place) -> None:
    """The last lines: what is different, what cannot be read, where the dashboard is."""
    found, complaints = stored.runs()
    print()
    for complaint in complaints:
        print(complaint)
    now = next((run for run in found if run.file == place.file), None)
    if now is None:
        print("Nothing was kept of this commit.")
    else:
        before = verdict.earlier(found, place.commit, place.machine, place.environment)
        print("\n".join(verdict.lines(now, before)))
    print(f"Dashboard: {_HTML}/index.html; to open it run {_SERVE}, then see {_ADDRESS}")
