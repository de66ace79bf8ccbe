"""softmax(scale * q @ k.T) @ v -> scaled_dot_product_attention(q, k, v, scale=scale)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.node import callee, module_of, named_arguments
from optimizer.facts.facts import fact, is_read_only, is_unchanged, rank, tensor
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import insert_function
from optimizer.rewrite.expression import is_closed
from optimizer.rewrite.pattern import call, called

Factor: TypeAlias = tuple[Callable[..., Any], Any]
MATMULS = (operator.matmul, torch.matmul)
SOFTMAXES = (torch.softmax, F.softmax, nn.Softmax, "softmax")
MASKS = (operator.add, torch.masked_fill, torch.where, "masked_fill", "where")
MOST_IN_HALF = 1 << 14  # scores


@rewrite(
    call(*MATMULS, args=(call(*SOFTMAXES, name="weights"),), name="root"),
    numerics="rounding",
    phase="simplify",
)
def recognize_attention(weights: fx.Node, root: fx.Node) -> fx.Node | None:
    """Call torch's attention, which never holds all scores at once, where it is spelled out.

    A number that q, the transposed k or the scores are multiplied with scales the scores. None
    of what is computed on the way is read elsewhere. What it reads is not written after, nor its
    result, both of which torch's attention keeps for gradients. What matmul makes is contiguous,
    what torch's attention makes is laid out as q. A query whose scores are all -inf has NaN for a
    result in eager and zeros in torch's: a mask may do that and is refused; without one they have
    overflowed, or q or k is infinite. Timed on CPUs, it pays in four dimensions with heads of one
    size, in half precision where there are few scores.
    Elsewhere torch takes another kernel, which is slower than what was spelled out.
    """
    scores, factors, inner = _unscaled(weights.all_input_nodes[0])
    require(called(scores) not in MASKS, "a mask may hide all keys from a query")
    if callee(scores) not in MATMULS or not isinstance(root.args[1], fx.Node):
        return None
    q, of_q, inner_q = _unscaled(scores.args[0])
    k, of_k, inner_k = _unscaled(scores.args[1])
    read, inner = (q, k, root.args[1]), {weights, scores, *inner, *inner_q, *inner_k}
    require(all(rank(each) == 4 for each in read), "it has not four dimensions")
    require(_is_over_keys(weights), "its softmax is over another axis or dtype")
    require(is_closed(root, inner), "what it computes on the way is read elsewhere")
    require(all(is_unchanged(each, min(inner)) for each in read), "its input is written later")
    require(is_read_only(root), "its result is written")
    require(_has_kernel(*map(tensor, read)), "torch has no faster kernel for it")

    scale = 1.0
    for operation, number in (*factors, *of_q, *of_k):
        if isinstance(number, fx.Node):
            q = insert_function(root, operation, (q, number))
        else:
            scale = operation(scale, number)
    k = insert_function(root, torch.transpose, (k, -2, -1))
    attended = insert_function(
        root, F.scaled_dot_product_attention, (q, k, root.args[1]), scale=scale
    )
    return insert_function(root, "contiguous", (attended,))


def _unscaled(node: Any) -> tuple[fx.Node, list[Factor], set[fx.Node]]:
    """What a value is but for numbers, the numbers, and the calls that bring them in."""
    factors, inner = list[Factor](), set[fx.Node]()
    while callee(node) in (operator.mul, operator.truediv):
        value, number = node.args
        if node.target is operator.mul and not _is_number(number):
            value, number = number, value
        if not _is_number(number) or not isinstance(value, fx.Node):
            break
        factors.append((node.target, number))
        inner.add(node)
        node = value
    return node, factors, inner


def _is_over_keys(weights: fx.Node) -> bool:
    if weights.op == "call_module":
        return module_of(weights).dim in (-1, 3)
    given = named_arguments(weights, ("input", "dim", "dtype"))
    return given.get("dim") in (-1, 3) and given.get("dtype") is None


def _is_number(value: Any) -> bool:
    """Whether a value is one number in every call; one that is computed comes from sizes."""
    if not isinstance(value, fx.Node):
        return type(value) in (int, float) and value != 0
    given = (each.meta["fact"].value for each in fact(value).inputs)
    sized = all(isinstance(each, torch.Tensor) for each in given)
    return sized and type(fact(value).value) in (int, float)


def _has_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether torch has a kernel of its own on CPUs that pays; k is transposed."""
    alike = q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[3] == v.shape[3]
    dense = q.stride(3) == k.stride(2) == v.stride(3) == 1
    scores = q.shape[:3].numel() * k.shape[3]
    return alike and dense and (q.dtype.itemsize >= 4 or scores <= MOST_IN_HALF)


class _Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(-2, -1) / 2, -1) @ x


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _Attention().eval(), (torch.randn(1, 2, 4, width),)
