"""Making a failing program smaller where Hypothesis stopped: a motif is one choice to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from optimizer.testing._assemble import Spec
from optimizer.testing._tokens import FAMILIES

SIMPLEST = {token: next(iter(family)) for family in FAMILIES.values() for token in family}


def smallest(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    """A program that fails no more if tokens go, or become the simplest of their family.

    Args:
        spec: a failing program; it is returned if nothing smaller fails.
        fails: whether a program fails; called at most about 3 * (number of tokens) ** 2 times.
    """
    for simpler in _simpler(spec.tokens):
        candidate = replace(spec, tokens=simpler)
        if fails(candidate):
            return smallest(candidate, fails)
    return spec


def _simpler(tokens: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    # Two at a time as well: a transpose often goes only with the one that undoes it.
    for count in (2, 1):
        for index in range(len(tokens) - count + 1):
            yield (*tokens[:index], *tokens[index + count :])
    for index, token in enumerate(tokens):
        if SIMPLEST[token] != token:
            yield (*tokens[:index], SIMPLEST[token], *tokens[index + 1 :])
