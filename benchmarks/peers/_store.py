"""What was measured, in one file of JSON lines: a line for each cell, written anew after each task.

The first line says of what and on what it was measured. asv reads every `.json` below `results/`
as its own, hence `.jsonl`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ._rounds import Cell

Key = tuple[Any, ...]
AXES = ("device", "dtype", "model", "batch", "threads", "peer")


class Store:
    """Cells by their place on the axes. Without a file they are kept for now only."""

    def __init__(self, file: Path | None, about: dict[str, Any]) -> None:
        self.file, self.about = file, about
        self.cells: dict[Key, Cell] = {}
        if file is not None and file.exists():
            self.about, *cells = map(json.loads, file.read_text().splitlines())
            self.cells = {tuple(cell.pop(axis) for axis in AXES): cell for cell in cells}

    def lacks(self, key: Key) -> bool:
        """Whether a cell is still to be measured: those that failed are tried again."""
        return "reason" in self.cells.get(key, {"reason": "never measured"})

    def add(self, cells: dict[Key, Cell]) -> None:
        """Keep cells, but for what is there and did not fail; the file is replaced as a whole."""
        self.cells |= {key: cell for key, cell in cells.items() if self.lacks(key)}
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_suffix(".partial")
        beside.write_text("".join(f"{json.dumps(line)}\n" for line in self._lines()))
        beside.replace(self.file)

    def _lines(self) -> Iterable[dict[str, Any]]:
        yield self.about
        for key, cell in self.cells.items():
            yield {**dict(zip(AXES, key, strict=True)), **cell}
