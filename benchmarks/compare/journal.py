"""The rounds on disk: each is written as it ends, and `--resume` takes them up again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .cells import Cell
from .rounds import Series
from .trees import ComparisonError


class Journal:
    """A file of lines: what is compared, then a round of a cell in each.

    Args:
        path: of the file. One that cannot be written is told of in `trouble`, and nothing else
            stops for that.
        about: what is compared, and on which machine; rounds of anything else are not resumed.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about, self.trouble = path, about, ""

    def begin(self) -> None:
        """Drop what an earlier run wrote."""
        self._write("w", [self.about])

    def resume(self, cells: Iterable[Cell]) -> tuple[list[Series], list[Series]]:
        """The first and the second rounds of these cells that an earlier run measured.

        Raises:
            ComparisonError: they cannot be read, or are of something else.
        """
        first, second = {each.name: Series(each) for each in cells}, dict[str, Series]()
        for line in self._lines():
            if line["cell"] not in first:
                continue
            series = first[line["cell"]]
            if line["again"]:
                series = second.setdefault(series.cell.name, Series(series.cell))
            _take(series, line)
        return [*first.values()], [*second.values()]

    def keep(self, series: Series, again: bool) -> None:
        """Write the latest round of a cell."""
        told = {"cell": series.cell.name, "again": again, "exact": series.exact}
        if series.missing:
            told |= {"missing": series.missing, "failed": sorted(series.failed)}
        else:
            told |= {"round": series.rounds[-1]}
        self._write("a", [told])

    def _write(self, mode: str, lines: Iterable[dict[str, Any]]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode) as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            self.trouble = f"the rounds cannot be kept in {self.path}: {error.strerror or error}"

    def _lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            raise ComparisonError(f"there is nothing to resume ({self.path}): leave --resume out.")
        *whole, rest = self.path.read_text(errors="replace").split("\n")
        try:
            about, *lines = [json.loads(line, parse_constant=_refuse) for line in whole]
            if about != self.about:
                raise ComparisonError(
                    f"{self.path} is of {about}, and not of {self.about}: leave --resume out."
                )
            _require_rounds(lines)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ComparisonError(
                f"{self.path} cannot be read ({error}): leave --resume out, or mend it."
            ) from error
        if rest:  # a line that was not finished
            self.path.write_text("".join(f"{line}\n" for line in whole))
        return lines


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number that was measured")


def _require_rounds(lines: Iterable[dict[str, Any]]) -> None:
    for line in lines:
        numbers = line["round"].values() if "round" in line else []
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError(f"a number of {line['cell']} is not finite")
        line["again"], line["exact"]  # required


def _take(series: Series, line: dict[str, Any]) -> None:
    series.exact = line["exact"]
    if "round" in line:
        series.rounds.append(line["round"])
    else:
        series.missing, series.failed = line["missing"], {*line["failed"]}
