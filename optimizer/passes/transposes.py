"""Transposes meet, and become one or none."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.errors import Refused, require
from optimizer.core.node import arg, callee, name_of_call
from optimizer.core.ops import PERMUTATIONS
from optimizer.facts.facts import aliases, is_pure, rank, tensor
from optimizer.rewrite.contract import call, rewrite
from optimizer.rewrite.edit import insert_copy, insert_function

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


@rewrite(call(*PERMUTATIONS, name="outer"), numerics="exact", phase="simplify")
def compose_transposes(outer: fx.Node) -> fx.Node | None:
    """Compose a run of transposes and permutes into one, or into none if they cancel.

    permute(permute(x, p), q) -> permute(x, p o q), or x where that is the identity.

    Axis i of a permute is axis order[i] of its input, so axis i of the outer one is axis
    inner[outer[i]] of the source. All of them are views of one storage: whatever writes one
    is seen through the others, and replacing one view by an equal one changes nothing.
    """
    inner: fx.Node = arg(outer, 0)
    if _swap(outer) is not None and callee(inner) in PERMUTATIONS and _swap(inner) == _swap(outer):
        return inner.all_input_nodes[0]
    if callee(inner) not in PERMUTATIONS:
        return _without_identity(outer)
    require(_has_constant_axes(inner) and _has_constant_axes(outer), "its axes are computed")
    written = [len(arg(n, 1)) for n in (inner, outer) if n.target is torch.permute]
    dimensions = written[0] if written else rank(outer)
    order = _permuted(outer, _permuted(inner, tuple(range(dimensions))))
    if order == tuple(sorted(order)):
        return inner.all_input_nodes[0]
    return insert_function(outer, torch.permute, (inner.all_input_nodes[0], order))


def _permuted(node: fx.Node, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return axes in the order in which a layout change puts them, read off a shape of them."""
    change: Any = node.target
    return tuple(change(torch.empty(axes, device="meta"), *node.args[1:]).shape)


def _swap(node: fx.Node) -> frozenset[int] | None:
    """Return the two axes of a transpose as written: equal ones cancel at any rank."""
    return frozenset((arg(node, 1), arg(node, 2))) if node.target is torch.transpose else None


def _without_identity(node: fx.Node) -> fx.Node | None:
    swap = _swap(node)
    if swap is not None:
        return node.all_input_nodes[0] if len(swap) == 1 else None
    if node.target is not torch.permute or not _has_constant_axes(node):
        return None
    identity = tuple(range(len(arg(node, 1))))
    return node.all_input_nodes[0] if _permuted(node, identity) == identity else None


def _has_constant_axes(node: fx.Node) -> bool:
    return node.all_input_nodes == [arg(node, 0)]


@rewrite(call(*PERMUTATIONS, name="outer"), numerics="exact", phase="simplify")
def sink_transposes(outer: fx.Node) -> fx.Node | None:
    """Move transposes behind elementwise operations where another one waits, to be composed.

    permute(f(permute(x, p)), q) -> permute(permute(f(x), p), q), where f is elementwise.

    An elementwise operation computes each number from the numbers at the same place, so it
    commutes with a permutation of the places, if all tensors that it reads are permuted alike
    and none is broadcast. It makes a new tensor in the memory order of what it reads, which is
    one if no element is repeated: the same numbers are computed in the same order. The values
    between are no longer computed, so nothing else may see them. An operand with other readers
    stays permuted for them: there is never one transpose more, and one less once two are composed.
    """
    between, inners = _sandwich(outer)
    if not between or not all(map(_has_constant_axes, (outer, *inners))):
        return None
    if any(callee(arg(node, 0)) in PERMUTATIONS for node in inners):
        return None  # first compose the two: a chain then halves at each sweep
    readers = {user for node in between for user in node.users}
    require(readers <= {outer, *between}, "a value between the transposes is read elsewhere")
    inner = inners[0]
    alike = all((n.target, n.args[1:]) == (inner.target, inner.args[1:]) for n in inners)
    require(alike, "the operands are transposed differently")
    shapes = {tensor(node).shape for node in inners if rank(node)}
    require(len(shapes) == 1, "the operands differ in shape")
    views = {name_of_call(view) for node in inners for view in aliases(node)}
    require(REPEATING.isdisjoint(views), "what is transposed may be repeated in memory")
    source = {each: arg(each, 0) for each in inners}
    for node in between:
        source[node] = insert_copy(node, node, source.__getitem__)
    moved = insert_copy(outer, inner, lambda _: source[between[-1]])
    if tensor(moved).stride() != tensor(between[-1]).stride():
        for node in (moved, *(source[each] for each in reversed(between))):
            outer.graph.erase_node(node)
        raise Refused("the result would be laid out differently in memory")
    return insert_copy(outer, outer, lambda _: moved)


def _sandwich(outer: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the elementwise operations before a transpose, and the transposes before those."""
    between, inners = set[fx.Node](), set[fx.Node]()
    pending = [arg(outer, 0)]
    while pending:
        node = pending.pop()
        if callee(node) in PERMUTATIONS:
            inners.add(node)
        elif callee(node) not in ELEMENTWISE or not is_pure(node):
            return [], []
        elif node not in between:
            between.add(node)
            pending += node.all_input_nodes
    return sorted(between), sorted(inners)
