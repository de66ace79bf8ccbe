"""Hypothesis strategies for generated models. Drawing touches no tensor: a `Spec` is words."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from hypothesis import strategies as st

from optimizer.testing._assemble import Entry, Spec
from optimizer.testing._data import LAYOUTS
from optimizer.testing._machine import Shape
from optimizer.testing._motif import words
from optimizer.testing._tokens import TOKENS
from optimizer.testing.motifs import MOTIFS

# Equal sizes turn crashes into silent errors, distinct ones show wrong shapes: both are needed.
SHAPES: tuple[Shape, ...] = (
    (2, 3),
    (3, 3),
    (2, 3, 3),
    (4, 4, 4),
    (2, 3, 5),
    (2, 4, 4, 4),
    (3, 3, 3, 3),
    (2, 3, 5, 7),
    (2, 2, 3, 3, 3),
    (1, 4),
    (0, 3),
    (5,),
    (7, 5),
    (2, 1, 3),
    (1, 1, 1, 1),
    (2, 0, 3),
    (0, 4, 3, 3),
)

# NaNs and infinities hide what else is wrong with a model: they are asked for by name.
FINITE = ("dyadic", "random", "ill")
# All but what expands one row, which nothing may write to.
WRITABLE = tuple(layout for layout in LAYOUTS if layout != "expanded")


def models(
    *,
    alphabet: Iterable[str] | None = None,
    focus: str | None = None,
    shapes: Iterable[Shape] = SHAPES,
    regimes: Iterable[str] = FINITE,
    layouts: Iterable[str] = WRITABLE,
    entries: Iterable[Entry] = ("module", "graph"),
    max_size: int = 12,
) -> st.SearchStrategy[Spec]:
    """Generated models, as `Spec`s: build the module in the body of the test.

    Args:
        alphabet: programs, each a token or several separated by spaces, that the model is made
            of; all tokens and the motifs of every pass by default.
        focus: name of a pass whose motifs and near misses are to make up two thirds of the choices.
        shapes: of the input; with a `focus`, by default also that of its motif, and that often.
        regimes: of the data; those that are finite by default.
        layouts: of the inputs; those that may be written to by default.
        entries: "module", "graph" or both: see `Spec`.
        max_size: the largest number of choices from the alphabet.

    Raises:
        KeyError: a word is no token, or no motif is known for `focus`.
        ValueError: one of them is empty.
    """
    choices = _alphabet(focus) if alphabet is None else list(alphabet)
    if focus is not None and shapes is SHAPES:  # a third of them: its own
        shapes = [*SHAPES, *[MOTIFS[focus].shape] * (len(SHAPES) // 2)]
    others = [[*each] for each in (shapes, regimes, layouts, entries)]
    if not all([choices, *others]):
        raise ValueError("each of what is chosen from must name at least one choice.")
    for program in choices:
        words(program)
    shape, regime, layout, entry = map(st.sampled_from, others)
    programs = st.lists(st.sampled_from(choices), min_size=1, max_size=max_size)
    tokens = programs.map(lambda drawn: words(" ".join(drawn)))
    return _novel(st.builds(Spec, tokens, shape, regime, st.integers(0, 7), layout, entry))


def _novel(specs: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    """The same, each example drawn anew.

    Else five of six are a copy of the one before with one choice in the place of another, be it
    a word in that of a shape: of 336 words, 500 models had 275, and 142 models the first shape.
    Hypothesis leaves alone what stands in a list of distinct elements.
    """
    return st.lists(specs, min_size=1, max_size=1, unique=True).map(itemgetter(0))


def modules(**choices: Any) -> st.SearchStrategy[Spec]:
    """As `models`, each an nn.Module with a readable forward."""
    return models(**choices, entries=["module"])


def graphs(**choices: Any) -> st.SearchStrategy[Spec]:
    """As `models`, each a GraphModule that was built node by node."""
    return models(**choices, entries=["graph"])


def _alphabet(focus: str | None) -> list[str]:
    """Tokens, what is planted, and what is interrupted; repetition is weight.

    Tokens come first, since Hypothesis shrinks to the left.
    """
    tokens = list(TOKENS)
    if focus is None:
        every = [p for motif in MOTIFS.values() for p in (*motif.fires, *motif.near)]
        return tokens + every
    motif = MOTIFS[focus]
    thirds = [*motif.fires, *motif.near], list(motif.interrupted())
    return tokens + [p for third in thirds for p in third * max(1, len(tokens) // len(third))]
