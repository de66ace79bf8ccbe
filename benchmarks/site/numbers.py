"""Numbers as the pages show them, each with what it is sorted by."""

from __future__ import annotations

import math
from statistics import median
from typing import NamedTuple

from benchmarks.peers._rounds import Cell
from benchmarks.peers._table import Spread, is_wrong, speedups
from benchmarks.stored import Number, Run
from benchmarks.subjects import EAGER

RATIO, LATENCY, MEMORY = (
    "Paired.track_relative_latency",
    "Latency.time_forward",
    "Memory.track_peak_memory",
)
TIMES = "\N{MULTIPLICATION SIGN}"
_DTYPE = "float32"
_SMALL = 0.01  # of a MiB, below which bytes are easier to read


class Shown(NamedTuple):
    """One cell of a table.

    Attributes:
        text: the number, or why there is none.
        kind: of `faster`, `slower`, `unsure`, `plain`, `absent`, `failed`.
        value: what it is sorted by, and where a chart has it.
        interval: what holds the true number, where it is of samples.
        note: what more there is to say.
    """

    text: str
    kind: str = "plain"
    value: float | None = None
    interval: str = ""
    note: str = ""


ABSENT = Shown("n/a", "absent", note="was not measured here, or cannot be")
FAILED = Shown("failed", "failed", note="the benchmark failed on this commit")


def cell_name(benchmark: str, *params: str) -> str:
    """As asv names the cell of a benchmark."""
    return f"{benchmark}({', '.join(map(repr, params))})"


def found(run: Run | None, benchmark: str, *params: str) -> Number | Shown:
    """A number of a run, or what stands in its place."""
    name = cell_name(benchmark, *params)
    if run is not None and name in run.failed:
        return FAILED
    number = run.numbers.get(name) if run else None
    return ABSENT if number is None else number


def speed(run: Run | None, model: str, variant: str) -> Shown:
    """The speed-up of a variant over eager, with its 99 % interval."""
    if run is not None and variant == EAGER:
        return Shown(f"1.00{TIMES}", value=1.0, note="what others are compared with")
    number = found(run, RATIO, model, variant)
    if isinstance(number, Shown):
        return number
    if number.value <= 0:
        return ABSENT
    low, high = (1 / each if each else None for each in (number.high, number.low))
    return _speed(1 / number.value, low, high, "99 % interval")


def peer_speed(cell: Cell | None) -> Shown:
    """The speed-up of a peer over eager, with its 95 % interval."""
    if cell is None:
        return ABSENT
    if "reason" in cell:
        return Shown("failed", "failed", note=cell["reason"])
    if is_wrong(cell, _DTYPE):
        return Shown("wrong", "failed", note=f"its answer is {cell['difference']:.1g} away")
    spread = Spread.of(speedups(cell, _DTYPE))
    return _speed(spread.median, spread.low, spread.high, "95 % interval")


def _speed(value: float, low: float | None, high: float | None, note: str) -> Shown:
    text = f"{value:.2f}{TIMES}"
    if low is None or high is None:
        return Shown(text, "unsure", value, note="a single measurement: no interval")
    kind = "faster" if low > 1 else "slower" if high < 1 else "unsure"
    return Shown(text, kind, value, f"{low:.2f} to {high:.2f}", note)


def milliseconds(run: Run | None, model: str, variant: str) -> Shown:
    """Of one forward, with its 99 % interval."""
    number = found(run, LATENCY, model, variant)
    if isinstance(number, Shown):
        return number
    value = number.value * 1e3
    if number.low is None or number.high is None:
        return Shown(digits(value), value=value)
    interval = f"{digits(number.low * 1e3)} to {digits(number.high * 1e3)}"
    return Shown(digits(value), value=value, interval=interval)


def peer_milliseconds(cell: Cell | None) -> Shown:
    """Of one forward in a peer's hands: the median of all rounds."""
    if cell is None or "reason" in cell:
        return ABSENT
    value = median(cell["seconds"]) * 1e3
    return Shown(digits(value), value=value)


def mebibytes(run: Run | None, benchmark: str, model: str, variant: str) -> Shown:
    """A number of bytes."""
    number = found(run, benchmark, model, variant)
    if isinstance(number, Shown):
        return number
    value = number.value / 2**20
    exact = f"{number.value:,.0f}"
    if 0 < value < _SMALL:
        return Shown(f"{exact} B", value=value)
    return Shown(digits(value), value=value, note=f"{exact} bytes")


def count(run: Run | None, benchmark: str, *params: str) -> Shown:
    """A number as it is, without what is behind the point where nothing is."""
    number = found(run, benchmark, *params)
    if isinstance(number, Shown):
        return number
    return Shown(f"{number.value:,.10g}", value=number.value)


def digits(value: float) -> str:
    """Three digits, and never an exponent for what is large."""
    if not math.isfinite(value):
        return str(value)
    short = float(f"{value:.3g}")
    return f"{short:,.0f}" if abs(short) >= 100 else f"{short:.3g}"
