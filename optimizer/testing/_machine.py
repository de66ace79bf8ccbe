"""The stack machine that a list of tokens drives: its values, its layers, the code so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

MAX_ELEMENTS = 4096
MAX_RANK = 5
# The power to which the input can appear in a value: keeps float64 far from overflow.
MAX_DEGREE = 4

# How a layer is called: `{m}` is its name, `{v}` the top.
MODULE = "self.{m}({v})"
KEYWORD = "self.{m}(input={v})"

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """A tensor of the generated program: the name it is bound to, and its shape.

    `kind` says of an argument how it is drawn: see `inputs_like`.
    """

    name: str
    shape: Shape
    degree: int = 1
    kind: str = "value"


@dataclass(frozen=True)
class Layer:
    """A submodule that a later token can call again, tie or hook.

    `result` gives the shape that comes out for the shape that goes in, None where it cannot go.
    """

    name: str
    result: Callable[[Shape], Shape | None]
    weight: tuple[str, Shape] | None = None


class Machine:
    """Mutable state of one assembly. Tokens read `top` and call the verbs below."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.arguments = [Value("x", shape)]
        self.defaults: list[str] = []
        self.stack = [self.arguments[0]]
        self.history = [self.arguments[0]]
        self.layers: list[Layer] = []
        self.members: list[str] = []
        self.finishing: list[str] = []
        self.statements: list[str] = []
        self.outputs: list[Value] = []
        self.helpers: set[str] = set()
        self.returned = "({})"
        self.autocast = False

    @property
    def top(self) -> Value:
        return self.stack[-1]

    def below(self) -> Value:
        """The value under the top if it has the top's shape, else the top itself."""
        if len(self.stack) > 1 and self.stack[-2].shape == self.top.shape:
            return self.stack[-2]
        return self.top

    def replace(self, expression: str, shape: Shape | None = None, degree: int = 0) -> None:
        """Bind `expression`, in which `{v}` is the top, to a new name that becomes the top."""
        value = self.top
        new = Value(
            f"v{len(self.history)}",
            value.shape if shape is None else shape,
            degree or value.degree,
        )
        self.statements.append(f"{new.name} = {expression.format(v=value.name)}")
        self.history.append(new)
        self.stack[-1] = new

    def combine(
        self, expression: str, other: Value, degree: int, shape: Shape | None = None
    ) -> None:
        """Bind `expression` of the top `{v}` and `{w}`; `other` leaves the stack if it is below."""
        if degree > MAX_DEGREE:
            return
        if len(self.stack) > 1 and self.stack[-2] is other:
            del self.stack[-2]
        self.replace(expression.replace("{w}", other.name), shape, degree)

    def argument(self, kind: str = "value") -> Value:
        """A further argument of forward, shaped like the first."""
        value = Value(f"x{len(self.arguments)}", self.shape, kind=kind)
        self.arguments.append(value)
        return value

    def default(self, value: str) -> str:
        """The name of a further argument of forward, which is not given and has a default."""
        name = f"option{len(self.defaults)}"
        self.defaults.insert(0, f"{name}={value}")  # what is starred stays the last
        return name

    def do(self, statement: str) -> None:
        """Execute `statement`, in which `{v}` is the top, for its effect."""
        self.statements.append(statement.format(v=self.top.name))

    def add(
        self,
        kind: str,
        constructor: str,
        result: Callable[[Shape], Shape | None],
        weight: tuple[str, Shape] | None = None,
    ) -> Layer:
        """Register `self.<kind><n> = constructor` and return it as the newest layer."""
        layer = Layer(f"{kind}{len(self.members)}", result, weight)
        self.members.append(f"self.{layer.name} = {constructor}")
        self.layers.append(layer)
        return layer

    def call(self, layer: Layer, spelling: str = MODULE) -> None:
        """Call `layer` on the top as `spelling`."""
        shape = layer.result(self.top.shape)
        if shape is not None and fits(shape):
            self.replace(spelling.replace("{m}", layer.name), shape)


Emit: TypeAlias = Callable[[Machine], None]


def ranked(minimum: int, emit: Emit) -> Emit:
    """`emit` where the top has at least so many dimensions; nothing elsewhere."""

    def guarded(machine: Machine) -> None:
        if len(machine.top.shape) >= minimum:
            emit(machine)

    return guarded


def fits(shape: Shape) -> bool:
    """Whether a value of this shape is small enough for a fast example."""
    return len(shape) <= MAX_RANK and prod(shape) <= MAX_ELEMENTS
