"""Cells as Markdown: speed-up over eager, what preparing and holding it costs, and the answer.

A peer whose answer is further from eager's than rounding can take it has no speed-up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from benchmarks.subjects import EAGER, ordered

from ._rounds import Cell
from ._store import Key

OURS = ("optimized-2", "optimized-2-openvino")
_RUNTIMES = ("onnxruntime", "openvino")
_FURTHEST = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 3e-1}


class Spread(NamedTuple):
    """The median of samples, and the interval that holds the true one with 95 % confidence.

    It is read off the ordered samples; of fewer than 6 it is the whole range.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        ordered = sorted(samples)
        count = len(ordered)
        # The median is below the (k + 1)st as often as at most k of `count` coins show heads.
        ways = itertools.accumulate(math.comb(count, heads) for heads in range(count))
        skipped = max(0, sum(each <= (1 << count) // 40 for each in ways) - 1)
        return cls(median(ordered), ordered[skipped], ordered[-1 - skipped])


def tables(cells: dict[Key, Cell]) -> Iterator[str]:
    """The lines of all tables: a group of them for each device, dtype, batch and thread count."""
    groups: dict[Key, dict[tuple[str, str], Cell]] = {}
    for (device, dtype, model, batch, threads, peer), cell in cells.items():
        groups.setdefault((device, dtype, batch, threads), {})[model, peer] = cell
    for (device, dtype, batch, threads), group in sorted(groups.items()):
        many = "thread" if threads == 1 else "threads"
        yield f"## {device}, {dtype}, batch {batch}, {threads} {many}\n"
        yield from _Group(group, dtype).lines()


def is_wrong(cell: Cell, dtype: str) -> bool:
    """Whether the answer is further from eager's than rounding takes it, or than it promises."""
    return bool(cell["difference"] > max(_FURTHEST[dtype], cell.get("budget", 0)))


def speedups(cell: Cell, dtype: str) -> list[float]:
    """Speed over eager's of each round; none where the peer failed or its answer is wrong."""
    if "reason" in cell or is_wrong(cell, dtype):
        return []
    pairs = zip(cell["eager_seconds"], cell["seconds"], strict=True)
    return [eager / seconds for eager, seconds in pairs]


class _Group:
    def __init__(self, cells: dict[tuple[str, str], Cell], dtype: str) -> None:
        self.cells, self.dtype = cells, dtype
        self.models = list(dict.fromkeys(model for model, _ in cells))
        self.peers = ordered({peer for _, peer in cells} - {EAGER})
        self.notes: dict[str, int] = {}

    def lines(self) -> Iterator[str]:
        yield "Speed-up over eager [95 % interval] (seconds to prepare):\n"
        yield from self._table(EAGER, self._latency, self._speed)
        yield self._row("geometric mean", "", *map(self._mean, self.peers))
        for note, number in self.notes.items():
            yield f"\n{number}. {note}"
        yield "\nPeak memory of the process above what it held before the model, MiB:\n"
        yield from self._table(EAGER, self._memory, self._memory)
        yield "\nDistance of the answer from eager's, in the 2-norm, relative to eager's:\n"
        yield from self._table("", lambda cell: "", lambda cell: f"{cell['difference']:.1g}")
        for ours in [each for each in OURS if each in self.peers]:
            yield f"\nSpeed of {ours} over that of a peer [95 % interval]:\n"
            yield from self._ours(ours)
        yield ""

    def _table(self, first: str, of_eager: Callable[[Cell], str], of_peer: Any) -> Iterator[str]:
        yield self._row("model", first, *self.peers)
        yield "|---" * (len(self.peers) + 2) + "|"
        for model in self.models:
            texts = [self._text(model, peer, of_peer) for peer in self.peers]
            yield self._row(model, self._text(model, EAGER, of_eager), *texts)

    def _row(self, *texts: str) -> str:
        return f"| {' | '.join(texts)} |"

    def _text(self, model: str, peer: str, text: Callable[[Cell], str]) -> str:
        cell = self.cells.get((model, peer))
        if cell is None:
            return ""
        if "reason" in cell:
            return f"n/a ({self._note(peer, cell)})"
        return text(cell)

    def _note(self, peer: str, cell: Cell) -> int:
        return self.notes.setdefault(f"{peer}: {cell['reason']}", len(self.notes) + 1)

    def _latency(self, cell: Cell) -> str:
        return f"{_rounded(median(cell['seconds']) * 1e3, 3)} ms"

    def _speed(self, cell: Cell) -> str:
        if is_wrong(cell, self.dtype):
            return f"wrong answer ({_rounded(cell['prepared'], 2)})"
        spread = Spread.of(speedups(cell, self.dtype))
        return f"{_text(spread)} ({_rounded(cell['prepared'], 2)})"

    def _memory(self, cell: Cell) -> str:
        peak = cell["peak_memory"]
        return "" if peak is None else f"{peak / 2**20:.0f}"

    def _speedups(self, model: str, peer: str) -> list[float]:
        """Of each round; none where the peer failed."""
        return speedups(self.cells.get((model, peer), {"reason": ""}), self.dtype)

    def _mean(self, peer: str) -> str:
        found = [median(each) for model in self.models if (each := self._speedups(model, peer))]
        if not found:
            return ""
        of_all = "" if len(found) == len(self.models) else f" ({len(found)} of {len(self.models)})"
        return f"{geometric_mean(found):.2f}{of_all}"

    def _ours(self, ours: str) -> Iterator[str]:
        others = [EAGER, *(peer for peer in self.peers if peer != ours)]
        columns = {peer: self._over(ours, [peer]) for peer in others}
        if set(_RUNTIMES) <= set(others):
            columns["the faster runtime"] = self._over(ours, _RUNTIMES)
        yield self._row("model", *columns)
        yield "|---" * (len(columns) + 1) + "|"
        for model in self.models:
            ratios = [column.get(model) for column in columns.values()]
            yield self._row(model, *("" if each is None else _text(each) for each in ratios))
        medians = [[each.median for each in column.values()] for column in columns.values()]
        for name, summary in (("geometric mean", geometric_mean), ("least", min)):
            yield self._row(name, *(f"{summary(each):.2f}" if each else "" for each in medians))

    def _over(self, ours: str, peers: Iterable[str]) -> dict[str, Spread]:
        """Ours over the fastest of some peers, on each model where all of them answer."""
        found = {}
        for model in self.models:
            own, *theirs = (self._speedups(model, peer) for peer in (ours, *peers))
            if own and all(theirs):
                fastest = max(theirs, key=median)
                found[model] = Spread.of(a / b for a, b in zip(own, fastest, strict=False))
        return found


def _text(spread: Spread) -> str:
    return f"{spread.median:.2f} [{spread.low:.2f}, {spread.high:.2f}]"


def _rounded(value: float, digits: int) -> str:
    """To so many digits, but never with an exponent for what is large."""
    return f"{float(f'{value:.{digits}g}'):g}"
