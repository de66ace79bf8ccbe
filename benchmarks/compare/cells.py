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

from asv import runner, util
from asv.benchmarks import Benchmarks

from .trees import ComparisonError, Tree, last_line

# Calls of one process are alike: more of them tell less than more processes.
_SHORT = {"repeat": [4, 30, 0.4]}


@dataclass(frozen=True)
class Cell:
    """One line of the table.

    Attributes:
        name: the benchmark and its parameters, such as `cpu.Latency.time_forward(resnet18, eager)`.
        less_is_better: whether a smaller number is the better one; None where neither is.
        unit: of the numbers.
        index: which of the choices of its parameters; None where it has none.
        params: what is chosen, by the names of the parameters.
        benchmark: as asv found it.
    """

    name: str
    less_is_better: bool | None
    unit: str
    index: int | None
    benchmark: dict[str, Any] = field(compare=False, repr=False)
    params: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_timed(self) -> bool:
        """Whether it is a latency, which takes many rounds, as far as its kind tells."""
        return bool(self.benchmark.get("type") == "time")


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
    """The cells whose names match any of the regular expressions, in the order of these.

    Raises:
        ComparisonError: there are none.
    """
    environments, commits = [tree.environment], [tree.commit]
    found = Benchmarks.discover(conf, tree.repository, environments, commits)
    for benchmark in found.values():
        benchmark.setdefault("timeout", conf.default_benchmark_timeout)
    listed = [cell for name in sorted(found) for cell in _cells_of(found[name], name)]
    chosen = [cell for each in selected for cell in listed if re.search(each, cell.name)]
    if not chosen:
        raise ComparisonError(
            f"no benchmark matches {' or '.join(map(repr, selected))}: one is {listed[0].name}."
        )
    return list(dict.fromkeys(chosen))


def _cells_of(benchmark: dict[str, Any], name: str) -> list[Cell]:
    told: dict[str, Any] = {"less_is_better": _less_is_better(name), "unit": str(benchmark["unit"])}
    if not benchmark["params"]:
        return [Cell(name, index=None, benchmark=benchmark, **told)]
    choices = itertools.product(*benchmark["params"])
    found = [[part.strip("'") for part in choice] for choice in choices]
    names = benchmark["param_names"]
    return [
        Cell(
            f"{name}({', '.join(choice)})",
            index=index,
            benchmark=benchmark,
            params=dict(zip(names, choice, strict=True)),
            **told,
        )
        for index, choice in enumerate(found)
    ]


def _less_is_better(name: str) -> bool | None:
    """As the benchmark says of itself, which asv does not hand on."""
    module, *path = name.split(".")
    value = importlib.import_module(f"benchmarks.{module}")
    for each in path:
        value = getattr(value, each)
    told: bool | None = getattr(value, "less_is_better", True)
    return told


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
    try:
        found = runner.run_benchmark(
            cell.benchmark, server, False, selected_idx=chosen, extra_params=_SHORT, cwd=folder
        )
    except util.UserError as error:
        if str(error) == "Interrupted.":  # what asv makes of Ctrl-C
            raise KeyboardInterrupt from error
        raise NotObservedError(str(error), failed=True) from error  # its server has ended
    place = cell.index or 0
    samples, value = found.samples[place], found.result[place]
    if samples:
        return Observed(median(samples), exact=False)
    if value is None:
        raise NotObservedError(last_line(found.stderr) or "it failed without a word", failed=True)
    if math.isnan(value):
        raise NotObservedError(last_line(found.stderr) or "n/a", failed=False)
    return Observed(float(value), exact=True)
