"""Item assignment under a boolean mask becomes `where`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from optimizer.core.errors import Refused, require
from optimizer.core.node import arg, callee
from optimizer.core.ops import alike, iadd, imul, isub, itruediv, where_into, where_like
from optimizer.facts.facts import aliases, dtype, facts_of, is_fresh, is_unchanged, rank, tensor
from optimizer.rewrite.contract import call, rewrite
from optimizer.rewrite.edit import erase_run, insert_function, replace_later_uses

_PUTS = ("index_put_", torch.index_put_, torch.ops.aten.index_put_.default)
_ELEMENTWISE: dict[Any, Callable[..., Any]] = {
    operator.add: operator.add, operator.sub: operator.sub, operator.mul: operator.mul,
    operator.truediv: operator.truediv, iadd: operator.add, isub: operator.sub,
    imul: operator.mul, itruediv: operator.truediv,
}  # fmt: skip


@rewrite(
    call(operator.setitem, "masked_fill_", *_PUTS, name="assignment"),
    numerics="exact",
    phase="simplify",
)
def lower_masked_assignment(assignment: fx.Node) -> fx.Node | None:
    """Replace the assignment of a number under a boolean mask by `where_like`.

    y[mask] = number -> y' = where(mask, number, y), for a y that only this graph can see.

    `y[mask] = value` writes into y; where_like is torch.where in y's layout: it makes a new
    tensor with what y holds afterwards, for later readers of y. That is all there is to see if y
    was made here and no view of it that was taken before is read after. A number is cast as the
    assignment casts it; a tensor without dimensions must have y's dtype. The mask has the first
    dimensions of y, or in a masked_fill_ any that broadcast to it.
    """
    operands: list[Any] = [*assignment.args, *dict(sorted(assignment.kwargs.items())).values()]
    target, mask, value, *accumulates = operands  # by name too: the mask is the first
    if isinstance(mask, list | tuple) and len(mask) == 1:
        mask = mask[0]
    if accumulates or not (isinstance(target, fx.Node) and isinstance(mask, fx.Node)):
        return None
    if tensor(mask).dtype != torch.bool:
        return None
    dtype(mask)  # later masks are held to be masks
    number = _number(value, dtype(target))
    source = _unwritten(target, assignment)
    fills = assignment.target == "masked_fill_"
    require(not (fills and source is target), "it is filled in place and saves no copy")
    _require_private(target, assignment)
    missing = 0 if fills else rank(target) - rank(mask)
    if missing:
        mask = insert_function(assignment, operator.getitem, (mask, (..., *[None] * missing)))
    where = insert_function(assignment, where_like, (mask, number, source))
    replace_later_uses(target, where, after=assignment)
    return where


def _require_private(target: fx.Node, assignment: fx.Node) -> None:
    """Refuse unless later readers may read a new tensor instead of a value that is written."""
    # A view that was taken before must not be read after.
    early = [view for view in aliases(target) if view < assignment]
    read = any(assignment < user for view in early for user in view.users)
    require(is_fresh(target) and not read, "an input, an attribute or a view would see the write")
    facts = facts_of(target.graph)
    one_device = facts is not None and len(facts.devices) == 1
    require(one_device, "the tensors may live on different devices")


def _number(value: Any, kind: torch.dtype) -> Any:
    """Return the value as an assignment to this dtype casts it; `where` would promote."""
    if isinstance(value, fx.Node):
        require(rank(value) == 0, "the assigned value may have an element for each True")
        require(dtype(value) == kind, "the assigned value has another dtype")
        return value
    require(isinstance(value, bool | int | float) and not kind.is_complex, "it is no real number")
    mask = torch.ones((), dtype=torch.bool, device="cpu")
    try:
        return torch.zeros((), dtype=kind, device="cpu").masked_fill_(mask, value).item()
    except (RuntimeError, OverflowError) as error:
        raise Refused("the dtype cannot hold the number") from error


def _unwritten(target: fx.Node, assignment: fx.Node) -> fx.Node:
    """Return what `target` is a copy of, if it was copied only to be written; else `target`."""
    source = arg(target, 0)
    alone = len(target.args) == 1 and not target.kwargs  # then a copy in the layout of its source
    copied = alone and callee(target) in ("clone", torch.clone)
    if not (copied and isinstance(source, fx.Node)) or any(u < assignment for u in target.users):
        return target
    same = alike(tensor(source), tensor(target))
    return source if same and is_unchanged(source, target, assignment) else target


@rewrite(call(operator.setitem, name="assignment"), numerics="exact", phase="simplify")
def lower_masked_update(assignment: fx.Node) -> fx.Node | None:
    """Compute under a boolean mask without gathering and scattering what it chooses.

    y[mask] = f(v[mask]) -> where(mask, f(v), y), written to where y lies, for an elementwise f.

    What y holds at a True is f of what v held there when it was read, and neither v nor the
    mask was written since; elsewhere y stays. f takes numbers and nothing else, so it is the
    same wherever it is computed. Eager demands that mask, v and y have one shape where they
    have one rank. A mask of rows stays: its rows may be few, and `where` would read them all.
    y was made here, so no two of its elements are one, and v is y or lies elsewhere. Later
    readers read the result, since fx takes nothing that has `out` for a write.
    """
    target, mask, value = assignment.args
    steps = _steps(value, mask)
    if not (steps and isinstance(target, fx.Node) and isinstance(mask, fx.Node)):
        return None
    source: Any = steps[0].args[0]
    require(dtype(mask) == torch.bool, "it is indexed by numbers")
    require(rank(mask) == rank(target) == rank(source), "a mask of rows touches fewer of them")
    dtypes = {dtype(target), dtype(source), *(dtype(step) for step in steps)}
    require(len(dtypes) == 1, "the value has another dtype")
    unchanged = all(is_unchanged(each, steps[0], assignment) for each in (mask, source))
    require(unchanged, "what the value is chosen from or by is written in between")
    _require_private(target, assignment)
    apart = source is target or target not in aliases(source)
    require(apart, "the value overlaps what is written")
    whole = source
    for step in steps[1:]:
        whole = insert_function(assignment, _ELEMENTWISE[step.target], (whole, step.args[1]))
    where = insert_function(assignment, where_into, (mask, whole, target), out=target)
    replace_later_uses(target, where, after=assignment)
    erase_run(assignment, steps)
    return where


def _steps(value: Any, mask: Any) -> list[fx.Node]:
    """Return the calls that make `f(v[mask])`, in order, if no other node reads them."""
    if not isinstance(value, fx.Node) or len(value.users) != 1 or len(value.args) != 2:
        return []
    inner, second = value.args
    if value.target is operator.getitem:
        return [value] if second is mask else []
    number = isinstance(second, bool | int | float) and value.target in _ELEMENTWISE
    before = _steps(inner, mask) if number else []
    return [*before, value] if before else []
