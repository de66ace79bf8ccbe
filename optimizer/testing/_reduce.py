"""Making a failing program smaller where Hypothesis stopped: a motif is one choice to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

from optimizer.testing._assemble import Spec
from optimizer.testing._strategies import SHAPES
from optimizer.testing._tokens import FAMILIES

SIMPLEST = {token: next(iter(family)) for family in FAMILIES.values() for token in family}
_PLAIN = Spec(())


def smallest(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    """A failing program that is minimal: nothing simpler that is tried fails.

    What is tried is to leave out any word or two, to replace a word by the simplest of its
    family, to make any of the data that of a plain `Spec`, and a shape that is drawn earlier.

    Args:
        spec: a failing program; it is returned if nothing smaller fails.
        fails: whether a program fails.
    """
    for simpler in _simpler(spec):
        if fails(simpler):
            return smallest(simpler, fails)
    return spec


def _simpler(spec: Spec) -> Iterator[Spec]:
    for tokens in (*_shorter(spec.tokens), *_plainer(spec.tokens)):
        yield replace(spec, tokens=tokens)
    for field in fields(Spec)[1:]:
        plain: dict[str, Any] = {field.name: getattr(_PLAIN, field.name)}
        if getattr(spec, field.name) != plain[field.name]:
            yield replace(spec, **plain)
    if spec.shape in SHAPES:
        yield from (replace(spec, shape=each) for each in SHAPES[1 : SHAPES.index(spec.shape)])


def _shorter(tokens: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Without half of the words, a quarter, ... one; without any two, if they are few."""
    count = -(-len(tokens) // 2)
    while count:
        for start in range(0, len(tokens), count):
            yield (*tokens[:start], *tokens[start + count :])
        count //= 2
    # A transpose often goes only with the one that undoes it.
    for one, other in combinations(range(len(tokens)), 2):
        yield (*tokens[:one], *tokens[one + 1 : other], *tokens[other + 1 :])


def _plainer(tokens: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for index, token in enumerate(tokens):
        if SIMPLEST[token] != token:
            yield (*tokens[:index], SIMPLEST[token], *tokens[index + 1 :])
