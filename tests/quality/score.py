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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch

from tests.quality import examples as _examples
from tests.quality.examples import Counts, Tried
from tests.quality.mutants import Mutant, concerned, planted, tests_of

BUDGET = 400
OUT_OF_TIME, ENDED = "ran out of time", "its process ended"
_SECONDS = 600  # of the processor: a mistake may make a loop endless


class UnsoundError(Exception):
    """The package without a mistake fails what mistakes are looked for with."""


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


# What each finder made of the package without a mistake.
Sound: TypeAlias = Mapping[str, Tried]
Found = TypeVar("Found")


def try_mutant(
    mutant: Mutant,
    by: Sequence[str] = ("models",),
    budget: int = BUDGET,
    sound: Sound = MappingProxyType({}),
) -> Verdict:
    """Look for a mistake with some of `FINDERS` in turn, until one finds it.

    Args:
        mutant: the mistake.
        by: names of `FINDERS`.
        budget: so many generated models; of motifs and near misses all are tried.
        sound: what `try_sound` says; what is done less often than there is found.
    """
    started = time.process_time()
    for name in by:
        tried = _tried(mutant, name, budget, sound.get(name, Tried()))
        if _fails(tried):
            break
    seconds, count = time.process_time() - started, len(tried.done)
    return Verdict(mutant, name, _fails(tried), count, seconds, tried.failure)


def try_sound(mutant: Mutant, by: Sequence[str], budget: int) -> Sound:
    """What would look for a mistake, on the package without it."""
    sound = replace(mutant, name="the package as it is", new=mutant.old)
    return {name: _tried(sound, name, budget, Tried()) for name in by}


def _fails(tried: Tried) -> bool:
    return tried.failure not in ("", OUT_OF_TIME)


def _tried(mutant: Mutant, by: str, budget: int, sound: Tried) -> Tried:
    torch.set_num_threads(1)
    try:
        with _limited(), Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
            return FINDERS[by](mutant, budget, sound.done)
    except _TooLong:
        return Tried(failure=OUT_OF_TIME)


@contextmanager
def _limited() -> Iterator[None]:
    """Stop after some time of the processor: that of a busy machine is no one's mistake."""

    def stop(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _by_fuzz(examples: str, mutant: Mutant, budget: int, sound: Sequence[Counts]) -> Tried:
    """Plant the mistake and call a function of the copy of `_examples`."""
    try:
        with planted(mutant, _examples.__name__) as fresh:
            found = getattr(fresh, examples)(concerned(mutant), budget, sound)
    except Exception as error:  # it breaks the package
        return Tried(done=[Counter()], failure=_examples.told(error))
    return Tried(done=found.done, failure=found.failure)


def _by_tests(mutant: Mutant, budget: int, sound: Sequence[Counts]) -> Tried:
    """Run the tests that are near to the file."""
    chosen = tests_of(mutant)
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
    return Tried(done=[Counter()], failure="its tests fail" if code else "")


# What may find a mistake: each tells what came of the examples that it tried.
FINDERS: dict[str, Callable[[Mutant, int, Sequence[Counts]], Tried]] = {
    "models": partial(_by_fuzz, "first_failing_model"),
    "motifs": partial(_by_fuzz, "first_failing_motif"),
    "tests": _by_tests,
}


def score(
    mutants: Iterable[Mutant],
    by: Sequence[str] = ("models",),
    budget: int = BUDGET,
    processes: int = 1,
    trusted: Sequence[str] = (),
) -> Iterator[Verdict]:
    """Try mutants, in processes of their own, and yield what becomes of each.

    Those that the first finder finds come first; the next one is asked for the others alone.

    Args:
        mutants: the mistakes.
        by: names of `FINDERS`.
        budget: so many generated models for each.
        processes: so many at a time.
        trusted: the finders that were seen to pass without a mistake just now.

    Raises:
        UnsoundError: the package without a mistake, which each other finder tries first, fails.
    """
    rest = list(mutants)
    with ThreadPoolExecutor(processes) as threads:
        for name in by:
            survive = []
            sound = [{}] * len(rest) if name in trusted else _sound(name, rest, budget, threads)
            for each in threads.map(partial(_try_next_to, name, budget), rest, sound):
                if each.killed or name == by[-1]:
                    yield each
                else:
                    survive.append(each.mutant)
            rest = survive


def _sound(name: str, mutants: Sequence[Mutant], budget: int, pool: Any) -> list[Sound]:
    """What one finder says of the package without a mistake, for each mistake."""
    alike = {_looked_for_with(each, [name]): each for each in mutants}
    ended: Sound = {name: Tried(failure=ENDED)}
    found = pool.map(lambda each: _alone(ended, try_sound, each, [name], budget), alike.values())
    sound = dict(zip(alike, map(_require_sound, alike.values(), found), strict=True))
    return [sound[_looked_for_with(each, [name])] for each in mutants]


def _try_next_to(name: str, budget: int, mutant: Mutant, sound: Sound) -> Verdict:
    ended = Verdict(mutant, name, True, 1, 0.0, ENDED)
    return _alone(ended, try_mutant, mutant, [name], budget, sound)


def _alone(ended: Found, work: Callable[..., Found], *arguments: Any) -> Found:
    """What is found in a process of its own: pytest keeps modules, and a mistake may end it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as own:
        try:
            return own.submit(work, *arguments).result()
        except BrokenProcessPool:
            return ended


def _looked_for_with(mutant: Mutant, by: Sequence[str]) -> tuple[str, ...]:
    """The same for mistakes that are looked for with the same examples and tests."""
    return (*concerned(mutant), *(tests_of(mutant) if "tests" in by else ()))


def _require_sound(mutant: Mutant, sound: Sound) -> Sound:
    for name, tried in sound.items():
        if tried.failure:
            raise UnsoundError(
                f"The package without a mistake fails, so that none can be found: by {name} about"
                f" {', '.join(concerned(mutant))}, at example {len(tried.done)}: {tried.failure}"
            )
    return sound


def table(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """The lines of a Markdown table of all verdicts, and what they come to."""
    yield "| mutant | origin | examples to kill | seconds | why |"
    yield "|---|---|---|---|---|"
    counted = []
    for each in verdicts:
        examples = f"{each.examples} {each.by}" if each.killed else "survives"
        cells = (
            each.mutant.name,
            each.mutant.origin,
            examples,
            f"{each.seconds:.1f}",
            each.evidence,
        )
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
        counted.append(each)
    yield from ("", _summary(counted))


def _summary(verdicts: Sequence[Verdict]) -> str:
    """The kill rates, and the median and the ninth decile of examples to kill."""
    examples = sorted(each.examples for each in verdicts if each.killed)
    real = [each for each in verdicts if "#" in each.mutant.origin]  # of a released project
    told = "none killed"
    if examples:
        ninth = examples[min(len(examples) - 1, round(0.9 * len(examples)))]
        told = f"{statistics.median(examples):g}, {ninth}"
    return (
        f"killed {len(examples)} of {len(verdicts)} ({len(examples) / max(1, len(verdicts)):.1%});"
        f" from real issues {sum(each.killed for each in real)} of {len(real)};"
        f" examples to kill, median and ninth decile: {told}"
    )
