"""permute(permute(x, p), q) -> permute(x, p o q), or x where that is the identity."""

from __future__ import annotations

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
    outer_order, inner_order = order_of(outer, dimensions), order_of(inner, dimensions)
    order = [inner_order[axis] for axis in outer_order]
    if order == sorted(order):
        return _source(inner)
    return insert_function(outer, torch.permute, (_source(inner), tuple(order)))


def order_of(node: fx.Node, dimensions: int) -> list[int]:
    """Which axis of its input each axis of a layout change is."""
    if node.target is torch.permute:
        return [axis % dimensions for axis in arg(node, 1)]
    if node.target is torch.t:
        return list(reversed(range(dimensions)))
    order = list(range(dimensions))
    if node.target is torch.transpose:
        first, second = arg(node, 1), arg(node, 2)
        order[first], order[second] = order[second], order[first]
        return order
    return _moved(order, _axes(arg(node, 1), dimensions), _axes(arg(node, 2), dimensions))


def _axes(axes: int | tuple[int, ...], dimensions: int) -> list[int]:
    return [axis % dimensions for axis in ((axes,) if isinstance(axes, int) else axes)]


def _moved(order: list[int], source: list[int], destination: list[int]) -> list[int]:
    rest = iter([axis for axis in order if axis not in source])
    placed = dict(zip(destination, source, strict=True))
    return [placed[axis] if axis in placed else next(rest) for axis in order]


def _swap(node: fx.Node) -> frozenset[int] | None:
    """The two axes of a transpose as they were written: equal ones cancel at any rank."""
    return frozenset((arg(node, 1), arg(node, 2))) if node.target is torch.transpose else None


def _without_identity(node: fx.Node) -> fx.Node | None:
    swap = _swap(node)
    if swap is not None:
        return _source(node) if len(swap) == 1 else None
    if node.target is not torch.permute or not _has_constant_axes(node):
        return None
    order = order_of(node, len(arg(node, 1)))
    return _source(node) if order == sorted(order) else None


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
