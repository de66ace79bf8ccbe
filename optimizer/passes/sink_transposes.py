"""permute(f(permute(x, p)), q) -> permute(permute(f(x), p), q), where f is elementwise."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.node import arg, callee
from optimizer.core.ops import LAYOUTS
from optimizer.facts.facts import Refused, aliases, is_pure, rank, tensor
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import insert_copy
from optimizer.rewrite.pattern import call

# Not GELU: on the CPU its kernel, and with it the last bit, depends on the layout.
ELEMENTWISE = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, torch.add, torch.sub,
    torch.mul, torch.div, torch.neg, torch.exp, torch.tanh, torch.sigmoid, F.relu, F.silu,
    F.hardswish, F.leaky_relu, nn.SiLU, nn.Hardswish, nn.LeakyReLU, nn.Sigmoid, nn.Tanh,
    "add", "sub", "mul", "div", "neg", "exp", "tanh", "sigmoid",
}  # fmt: skip
# Views that hold an element more than once, though not where a size is 1.
REPEATING = frozenset(
    ("expand", "expand_as", "broadcast_to", "broadcast_tensors", "as_strided", "unfold")
)


@rewrite(call(*LAYOUTS, name="outer"), numerics="exact", phase="simplify")
def sink_transposes(outer: fx.Node) -> fx.Node | None:
    """Move transposes behind elementwise operations where another one waits, to be composed.

    An elementwise operation computes each number from the numbers at the same place, so it
    commutes with a permutation of the places, if all tensors that it reads are permuted alike
    and none is broadcast. It makes a new tensor in the memory order of what it reads, which is
    one if no element is repeated: the same numbers are computed in the same order. Nobody else
    may see the values between, which are no longer computed. An operand with other readers stays
    permuted for them, so there is never one transpose more than before, and one less once the two
    are composed.
    """
    between, inners = _sandwich(outer)
    if not between or not all(node.all_input_nodes == [arg(node, 0)] for node in (outer, *inners)):
        return None
    if any(callee(arg(node, 0)) in LAYOUTS for node in inners):
        return None  # first compose the two: a chain then halves at each sweep
    readers = {user for node in between for user in node.users}
    require(readers <= {outer, *between}, "a value between the transposes is read elsewhere")
    inner = inners[0]
    alike = all((n.target, n.args[1:]) == (inner.target, inner.args[1:]) for n in inners)
    require(alike, "the operands are transposed differently")
    shapes = {tensor(node).shape for node in inners if rank(node)}
    require(len(shapes) == 1, "the operands differ in shape")
    views = {view for node in inners for view in aliases(node)}
    require(not any(map(_repeats, views)), "what is transposed may be repeated in memory")

    sunk = _without(inners, between)
    moved = insert_copy(outer, inner, lambda _: sunk[-1])
    if tensor(moved).stride() != tensor(between[-1]).stride():
        for node in (moved, *reversed(sunk)):
            outer.graph.erase_node(node)
        raise Refused("the result would be laid out differently in memory")
    return insert_copy(outer, outer, lambda _: moved)


def _sandwich(outer: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The elementwise operations before a transpose and the transposes that they all begin with."""
    between, inners = set[fx.Node](), set[fx.Node]()
    pending = [arg(outer, 0)]
    while pending:
        node = pending.pop()
        if callee(node) in LAYOUTS:
            inners.add(node)
        elif not _is_elementwise(node):
            return [], []
        elif node not in between:
            between.add(node)
            pending += node.all_input_nodes
    return sorted(between), sorted(inners)


def _repeats(view: fx.Node) -> bool:
    called = getattr(view.target, "__name__", view.target)
    return str(called).partition(".")[0] in REPEATING


def _is_elementwise(node: fx.Node) -> bool:
    called = node.target if node.op == "call_method" else callee(node)
    return called in ELEMENTWISE and is_pure(node)


def _without(inners: list[fx.Node], between: list[fx.Node]) -> list[fx.Node]:
    """The operations once more, on what the transposes were given."""
    source = {inner: arg(inner, 0) for inner in inners}
    sunk = []
    for node in between:
        source[node] = insert_copy(node, node, lambda read: source[read])
        sunk.append(source[node])
    return sunk


class _Sandwich(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.transpose(1, 2)).transpose(1, 2)


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _Sandwich().eval(), (torch.randn(2, 3, width),)
