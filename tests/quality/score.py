"""How strong the suite is: which mistakes generated models find, and motifs, and unit tests.

The three are asked one by one, each with a budget of its own: a list that a person wrote speaks
for the mistakes that the person thought of, and generated models for the others.
"""

from __future__ import annotations

import importlib
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.quality import examples as _examples
from tests.quality.mutants import BELOW, Mutant, concerned, planted

BUDGET = 400
_SECONDS = 600  # a mistake may make a loop endless


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: by what and after how many examples it was found, or not.

    The unit tests of a file count as one example. Seconds are of the processor.
    """

    mutant: Mutant
    by: str
    killed: bool
    examples: int
    seconds: float
    evidence: str


class _TooLong(BaseException):
    """Derived so that nothing which forgives an error forgives this."""


def try_mutant(mutant: Mutant, by: Sequence[str] = ("models",), budget: int = BUDGET) -> Verdict:
    """Look for a mistake with some of `FINDERS` in turn, until one finds it.

    Args:
        mutant: the mistake.
        by: names of `FINDERS`.
        budget: so many generated models; of motifs and near misses all are tried.
    """
    torch.set_num_threads(1)
    started, tried, evidence = time.process_time(), 0, ""
    for name in by:
        try:
            with _limited(), Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
                tried, evidence = FINDERS[name](mutant, budget)
        except _TooLong:
            tried, evidence = 1, "it never ends"
        if evidence:
            break
    seconds = time.process_time() - started
    return Verdict(mutant, name, bool(evidence), tried, seconds, evidence)


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _by_fuzz(examples: str, mutant: Mutant, budget: int) -> tuple[int, str]:
    """Plant the mistake and call a function of the copy of `_examples`."""
    try:
        with planted(mutant, _examples.__name__) as fresh:
            found: tuple[int, str] = getattr(fresh, examples)(concerned(mutant), budget)
    except Exception as error:  # it breaks the package
        return 1, _examples.told(error)
    return found


def _by_tests(mutant: Mutant, budget: int) -> tuple[int, str]:
    """Run the tests of a file, and of the passes that it concerns."""
    tests = Path("tests").absolute()  # of the repository; the package may be installed elsewhere
    file = mutant.file.removesuffix(".py")
    own = (BELOW.get(file, Path(file).name), *concerned(mutant))
    chosen = sorted({str(found) for each in own for found in tests.rglob(f"test_{each}*.py")})
    # Hypothesis is in use, which its plugin, where it is loaded now, takes for a mistake.
    options = ["-q", "-x", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    with (
        planted(mutant, "optimizer"),
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
    ):
        code = importlib.import_module("pytest").main([*options, *chosen]) if chosen else 0
    if code > 2:  # 1: a test failed, 2: one could not be imported
        raise RuntimeError(f"pytest could not run {chosen}: {code!r}")
    return 1, "its tests fail" if code else ""


# What may find a mistake: each tells how many examples it tried, and the failure, empty for none.
FINDERS: dict[str, Callable[[Mutant, int], tuple[int, str]]] = {
    "models": partial(_by_fuzz, "first_failing_model"),
    "motifs": partial(_by_fuzz, "first_failing_motif"),
    "tests": _by_tests,
}


def score(
    mutants: Iterable[Mutant],
    by: Sequence[str] = ("models",),
    budget: int = BUDGET,
    processes: int = 1,
) -> Iterator[Verdict]:
    """Try mutants, in processes of their own, and yield what becomes of each."""
    spawn, tasks = get_context("spawn"), 1 if "tests" in by else None  # pytest keeps modules
    with ProcessPoolExecutor(processes, spawn, max_tasks_per_child=tasks) as pool:
        yield from pool.map(partial(try_mutant, by=by, budget=budget), mutants)


def table(verdicts: Iterable[Verdict], equivalent: Mapping[str, str]) -> Iterator[str]:
    """The lines of a Markdown table of all verdicts, and what they come to.

    `equivalent` are those that no one can find, by name, and why.
    """
    yield from (
        "| mutant | origin | examples to kill | seconds | why |",
        "|---|---|---|---|---|",
    )
    counted = []
    for each in verdicts:
        name = each.mutant.name
        told = each.evidence or equivalent.get(name, "")
        examples = f"{each.examples} {each.by}" if each.killed else "survives"
        cells = (name, each.mutant.origin, examples, f"{each.seconds:.1f}", told)
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
        counted += [each] if each.killed or name not in equivalent else []
    yield from ("", summary(counted))


def summary(verdicts: Sequence[Verdict]) -> str:
    """The kill rates, and the median and the ninth decile of examples to kill."""
    examples = [v.examples for v in verdicts if v.killed]
    real = [v for v in verdicts if v.mutant.is_real]
    return (
        f"killed {len(examples)} of {len(verdicts)} ({len(examples) / max(1, len(verdicts)):.1%});"
        f" from real issues {sum(v.killed for v in real)} of {len(real)};"
        f" examples to kill, median and ninth decile: {spread(examples)}"
    )


def spread(examples: Sequence[int]) -> str:
    """The median and the ninth decile of some numbers."""
    counts = sorted(examples)
    ninth = counts[min(len(counts) - 1, round(0.9 * len(counts)))] if counts else 0
    return f"{statistics.median(counts):g}, {ninth}" if counts else "none killed"
