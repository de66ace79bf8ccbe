"""What is measured, how much is left, and until when: a line at least every ten seconds."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

_TRUST = 60.0  # seconds of measuring that weigh as much as the guess


@contextmanager
def spoken(line: Callable[[], str], silence: float = 10.0) -> Iterator[None]:
    """Print a line whenever so many seconds have passed, as long as the block runs."""
    over = threading.Event()

    def speak() -> None:
        while not over.wait(silence):
            print(line(), flush=True)

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Part(NamedTuple):
    """What one run of asv measures.

    Attributes:
        title: what it is, for people.
        patterns: what asv looks for in the names of cells.
        seconds: what a cell takes, roughly; the clock corrects it.
        start: seconds until the first cell begins.
        cells: how many there are.
    """

    title: str
    patterns: tuple[str, ...]
    seconds: float
    start: float = 8.0
    cells: int = 0

    @property
    def guess(self) -> float:
        """Seconds for all of it."""
        return self.start + self.seconds * self.cells


class Progress:
    """Speaks while it is entered. Say `begin` before each part.

    Args:
        parts: all that is to be measured.
        silence: seconds without a line, at most.

    Attributes:
        told: the file in which each cell is written down as it begins.
    """

    def __init__(self, parts: Sequence[Part], silence: float = 10.0) -> None:
        self._left, self._silence = list(parts), silence
        self._total = sum(part.cells for part in parts)
        self._folder = tempfile.TemporaryDirectory(prefix="benchmarks-")
        self.told = Path(self._folder.name) / "told"
        self._part: Part | None = None
        self._where, self._passed, self._finished = "", 0, 0.0
        self._started = self._began = time.monotonic()
        self._within = ExitStack()

    def __enter__(self) -> Self:
        self._within.enter_context(self._folder)
        self._within.enter_context(spoken(self.line, self._silence))
        return self

    def __exit__(self, *_: object) -> None:
        self._within.close()

    def begin(self, part: Part, where: str = "") -> None:
        """Hear of the next part, and where it is measured."""
        self._close()
        self._part, self._where, self._began = part, where, time.monotonic()
        self._left.remove(part)
        self.told.write_text("")
        print(self.line(), flush=True)

    def skip(self, part: Part) -> None:
        """Hear that a part is not measured."""
        self._left.remove(part)
        self._total -= part.cells

    def _close(self) -> None:
        if self._part is not None:
            self._passed += self._part.cells
            self._finished += self._part.guess

    def rate(self) -> float:
        """How many times longer it takes than was guessed; at first the guess weighs most."""
        done = self._finished + self._done_of_part()[1]
        return (time.monotonic() - self._started + _TRUST) / (done + _TRUST)

    def line(self) -> str:
        """What is measured now, how much of all is done, what is left, and until when."""
        begun, done = self._done_of_part()
        part = self._part or Part("beginning", (), 0.0)
        guess = part.guess - done + sum(each.guess for each in self._left)
        seconds = max(guess, 0.0) * self.rate()
        until = time.strftime("%H:%M", time.localtime(time.time() + seconds))
        cell = f", {begun[-1]}" if begun else ""
        count = f"{self._passed + len(begun)} of {self._total}"
        return f"-- {self._where}{part.title}{cell}: {count}, {_minutes(seconds)} left, to {until}"

    def _done_of_part(self) -> tuple[list[str], float]:
        if self._part is None:
            return [], 0.0
        try:
            begun = self.told.read_text().splitlines()
        except OSError:
            begun = []
        if not begun:
            return [], min(time.monotonic() - self._began, self._part.start)
        return begun, self._part.start + self._part.seconds * (len(begun) - 1)


def _minutes(seconds: float) -> str:
    minutes = max(1, round(seconds / 60))
    return f"{minutes} minute{'s' * (minutes > 1)}"
