"""What a pass is: a pattern and a function that replaces what it matches, or says why not.

The function's parameters are the nodes that the pattern names. It returns the node that takes
the place of the pattern's root, or None where there is nothing to do. Every line of its safety
argument is a `require`. It never changes a module in place: modules may be shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch import fx

from optimizer.core.errors import PassError
from optimizer.core.node import arg, callee

Target: TypeAlias = Callable[..., Any] | str  # a function, the class of a module, or a method
Captured: TypeAlias = dict[str, fx.Node]
Numerics: TypeAlias = Literal["exact", "rounding"]
Phase: TypeAlias = Literal["simplify", "fold", "fuse", "memory"]

PHASES: tuple[Phase, ...] = ("simplify", "fold", "fuse", "memory")
LOWERED = 2  # the level from which on calls are lowered to kernels of their device
REDUCED = 3  # the level at which they are computed in a lower precision


@dataclass(frozen=True)
class Pattern:
    """A call of one of `targets`, whose leading arguments match the patterns in `args`.

    No targets at all stand for every call.
    """

    targets: frozenset[Target]
    args: tuple[Pattern, ...]
    name: str

    def match(self, node: object) -> Captured | None:
        """Return the nodes that the pattern names, or None where it does not match."""
        if not isinstance(node, fx.Node) or not node.op.startswith("call"):
            return None
        if self.targets and callee(node) not in self.targets:
            return None
        captured = {self.name: node}
        for index, pattern in enumerate(self.args):
            inner = pattern.match(arg(node, index))
            if inner is None:
                return None
            captured |= inner
        return captured


def call(*targets: Target, args: tuple[Pattern, ...] = (), name: str) -> Pattern:
    """Return a pattern that matches a call of any of `targets`, or any call where there are none.

    A module class matches calls of plain modules of exactly that class: a subclass may
    compute something else, and so may a hook.
    """
    return Pattern(frozenset(targets), args, name)


@dataclass(frozen=True, repr=False)
class Pass:
    """One rewrite."""

    name: str
    pattern: Pattern | None  # what it matches; None for a pass over the whole graph
    apply: Callable[..., Any]  # the function that was decorated
    numerics: Numerics  # `exact` yields the same bits, `rounding` the same but for rounding
    phase: Phase  # they run in order, each until nothing changes

    def __repr__(self) -> str:
        return self.name


def rewrite(
    pattern: Pattern | None, *, numerics: Numerics, phase: Phase
) -> Callable[[Callable[..., Any]], Pass]:
    """Make a pass of a function that replaces one match of `pattern`.

    Raises:
        PassError: there is no such numerics or phase, or no safety argument.
    """

    def declared(function: Callable[..., Any]) -> Pass:
        name = function.__name__
        if not function.__doc__:
            raise PassError(f"pass {name} has no docstring: state its safety argument.")
        for option, choices in ((numerics, get_args(Numerics)), (phase, PHASES)):
            if option not in choices:
                raise PassError(f"pass {name}: {option!r} does not exist: use one of {choices}.")
        return Pass(name, pattern, function, numerics, phase)

    return declared


def whole_graph(
    *, numerics: Numerics, phase: Phase
) -> Callable[[Callable[[fx.Graph], list[fx.Node]]], Pass]:
    """Make a pass of a function that edits a graph and returns the nodes it removed."""
    return rewrite(None, numerics=numerics, phase=phase)
