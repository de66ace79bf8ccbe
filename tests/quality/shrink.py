"""How small a counterexample gets, and how soon: mutants found by the fuzz, shrunk and reduced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from optimizer.testing._assemble import Spec
from optimizer.testing._reduce import SIMPLEST
from optimizer.testing._report import Counterexample
from optimizer.testing._strategies import on_each
from tests.quality.examples import any_of, examine
from tests.quality.mutants import Mutant, catalogue, concerned, planted

MOST_WORDS = 10  # more are not minimal without being tried


@dataclass(frozen=True)
class Shrunk:
    """The smallest program found that shows a mistake, and whether it is minimal.

    Seconds are of the processor, from the first model that failed to the smallest.
    """

    program: str
    minimal: bool
    words_before: int
    seconds: float


def sample(count: int) -> list[Mutant]:
    """At least so many mistakes of passes, spread over the catalogue."""
    mutants = [each for each in catalogue().values() if each.file.startswith("passes/")]
    return mutants[:: max(1, len(mutants) // count)]


def shrink(mutant: Mutant, budget: int) -> Shrunk | None:
    """Find one mistake by generated models alone, and make what is found small.

    Returns:
        None where so many models do not find it.
    """
    torch.set_num_threads(1)
    with planted(mutant, __name__) as fresh:
        found: Shrunk | None = fresh.shrunk(concerned(mutant), budget)
    return None if found is None else Shrunk(**vars(found))


def shrunk(names: Sequence[str], budget: int) -> Shrunk | None:
    """What `shrink` does once the mistake is planted."""
    failed: list[tuple[float, Spec]] = []

    try:

        @on_each(any_of(names), budget, shrink=True)
        def holds(chosen: tuple[str, Spec]) -> None:
            name, spec = chosen
            try:
                examine(spec, name)
            except Counterexample:  # pragma: no cover - in a copy of the package
                failed.append((time.process_time(), spec))
                raise

    except Counterexample as failure:  # pragma: no cover - in a copy of the package
        small = failure.reduced()
        (started, first), seconds = failed[0], time.process_time()
        minimal = is_minimal(small.spec, lambda spec: small.on(spec) is not None)
        took = round(seconds - started, 1)
        return Shrunk(" ".join(small.spec.tokens), minimal, len(first.tokens), took)
    except AssertionError:
        pass
    return None


def is_minimal(spec: Spec, fails: Callable[[Spec], bool]) -> bool:
    """Whether no part of a program fails, nor the program with a word made the simplest."""
    return len(spec.tokens) <= MOST_WORDS and not any(map(fails, _smaller(spec)))


def _smaller(spec: Spec) -> Iterator[Spec]:
    for count in range(len(spec.tokens)):
        for tokens in combinations(spec.tokens, count):
            yield replace(spec, tokens=tokens)
    for index, token in enumerate(spec.tokens):
        if SIMPLEST[token] != token:
            tokens = (*spec.tokens[:index], SIMPLEST[token], *spec.tokens[index + 1 :])
            yield replace(spec, tokens=tokens)


def table(shrunk: Iterable[tuple[Mutant, Shrunk]]) -> Iterator[str]:
    """The lines of a Markdown table, a row for each mistake that was found."""
    yield "| mutant | words | smallest program | minimal | seconds |"
    yield "|---|---|---|---|---|"
    for mutant, each in shrunk:
        minimal = "yes" if each.minimal else "no"
        told = (mutant.name, each.words_before, each.program, minimal, f"{each.seconds:.1f}")
        yield f"| {' | '.join(map(str, told))} |"
