"""The stack machine that a list of words drives: its values, its layers, the code so far.

Each line is executed on small tensors while it is written. What torch refuses is not written, so
that a word is a template of one line, and every list of words is a program.
"""

from __future__ import annotations

import ast
import functools
import random
import re
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from math import prod
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from optimizer.testing._classes import HELPERS
from optimizer.testing._data import KINDS

MAX_ELEMENTS = 4096
MAX_RANK = 5
# The power to which the input can appear in a value: keeps float64 far from overflow.
MAX_DEGREE = 4

Shape: TypeAlias = tuple[int, ...]
# Where numpy is missing, so are the words that name it.
MODULES = {"torch": torch, "nn": nn, "F": functional, "functools": functools}
MODULES |= {"random": random, "types": types}
with suppress(ImportError):
    MODULES["np"] = import_module("numpy")


@dataclass(frozen=True)
class Value:
    """A tensor of the generated program: the name it is bound to, and its shape.

    `kind` says of an argument how it is drawn: see `inputs_like`.
    """

    name: str
    shape: Shape
    degree: int = 1
    kind: str = "value"


class Machine:
    """Mutable state of one assembly. Words read `top` and `write`."""

    def __init__(self, shape: Shape, *, autocast: bool = False) -> None:
        self.shape = shape
        self.model = nn.Module().eval()
        self.scope: dict[str, Any] = MODULES | {"self": self.model}
        self.arguments: list[Value] = []
        self.defaults: list[str] = []
        self.layers: list[str] = []
        self.members: list[str] = []
        self.finishing: list[str] = []
        self.statements: list[str] = []
        self.outputs: list[Value] = []
        self.returned = "({})"
        self.decorator = self.optional = ""
        self.autocast = autocast
        self.stack = [self.argument()]
        self.history = [self.top]

    @property
    def top(self) -> Value:
        return self.stack[-1]

    def below(self) -> Value:
        """The value under the top if it has the top's shape, else the top itself."""
        under = self.stack[-2:][0]
        return under if under.shape == self.top.shape else self.top

    def argument(self, kind: str = "value") -> Value:
        """A further argument of forward, shaped like the first."""
        value = Value(f"x{len(self.arguments) or ''}", self.shape, kind=kind)
        self.arguments.append(value)
        numbers = torch.arange(prod(self.shape), dtype=torch.float64).reshape(self.shape)
        self.scope[value.name] = KINDS[kind](numbers % 5 - 2)
        return value

    def default(self, value: str) -> str:
        """The name of a further argument of forward, which is not given and has a default."""
        name = f"option{len(self.defaults)}"
        self.defaults.insert(0, f"{name}={value}")  # what is starred stays the last
        self.scope[name] = ast.literal_eval(value)
        return name

    def write(
        self, text: str, *, members: str = "", finishing: str = "", product: bool = False
    ) -> bool:
        """Add statements, of which the last becomes the top if it is an expression.

        Args:
            text: a template (see `_fields`) of statements with `;` between them; one that ends
                with `;` leaves the top. A value below that the expression reads leaves the stack.
            members: statements of `__init__` that make `self.{m}`.
            finishing: statements of `__init__` after all members.
            product: whether the degrees of what is read are added.

        Returns:
            Whether torch takes all of it and what comes out is small; else nothing is added.
        """
        fields, second = self._fields(members), self._second(text)
        member = str(fields["m"])
        made, finished, (*lines, result) = (
            [_filled(each.strip(), fields) for each in part.split(";")]
            for part in (members, finishing, text)
        )
        degrees = self.top.degree, (second or self.top).degree
        degree, name = sum(degrees) if product else max(degrees), f"v{len(self.history)}"
        lines += [f"{name} = {result}"] * bool(result)
        if degree > MAX_DEGREE or not self._takes(made, member, [*finished, *lines]):
            return False
        shape = tuple(getattr(self.scope[name], "shape", ())) if result else self.top.shape
        small = 0 < len(shape) <= MAX_RANK and prod(shape) <= MAX_ELEMENTS
        if not small or prod(shape) == 0 < prod(self.shape):
            return False
        if members and isinstance(getattr(self.model, member, None), nn.Module):
            self.layers.append(member)
        self.members += filter(None, made)
        self.finishing += filter(None, finished)
        self.statements += filter(None, lines)
        if result:
            self._push(Value(name, shape, degree), second)
        return True

    def _push(self, value: Value, second: Value | None) -> None:
        if len(self.stack) > 1 and self.stack[-2] is second:
            del self.stack[-2]
        self.stack[-1] = value
        self.history.append(value)

    def _second(self, text: str) -> Value | None:
        """What the expression at the end reads beside the top, by the names of `_fields`."""
        result = text.rpartition(";")[2]
        if "{w}" in result:
            return self.below()
        return self.stack[-2:][0] if "{under}" in result else None

    def _takes(self, members: list[str], name: str, lines: list[str]) -> bool:
        """Whether torch executes it all on the values so far."""
        try:
            for line in filter(None, members):
                self._execute(line)
                self._settle(name)
            for line in filter(None, lines):
                self._execute(line)
        except Exception:  # whatever torch, or a layer, refuses it with
            return False
        return True

    def _settle(self, name: str) -> None:
        """Bring what was just made to the mode and the dtype that the model has when it is done."""
        if isinstance(child := getattr(self.model, name, None), nn.Module):
            child.eval()
        self.model.to(torch.float64)
        for module in self.model.modules():
            module.to(getattr(module, "single", None))

    def _execute(self, line: str) -> None:
        for name in HELPERS.keys() & set(re.findall(r"\w+", line)) - self.scope.keys():
            exec(compiled(HELPERS[name]), self.scope)
        exec(compiled(line), self.scope)

    def _fields(self, members: str) -> dict[str, object]:
        """What a template names.

        Values: `{v}` is the top, `{w}` the value below of the same shape, `{under}` that of any
        shape, `{b}` as `{w}`, to be written to the top; `{n}` is a new name, `{m}` a new member.
        Sizes: `{c}` channels, twice as many are `{wide}`, one more `{more}`, `{last}` features,
        `{d}` dimensions to slide along, `{1..3}` as many numbers, of which the last is another.
        """
        shape, axes = self.top.shape, [*range(len(self.top.shape))]
        channels, made = shape[:2][-1], re.search(r"\b([A-Z]\w+)(?:{d0?}d)?\(", members)
        even = channels % 2 == 0
        below = self.below().name
        return {
            "v": self.top.name,
            "w": below,
            "under": self.stack[-2:][0].name,
            "b": f"{below}.type_as({self.top.name})" if self.autocast else below,
            "n": f"n{len(self.statements)}",
            "m": f"{made[1].lower() if made else 'held'}{len(self.members)}",
            "c": channels,
            "wide": 2 * channels,
            "more": channels + 1,
            "c0": shape[0],
            "last": shape[-1],
            "d": max(1, len(shape) - 2),
            "d0": len(shape) - 1,
            "groups": 2 if even else channels,
            "pairs": 2 if even else 1,
            "paired": channels if even else channels + 1,
            "ones": _listed([1] * (len(shape) - 2)),
            "channels": _listed([channels, *[1] * (len(shape) - 2)]),
            "rest": _listed([*shape[1:]]),
            "after": _listed([*shape[2:]] or [1]),
            "sizes": (1, 1) * max(1, len(shape) - 2),
            "cycle": _listed([*axes[1:], 0]),
            "cycle_negative": _listed([d - len(shape) for d in [*axes[1:], 0]]),
            "cycle_back": _listed([*axes[-1:], *axes[:-1]]),
            "reverse": _listed([-1 - d for d in axes]),
            "same": _listed(axes),
        }


Emit: TypeAlias = Callable[[Machine], object]


def _filled(text: str, fields: dict[str, object]) -> str:
    """A template with what its names stand for; what is no name stays, such as a set."""

    def value(found: re.Match[str]) -> str:
        others, last = found[1], found[2]
        if last is None:
            return str(fields.get(others, found[0]))
        count = int(str(fields["d"])) - 1
        return str((*[int(others)] * count, int(last)))

    return re.sub(r"{(\w+)(?:\.\.(\d+))?}", value, text)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


@lru_cache(4096)
def compiled(text: str, filename: str = "<line>") -> CodeType:
    """The code of a line, which programs have many in common of, or of a program."""
    return compile(text, filename, "exec")


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


def returned(text: str, members: str = "") -> Emit:
    """Return the newest name that `text` assigns, beside what is made of the top."""

    def emit(machine: Machine) -> None:
        name = f"n{len(machine.statements)}"
        if machine.write(text, members=members):
            shape = tuple(machine.scope[name].shape)
            machine.outputs.append(Value(name, shape))

    return emit


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
