"""Transposes meet, and become one or none."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.errors import Refused, require
from optimizer.core.node import arg, callee, name_of_call
from optimizer.core.ops import LAYOUTS
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


@rewrite(call(*LAYOUTS, name="outer"), numerics="exact", phase="simplify")
def compose_transposes(outer: fx.Node) -> fx.Node | None:
    """Compose a run of transposes and permutes into one, or into none if they cancel.

    permute(permute(x, p), q) -> permute(x, p o q), or x where that is the identity.

    Axis i of a permute is axis order[i] of its input, so axis i of the outer one is axis
    inner[outer[i]] of the source. All of them are views of one storage: whatever writes one
    is seen through the others, and replacing one view by an equal one changes nothing.
    """
    inner: fx.Node = arg(outer, 0)
    run = [inner, outer] if callee(inner) in LAYOUTS else [outer]
    source = run[0].all_input_nodes[0]
    if _is_swapped_back(run):
        return source
    written = [len(arg(each, 1)) for each in run if each.target is torch.permute]
    constant = all(map(_has_constant_axes, run))
    if len(run) == 1 and not (written and constant):
        return None
    require(constant, "its axes are computed")
    axes = tuple(range(written[0] if written else rank(outer)))
    order = reduce(_permuted, run, axes)
    if order == axes:
        return source
    return insert_function(outer, torch.permute, (source, order)) if len(run) > 1 else None


def _is_swapped_back(run: list[fx.Node]) -> bool:
    """Return whether transposes cancel as they are written, and so at any rank."""
    swaps = [{arg(each, 1), arg(each, 2)} for each in run if each.target is torch.transpose]
    if len(swaps) < len(run):
        return False
    return swaps[0] == swaps[1] if len(run) == 2 else len(swaps[0]) == 1


def _permuted(axes: tuple[int, ...], layout: fx.Node) -> tuple[int, ...]:
    """Return axes in the order in which a layout change puts them, read off a shape of them."""
    change: Any = layout.target
    return tuple(change(torch.empty(axes, device="meta"), *layout.args[1:]).shape)


def _has_constant_axes(node: fx.Node) -> bool:
    return node.all_input_nodes == [arg(node, 0)]


@rewrite(call(*LAYOUTS, name="outer"), numerics="exact", phase="simplify")
def sink_transposes(outer: fx.Node) -> fx.Node | None:
    """Move transposes behind elementwise operations where another one waits, to be composed.

    permute(f(permute(x, p)), q) -> permute(permute(f(x), p), q), where f is elementwise.

    An elementwise operation computes each number from the numbers at the same place, so it
    commutes with a permutation of the places, if all tensors that it reads are permuted alike
    and none is broadcast. It makes a new tensor in the memory order of what it reads, which is
    one if no element is repeated: the same numbers are computed in the same order. Nobody else
    may see the values between, which are no longer computed. An operand with other readers stays
    permuted for them, so there is never one transpose more than before, and one less once the two
    are composed.
    """
    between, inners = _sandwich(outer)
    if not between or not all(map(_has_constant_axes, (outer, *inners))):
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
        if callee(node) in LAYOUTS:
            inners.add(node)
        elif callee(node) not in ELEMENTWISE or not is_pure(node):
            return [], []
        elif node not in between:
            between.add(node)
            pending += node.all_input_nodes
    return sorted(between), sorted(inners)
