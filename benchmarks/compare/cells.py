"""What is measured of both versions: one benchmark with one choice of its parameters."""

from __future__ import annotations

import importlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from asv import runner
from asv.benchmarks import Benchmarks

from .trees import ComparisonError, Tree, last_line


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
        name: the benchmark and its parameters, such as `cpu.Latency.time_forward(resnet18, eager)`.
        less_is_better: whether a smaller number is the better one.
        unit: of the numbers.
        index: which of the choices of its parameters; None where it has none.
        benchmark: as asv found it.
    """

    name: str
    less_is_better: bool
    unit: str
    index: int | None
    benchmark: dict[str, Any] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Observed:
    """What one process found: a number, and whether it is the same in every process."""

    value: float
    exact: bool


class NotObservedError(Exception):
    """There is no number. The message says why.

    Attributes:
        failed: whether the benchmark failed; else it is not for this version or machine.
    """

    def __init__(self, reason: str, *, failed: bool) -> None:
        super().__init__(reason)
        self.failed = failed


def cells(conf: Any, tree: Tree, selected: Sequence[str]) -> list[Cell]:
    """The cells whose names match any of the regular expressions.

    Raises:
        ComparisonError: there are none.
    """
    environments, commits = [tree.environment], [tree.commit]
    found = Benchmarks.discover(conf, tree.repository, environments, commits)
    for benchmark in found.values():
        benchmark.setdefault("timeout", conf.default_benchmark_timeout)
    listed = [cell for name in sorted(found) for cell in _cells_of(found[name], name)]
    chosen = [cell for cell in listed if any(re.search(each, cell.name) for each in selected)]
    if not chosen:
        raise ComparisonError(
            f"no benchmark matches {' or '.join(map(repr, selected))}: one is {listed[0].name}."
        )
    return chosen


def _cells_of(benchmark: dict[str, Any], name: str) -> list[Cell]:
    told: dict[str, Any] = {"less_is_better": _less_is_better(name), "unit": str(benchmark["unit"])}
    if not benchmark["params"]:
        return [Cell(name, index=None, benchmark=benchmark, **told)]
    choices = itertools.product(*benchmark["params"])
    texts = [", ".join(part.strip("'") for part in choice) for choice in choices]
    return [
        Cell(f"{name}({choice})", index=index, benchmark=benchmark, **told)
        for index, choice in enumerate(texts)
    ]


def _less_is_better(name: str) -> bool:
    """As the benchmark says of itself, which asv does not hand on."""
    module, *path = name.split(".")
    value = importlib.import_module(f"benchmarks.{module}")
    for each in path:
        value = getattr(value, each)
    return bool(getattr(value, "less_is_better", True))


def observe(cell: Cell, tree: Tree, server: Any) -> Observed:
    """Measure a cell in a process of its own.

    Raises:
        NotObservedError: there is no number.
    """
    try:
        folder = tree.cache_for(cell.benchmark, server)
    except ComparisonError as error:
        raise NotObservedError(str(error), failed=True) from error
    chosen = None if cell.index is None else [cell.index]
    found = runner.run_benchmark(cell.benchmark, server, False, selected_idx=chosen, cwd=folder)
    place = cell.index or 0
    samples, value = found.samples[place], found.result[place]
    if samples:
        return Observed(median(samples), exact=False)
    if value is None:
        raise NotObservedError(last_line(found.stderr) or "it failed without a word", failed=True)
    if math.isnan(value):
        raise NotObservedError(last_line(found.stderr) or "n/a", failed=False)
    return Observed(float(value), exact=True)
