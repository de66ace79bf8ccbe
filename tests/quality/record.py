"""What a command measured, kept on disk with the commit and the machine that it was measured at."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

# What is known of each mutant, target, pass or run, by its name; the latest stands last.
Entries: TypeAlias = dict[str, dict[str, Any]]

FOLDER = Path("docs", "fuzzing")
# What a figure speaks of, below the root, if not of the whole package.
_OF_BENCHMARKS = ("alarms.py", "verdicts.py")  # no figure here speaks of them
_SPEAKS_OF = {"hunt": ("optimizer/testing", "tests/quality"), "quick": ("optimizer", "tests")}


@dataclass(frozen=True)
class Recorder:
    """Keeps entries of one figure in `folder/figure.json`.

    A long measurement can be made in parts: a new entry replaces the one of its name only.
    """

    folder: Path
    figure: str
    stamp: dict[str, str]

    @classmethod
    def of(cls, folder: Path, figure: str, command: str) -> Recorder:
        """For what this command measures from now on."""
        told = {"commit": commit(), "machine": machine(), "command": command}
        stamp = told | {"code": code_of(figure)}
        return cls(folder, figure, stamp)

    def __call__(self, name: str, **measured: Any) -> None:
        """Write one entry."""
        entries = read(self.folder, self.figure)
        entries.pop(name, None)
        entries[name] = measured | self.stamp
        path = self.folder / f"{self.figure}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def read(folder: Path, figure: str) -> Entries:
    """All entries of a figure; none where it was never measured."""
    path = folder / f"{figure}.json"
    found: Entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


@cache
def code_of(figure: str) -> str:
    """A digest of the code that a figure speaks of, which says whether it is still the same.

    Commits do not: they are rebased, and most of them change something else.
    """
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in _SPEAKS_OF.get(figure, ("optimizer", "tests/quality")):
        for file in sorted((root / folder).rglob("*.*")):
            if file.suffix in (".py", ".txt") and file.name not in _OF_BENCHMARKS:
                digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """The commit, with a + where the package or its tests differ from it; empty where unknown."""
    root = Path(__file__).parents[2]
    try:
        head = _git("rev-parse", "--short=7", "HEAD", folder=root)
        return head + "+" * bool(_git("status", "--porcelain", "optimizer", "tests", folder=root))
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str, folder: Path) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    """The processor and its cores."""
    information = Path("/proc/cpuinfo")
    text = information.read_text(encoding="utf-8") if information.exists() else ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return f"{named[1] if named else platform.machine()}, {os.cpu_count()} cores"
