"""What asv kept: each file of results as numbers by the names of their cells.

Files are read with care: one that a full disk cut off, or that was edited by hand, is a sentence.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asv.environment import get_environments

from .compare.trees import configuration

RESULTS = Path("results")
LISTING = RESULTS / "benchmarks.json"
_NO_RESULTS = ("machine.json", "benchmarks.json")


class Number(NamedTuple):
    """A number that was measured, and its 99 % interval where it is of samples."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Run:
    """A file of results: a commit, measured on one machine in one environment.

    Attributes:
        versions: of the benchmarks that it has numbers of.
        numbers: by the name of the cell; what is n/a has none.
        failed: the names of cells that failed.
    """

    file: Path
    commit: str
    environment: str
    versions: dict[str, str]
    numbers: dict[str, Number]
    failed: frozenset[str]


class UnreadableError(Exception):
    """A file of results cannot be read; the message says what to do."""


def environment() -> str:
    """What asv calls the environment of this Python here, which is part of the files' names.

    Raises:
        ComparisonError: there is no configuration of asv here.
    """
    (found,) = get_environments(configuration(), [])
    return found.name


def runs(folder: Path = RESULTS) -> tuple[list[Run], list[str]]:
    """Every file of results that can be read, and a sentence for each other."""
    found, complaints = [], []
    for file in sorted(folder.rglob("*.json")):
        if file.name in _NO_RESULTS:
            continue
        try:
            found.append(read(file))
        except UnreadableError as error:
            complaints.append(str(error))
    return found, complaints


def read(file: Path) -> Run:
    """One file of results.

    Raises:
        UnreadableError: it is cut off, or something in it is of another kind than asv writes.
    """
    try:
        stored = json.loads(file.read_text())
        return _run(file, stored)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UnreadableError(
            f"{file} cannot be read ({reason}): bring it back with `git checkout -- {file}`,"
            " or delete it if git has none, and run again."
        ) from error


def _run(file: Path, stored: dict[str, Any]) -> Run:
    columns = {
        name: dict(zip(stored["result_columns"], row, strict=False))
        for name, row in stored["results"].items()
    }
    cells = [cell for name, column in columns.items() for cell in _cells(name, column)]
    return Run(
        file,
        str(stored["commit_hash"]),
        str(stored["env_name"]),
        {name: str(column.get("version")) for name, column in columns.items()},
        {name: number for name, number in cells if number and not math.isnan(number.value)},
        frozenset(name for name, number in cells if number is None),
    )


def _cells(name: str, column: dict[str, Any]) -> Iterator[tuple[str, Number | None]]:
    """The cells of a benchmark; None for one that failed."""
    params = column.get("params") or []
    names = [f"{name}({', '.join(choice)})" if choice else name
             for choice in itertools.product(*params)]  # fmt: skip
    values, low, high = (
        column.get(key) or [None] * len(names)
        for key in ("result", "stats_ci_99_a", "stats_ci_99_b")
    )
    for cell, value, least, most in zip(names, values, low, high, strict=True):
        yield cell, None if value is None else Number(float(value), _real(least), _real(most))


def _real(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def suite(listing: Path = LISTING) -> dict[str, str]:
    """The versions of today's benchmarks by name, as asv listed them last."""
    listed = json.loads(listing.read_text())
    return {name: each["version"] for name, each in listed.items() if isinstance(each, dict)}


def older_suites(found: list[Run], today: dict[str, str]) -> str:
    """A sentence on the files of which asv shows nothing any more, or not all; "" if none are."""
    older = [run for run in found if not run.versions.items() <= today.items()]
    if not older:
        return ""
    gone = sorted({name for run in older for name in run.versions.keys() - today.keys()})
    renamed = f" Benchmarks of these names are gone: {', '.join(gone)}." if gone else ""
    files = ", ".join(str(run.file) for run in older)
    return (
        f"{len(older)} of {len(found)} files have numbers of an older suite, which no page shows:"
        f" {files}.{renamed}"
    )
