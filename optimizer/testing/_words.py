"""How a word is written: as a template, a layer with its call, or one of these for each rank.

A word is total: where it cannot apply it does nothing or something simpler, so that every list
of words is a program and no example is ever rejected. Parameters are baked into the word, so
that Hypothesis makes one choice per word and can delete it in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

from optimizer.testing._machine import Emit, Machine

CALL = "self.{m}({v})"
KEYWORD = "self.{m}(input={v})"
# The text of what `says` or, if it begins with `nn.`, `layer` writes; or what is done.
Word: TypeAlias = str | Emit


def emit(word: Word) -> Emit:
    """What a word does to the machine."""
    if not isinstance(word, str):
        return word
    return layer(word) if word.startswith("nn.") else says(word)


def says(text: str) -> Emit:
    """Statements with `;` between them, of which the last becomes the top: see `Machine.write`."""
    return lambda machine: machine.write(text)


def product(text: str) -> Emit:
    """The same of what grows as the product of the values that it reads."""
    return lambda machine: machine.write(text, product=True)


def layer(constructor: str, call: str = CALL, *, training: bool = False) -> Emit:
    """A submodule, called on the top as `call` says. None of its sizes is 0."""

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        sizes = {"{c": shape[:2][-1], "{c0": shape[0], "{last": shape[-1], "{rest": prod(shape[1:])}
        if all(size or f"{name}}}" not in constructor for name, size in sizes.items()):
            finishing = "self.{m}.train()" * training
            machine.write(call, members=f"self.{{m}} = {constructor}", finishing=finishing)

    return emit


def by_rank(ranks: Sequence[int], word: Word, other: Word = ";") -> Emit:
    """`word` where the top has as many dimensions as one of `ranks`, else `other`."""
    return lambda machine: emit(word if len(machine.top.shape) in ranks else other)(machine)
