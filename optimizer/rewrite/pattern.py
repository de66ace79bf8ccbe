"""Patterns: which calls, on the results of which other calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

from optimizer.core.node import arg, callee

Target: TypeAlias = Callable[..., Any] | str  # a function, the class of a module, or a method
Captured: TypeAlias = dict[str, fx.Node]


@dataclass(frozen=True)
class Pattern:
    """A call of one of `targets`, whose leading arguments match the patterns in `args`.

    No targets at all stand for every call.
    """

    targets: frozenset[Target]
    args: tuple[Pattern, ...]
    name: str

    def match(self, node: object) -> Captured | None:
        """The nodes that the pattern names, or None where it does not match."""
        if not isinstance(node, fx.Node) or not node.op.startswith("call"):
            return None
        if self.targets and called(node) not in self.targets:
            return None
        captured = {self.name: node}
        for index, pattern in enumerate(self.args):
            inner = pattern.match(arg(node, index))
            if inner is None:
                return None
            captured |= inner
        return captured


def called(node: fx.Node) -> Any:
    """What a node calls, as a pattern names it."""
    return node.target if node.op == "call_method" else callee(node)


def call(*targets: Target, args: tuple[Pattern, ...] = (), name: str) -> Pattern:
    """A pattern that matches a call of any of `targets`, or any call where there are none.

    A module class matches calls of plain modules of exactly that class: a subclass may
    compute something else, and so may a hook.
    """
    return Pattern(frozenset(targets), args, name)
