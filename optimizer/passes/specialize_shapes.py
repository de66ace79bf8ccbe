"""x.shape[0] // 2 -> 4: what follows from the sizes of the inputs is computed once."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from optimizer.core.node import arg
from optimizer.facts.facts import Refused, number_from_sizes
from optimizer.rewrite.contract import whole_graph

_SIZES = ("size", "dim", "ndimension", "numel", "nelement")
_OF_NUMBERS = ("_operator", "builtins", "math")


@whole_graph(numerics="exact", phase="simplify", opt_in=True)
def specialize_shapes(graph: fx.Graph) -> list[fx.Node]:
    """Replace numbers that follow from the sizes of the inputs by what they are (opt-in).

    A size that is read off a tensor is a literal once the sizes of the inputs are fixed, by a
    check at the start of each call, and so is what Python's arithmetic makes of literals. What
    a tensor says of its device, its strides or its dtype is no size. An assertion of a literal
    that is true asserts nothing.
    """
    literal = {n for n in graph.nodes if _asserts_nothing(n) or (_is_of_sizes(n) and _replaced(n))}
    unread = [
        n for n in graph.nodes if n in literal or (_is_shape(n) and not set(n.users) - literal)
    ]
    for node in reversed(unread):
        graph.erase_node(node)
    return unread


def _asserts_nothing(node: fx.Node) -> bool:
    return node.target is torch._assert and arg(node, 0) is True


def _is_of_sizes(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SIZES
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return bool(arg(node, 1) == "ndim")
    if node.all_input_nodes:
        return node.target is operator.getitem and _is_shape(arg(node, 0))
    return getattr(node.target, "__module__", "") in _OF_NUMBERS


def _is_shape(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_method":
        return node.target == "size"
    if node.target is operator.getitem:
        return isinstance(arg(node, 1), slice) and _is_shape(arg(node, 0))
    return node.target is getattr and bool(arg(node, 1) == "shape")


def _replaced(node: fx.Node) -> bool:
    """Give every reader of a node its value, if that is a number."""
    if any(user.op == "call_method" and arg(user, 0) is node for user in node.users):
        return False
    try:
        number = number_from_sizes(node)
    except Refused:
        return False
    for user in list(node.users):
        given = (user.args, dict(user.kwargs))
        user.args, user.kwargs = fx.node.map_aggregate(
            given, lambda each: number if each is node else each
        )
    return True


class _Flattens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0] * x.size(1)
        torch._assert(rows > 0, "empty")  # type: ignore[no-untyped-call]
        return torch.relu(x.reshape(rows, -1))


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _Flattens().eval(), (torch.randn(2, 3, width),)
