"""Making a failing program smaller where Hypothesis stopped: a motif is one choice to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from optimizer.testing._assemble import Spec
from optimizer.testing._tokens import FAMILIES

SIMPLEST = {token: next(iter(family)) for family in FAMILIES.values() for token in family}


def smallest(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    """The first program for which no token can go, or become its family's simplest, and it fails.

    Args:
        spec: a failing program; it is returned if nothing smaller fails.
        fails: whether a program fails; called at most some (number of tokens) ** 2 times.
    """
    for simpler in _simpler(spec.tokens):
        candidate = replace(spec, tokens=simpler)
        if fails(candidate):
            return smallest(candidate, fails)
    return spec


def _simpler(tokens: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for index in range(len(tokens)):
        yield (*tokens[:index], *tokens[index + 1 :])
    for index, token in enumerate(tokens):
        if SIMPLEST[token] != token:
            yield (*tokens[:index], SIMPLEST[token], *tokens[index + 1 :])
