"""y[mask] = value -> y' = where(mask, value, y), for a y that only this graph can see."""

from __future__ import annotations

import math
import operator

import torch
from torch import fx, nn

from optimizer._edit import insert_function, replace_later_uses
from optimizer._facts import (
    Refused,
    aliases,
    dtype,
    fact,
    facts_of,
    is_external,
    on_one_device,
    rank,
    tensor,
)
from optimizer._graph import arg
from optimizer._match import call
from optimizer._pass import require, rewrite


@rewrite(call(operator.setitem, name="assignment"), numerics="exact", phase="simplify")
def lower_masked_assignment(assignment: fx.Node) -> fx.Node | None:
    """Replace the assignment of a number under a boolean mask by torch.where.

    `y[mask] = value` writes into y; where(mask, value, y) makes a new tensor with what y holds
    afterwards. Whoever reads y later reads the new tensor instead. That is all there is to see
    if no other value shares y's storage and y is neither an input nor part of the model. The
    number must mean the same to both: assignment casts it to y's dtype, where promotes.
    """
    target, mask, value = assignment.args
    if not (isinstance(target, fx.Node) and isinstance(mask, fx.Node) and _is_mask(mask)):
        return None
    require(isinstance(value, bool | int | float), "the assigned value is a tensor")
    same_kind = rank(mask) == rank(target) and dtype(mask) == torch.bool  # at later calls too
    same_shape = same_kind and tensor(mask).shape == tensor(target).shape
    require(same_shape, "the mask has another shape")
    require(not is_external(target), "it writes an input or an attribute of the model")
    require(not any(aliases(target)), "another value shares the storage and would see the write")
    require(_fits(value, dtype(target)), "the value would be cast by the assignment")
    require(on_one_device(assignment.graph), "the tensors may live on different devices")

    where = insert_function(assignment, torch.where, (mask, value, _unwritten(target, assignment)))
    same = _geometry(where) == _geometry(target)
    if not same:
        assignment.graph.erase_node(where)
        raise Refused("where would lay the result out differently in memory")
    replace_later_uses(target, where, after=assignment)
    return where


def _is_mask(index: fx.Node) -> bool:
    return tensor(index).dtype == torch.bool


def _fits(value: object, kind: torch.dtype) -> bool:
    """Whether a number can be stored in a dtype as it is, up to the dtype's own rounding."""
    assert isinstance(value, bool | int | float)
    if kind.is_floating_point:
        return not math.isfinite(value) or abs(value) <= torch.finfo(kind).max
    if kind == torch.bool or kind.is_complex or isinstance(value, float):
        return isinstance(value, bool) and kind == torch.bool
    return torch.iinfo(kind).min <= value <= torch.iinfo(kind).max


def _geometry(node: fx.Node) -> tuple[object, ...]:
    value = tensor(node)
    return value.dtype, value.shape, value.stride()


def _unwritten(target: fx.Node, assignment: fx.Node) -> fx.Node:
    """What `target` is a copy of, if it was copied only to be written; else `target`."""
    source = arg(target, 0)
    copied = (target.op, target.target) == ("call_method", "clone") or target.target is torch.clone
    if not (copied and isinstance(source, fx.Node)) or any(u < assignment for u in target.users):
        return target
    facts = facts_of(target.graph)
    # Two inputs may be one tensor in a later call, so that a write of either is one of both.
    if facts is None or (is_external(source) and facts.writes & facts.external):
        return target
    written = not facts.writes.isdisjoint(fact(source).storages)
    return target if written or _geometry(source) != _geometry(target) else source


class _ClipNegative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[x < 0] = 0.0
        return y


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _ClipNegative().eval(), (torch.randn(4, width),)
