"""`python -m benchmarks --smoke`: whether the suite runs, on one small model; nothing is kept.

Each benchmark is a line as it ends, and what failed is told in full.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ._machine import register
from .measuring import STOPPED
from .running import asv, ended_by_signals, launch

MODEL = "tiny_convnet"
_ONLY = ["--bench", rf"^(cpu|graph|optimize_cost)\..*'{MODEL}'"]
_QUICK = ["--quick", "--dry-run", "--show-stderr"]
_ENDED = re.compile(r"^(\[ *[\d.]+%\]) ··· ((?:Setting up )?\S+) +(.*(?:ok|n/a|failed))$")
_NUMBER = re.compile(rf"{MODEL}( +\S+)? +\d")


def main() -> int:
    """Try it out; 0 where something was measured and nothing failed."""
    print(f"The suite is tried out on {MODEL}, in a minute or so; nothing is kept.", flush=True)
    heard = Listener()
    with ended_by_signals(), _results_as_before():
        try:
            status = asv("check", hear=heard) or asv(*_command(), hear=heard)
        except KeyboardInterrupt:
            print("Stopped.", file=sys.stderr)
            return STOPPED
    if heard.has_numbers and (not status or heard.has_failures):
        print(
            "Some benchmarks failed: why is above."
            if heard.has_failures
            else "Every benchmark ran."
        )
        return status
    print("\n".join(heard.unsaid))
    print("Nothing was measured." if not heard.has_numbers else "asv stopped.", file=sys.stderr)
    return status or 1


def _command() -> list[str]:
    return ["run", "HEAD^!", "--machine", register(), *launch(), *_QUICK, *_ONLY]


class Listener:
    """Hears what asv says, line by line, and says what matters.

    Attributes:
        has_failures: whether any benchmark failed.
        has_numbers: whether anything was measured.
        unsaid: what was heard since the last benchmark ended.
    """

    def __init__(self) -> None:
        self.has_numbers = self.has_failures = self._is_failure = False
        self.unsaid: list[str] = []

    def __call__(self, line: str) -> None:
        self.has_numbers |= bool(_NUMBER.search(line))
        if found := _ENDED.match(line):
            self._end(*found.groups())
        elif self._is_failure:
            print(line, flush=True)
        else:
            self.unsaid.append(line)

    def _end(self, percent: str, name: str, how: str) -> None:
        self._is_failure = how.endswith("failed")
        self.has_failures |= self._is_failure
        self.unsaid.clear()
        print(f"{percent} {name}: {how}", flush=True)


@contextlib.contextmanager
def _results_as_before() -> Iterator[None]:
    """Even a dry run describes its machine and its benchmarks among the results."""
    results = Path("results")
    before = {file: file.read_bytes() for file in results.rglob("*.json")}
    try:
        yield
    finally:
        for file in set(results.rglob("*.json")) - set(before):
            file.unlink()
        for file, content in before.items():
            file.write_bytes(content)
