"""x + y -> x.add_(y) and x * y -> x.mul_(y), where nothing else reads x."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from optimizer.core.node import callee
from optimizer.core.ops import add_over, alike, mul_over
from optimizer.facts.facts import fact, is_spare, tensor
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import insert_function
from optimizer.rewrite.pattern import call

OVER: dict[Callable[..., object], Callable[..., object]] = {
    operator.add: add_over, torch.add: add_over, operator.mul: mul_over, torch.mul: mul_over,
}  # fmt: skip
WORTHWHILE = 1 << 17  # bytes: up to half of it, to look at the operands takes what it saves


@rewrite(call(*OVER, name="combination"), numerics="exact", phase="memory")
def reuse_operands(combination: fx.Node) -> fx.Node | None:
    """Write the sum or product of two large tensors over one of them that nobody else reads.

    Element i of the result depends on element i of each, so a kernel may write where it reads,
    and both are commutative, so either operand will do. It has to have the dtype, shape and
    layout of the result. That is so if the other has them too, which each call looks at anew:
    what agrees here may be broadcast, or another dtype under autocast, in a later call.
    """
    operands = _tensors(combination)
    if operands is None:
        return None
    first, second = operands
    size = tensor(first).nbytes
    require(alike(tensor(first), tensor(second)), "the operands differ in dtype, shape or layout")
    require(is_spare(first) or is_spare(second), "its operands are needed elsewhere")
    squared = first is second and OVER[callee(combination)] is mul_over
    require(not squared, "a gradient of a square needs its root")
    require(size >= WORTHWHILE, "its operands are too small for it to pay")

    overwritten = 0 if is_spare(first) else 1
    return insert_function(combination, OVER[callee(combination)], (first, second, overwritten))


def _tensors(combination: fx.Node) -> list[fx.Node] | None:
    """Both operands, where they are tensors and there are no settings such as alpha."""
    operands = [each for each in combination.args if isinstance(each, fx.Node)]
    known = all(isinstance(fact(each).value, Tensor) for each in operands)
    return operands if known and len(operands) == 2 and not combination.kwargs else None


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.linear(x))


def example(width: int = 8) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _Residual(width).eval(), (torch.randn(1 << 15, width),)
