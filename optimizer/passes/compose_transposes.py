"""permute(permute(x, p), q) -> permute(x, p o q), or x where that is the identity."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from optimizer.core.node import arg, callee
from optimizer.core.ops import LAYOUTS
from optimizer.facts.facts import rank
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import insert_function
from optimizer.rewrite.pattern import call


@rewrite(call(*LAYOUTS, name="outer"), numerics="exact", phase="simplify")
def compose_transposes(outer: fx.Node) -> fx.Node | None:
    """Compose a run of transposes and permutes into one, or into none if they cancel.

    Axis i of a permute is axis order[i] of its input, so axis i of the outer one is axis
    inner[outer[i]] of the source. All of them are views of one storage: whatever writes one
    is seen through the others, and replacing one view by an equal one changes nothing.
    """
    inner = arg(outer, 0)
    if _swap(outer) is not None and callee(inner) in LAYOUTS and _swap(inner) == _swap(outer):
        return _source(inner)
    if callee(inner) not in LAYOUTS:
        return _without_identity(outer)
    require(_has_constant_axes(inner) and _has_constant_axes(outer), "its axes are computed")
    dimensions = _dimensions(inner, outer)
    order = _permuted(outer, _permuted(inner, tuple(range(dimensions))))
    if order == tuple(sorted(order)):
        return _source(inner)
    return insert_function(outer, torch.permute, (_source(inner), order))


def _permuted(node: fx.Node, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Axes in the order in which a layout change puts them: those of a tensor of such sizes."""
    change: Any = node.target
    return tuple(change(torch.empty(axes, device="meta"), *node.args[1:]).shape)


def _swap(node: fx.Node) -> frozenset[int] | None:
    """The two axes of a transpose as they were written: equal ones cancel at any rank."""
    return frozenset((arg(node, 1), arg(node, 2))) if node.target is torch.transpose else None


def _without_identity(node: fx.Node) -> fx.Node | None:
    swap = _swap(node)
    if swap is not None:
        return _source(node) if len(swap) == 1 else None
    if node.target is not torch.permute or not _has_constant_axes(node):
        return None
    identity = tuple(range(len(arg(node, 1))))
    return _source(node) if _permuted(node, identity) == identity else None


def _has_constant_axes(node: fx.Node) -> bool:
    return node.all_input_nodes == [arg(node, 0)]


def _dimensions(inner: fx.Node, outer: fx.Node) -> int:
    """The rank, from a permute's own list of axes where there is one."""
    for node in (inner, outer):
        if node.target is torch.permute:
            return len(arg(node, 1))
    return rank(outer)


def _source(node: fx.Node) -> fx.Node:
    source: fx.Node = arg(node, 0)
    return source


class _TransposeTwice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.transpose(1, 2).transpose(1, 2))


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _TransposeTwice().eval(), (torch.randn(2, 3, width),)
