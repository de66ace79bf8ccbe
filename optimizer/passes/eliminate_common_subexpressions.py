"""f(x), f(x) -> one f(x), read twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from optimizer.core.guards import key_of
from optimizer.facts.facts import (
    facts_of,
    is_pure,
    is_read_only,
    is_returned,
    is_unchanged,
    is_written,
)
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.pattern import call


@rewrite(call(name="again"), numerics="exact", phase="simplify")
def eliminate_common_subexpressions(again: fx.Node) -> fx.Node | None:
    """Compute once what is computed twice from the same values.

    The two call the same function, or the same module, with the same arguments: numbers of
    one type with the same bits, since x + 1 and x + 1.0, or x / 0.0 and x / -0.0, differ. It
    does nothing but yield its value and draws no random number, and nothing that it reads is
    written in between. That the results are one tensor is seen only by who writes one of
    them: no node does, and the caller gets at most one.
    """
    first = _twin(again)
    if first is None or not is_pure(again):
        return None
    unchanged = all(is_unchanged(given, first, again) for given in again.all_input_nodes)
    of_constants = again.op != "call_module" or not is_written(again)
    read_only = is_read_only(first) and is_read_only(again)
    require(unchanged and of_constants, "what it reads may be written in between")
    require(read_only, "a result is written, which the other must not see")
    require(not (is_returned(first) and is_returned(again)), "both are returned")

    return first


def _twin(again: fx.Node) -> fx.Node | None:
    """An earlier call of the same on the same, whose result is no list that may be filled."""
    facts = facts_of(again.graph)
    if facts is None or not again.all_input_nodes:
        return None
    if isinstance(again.meta["fact"].value, list | dict):
        return None
    call_of_again = _call(again)
    first = facts.calls.setdefault(call_of_again, again)
    if first is not again and _call(first) == call_of_again and first < again:
        return first
    facts.calls[call_of_again] = again
    return None


def _call(node: fx.Node) -> Any:
    return node.op, node.target, key_of((node.args, node.kwargs))


class _Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 2.0 + x.tanh()


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _Twice().eval(), (torch.randn(4, width),)
