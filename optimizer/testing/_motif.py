"""A motif: the token programs that a pass must rewrite, and the near misses around them.

A near miss is a motif with something at one of its edges that makes the rewrite wrong or partly
wrong: a second reader, an extra output, a second call, a tied weight, a hook. Planting them makes
a bug with several readers show after some 100 examples instead of some 1,400.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from optimizer.core.errors import InputError
from optimizer.testing._tokens import FAMILIES, TOKENS

INTERRUPTIONS = ("dup", "out", "again", "dup swap", "tie", "hook", "relu_method_inplace", "mask")
# Around all of it: what it yields is returned or written, and what it reads lies otherwise.
SURROUNDINGS = ("{}", "{} idouble_statement", "t01 {}")


@dataclass(frozen=True)
class Motif:
    """What to plant for one pass.

    Attributes:
        fires: programs, as words, on which the pass must change something.
        near: further programs that are close to its pattern.
        shape: of the input for `fires`.
    """

    fires: tuple[str, ...]
    near: tuple[str, ...] = ()
    shape: tuple[int, ...] = (2, 4, 4, 4)

    def near_misses(self) -> Iterator[str]:
        """`near`, and what is interrupted."""
        yield from dict.fromkeys((*self.near, *self.interrupted()))

    def interrupted(self) -> Iterator[str]:
        """Every motif with every interruption at every edge, and in all surroundings."""
        for motif in self.fires:
            yield from (around.format(motif) for around in SURROUNDINGS)
            words = motif.split()
            for edge in range(1, len(words)):
                before, after = " ".join(words[:edge]), " ".join(words[edge:])
                yield from (f"{before} {each} {after}" for each in INTERRUPTIONS)
                for start in range(edge):  # what was read before is written
                    earlier, read = " ".join(words[:start]), " ".join(words[start:edge])
                    yield f"{earlier} dup {read} swap idouble_statement swap {after}".strip()


def words(program: str) -> tuple[str, ...]:
    """The tokens of a program.

    Raises:
        InputError: a word is no token; the message names the nearest.
    """
    tokens = tuple(program.split())
    for token in tokens:
        if token not in TOKENS:
            near = ", ".join(get_close_matches(token, TOKENS, n=5))
            few = near or ", ".join(next(iter(family)) for family in FAMILIES.values())
            raise InputError(
                f"there is no word {token!r}: try {few}; optimizer.testing.TOKENS holds all"
                f" {len(TOKENS)}."
            )
    return tokens
