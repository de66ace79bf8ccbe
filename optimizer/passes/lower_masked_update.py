"""y[mask] = f(v[mask]) -> where(mask, f(v), y), written to where y lies, for an elementwise f."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from optimizer.core.ops import iadd, imul, isub, itruediv, where_into
from optimizer.facts.facts import dtype, is_private, is_unchanged, on_one_device, rank, shares
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import erase_run, insert_function, replace_later_uses
from optimizer.rewrite.pattern import call

_ELEMENTWISE: dict[Any, Callable[..., Any]] = {
    operator.add: operator.add, operator.sub: operator.sub, operator.mul: operator.mul,
    operator.truediv: operator.truediv, iadd: operator.add, isub: operator.sub,
    imul: operator.mul, itruediv: operator.truediv,
}  # fmt: skip


@rewrite(call(operator.setitem, name="assignment"), numerics="exact", phase="simplify")
def lower_masked_update(assignment: fx.Node) -> fx.Node | None:
    """Compute under a boolean mask without gathering and scattering what it chooses.

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
    require(is_private(target, assignment), "an input, an attribute or a view would see the write")
    require(source is target or not shares(source, target), "the value overlaps what is written")
    require(on_one_device(assignment.graph), "the tensors may live on different devices")

    whole = source
    for step in steps[1:]:
        whole = insert_function(assignment, _ELEMENTWISE[step.target], (whole, step.args[1]))
    where = insert_function(assignment, where_into, (mask, whole, target), out=target)
    replace_later_uses(target, where, after=assignment)
    erase_run(assignment, steps)
    return where


def _steps(value: Any, mask: Any) -> list[fx.Node]:
    """The calls that make `f(v[mask])`, in order, if nobody else reads them; else none."""
    if not isinstance(value, fx.Node) or len(value.users) != 1 or len(value.args) != 2:
        return []
    inner, other = value.args
    if value.target is operator.getitem:
        return [value] if other is mask else []
    number = isinstance(other, bool | int | float) and value.target in _ELEMENTWISE
    before = _steps(inner, mask) if number else []
    return [*before, value] if before else []


class _Residual(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[x < 0] += 1.0
        return y


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _Residual().eval(), (torch.randn(4, width),)
