"""Attention that is spelled out becomes one call, where torch has a faster kernel for it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.core.node import callee
from optimizer.testing import assert_equivalent, untouched
from tests.single_pass import assert_left_alone

NAME = "recognize_attention"
SHAPE = (2, 3, 5, 8)


class Attention(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.function = forward
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.5)
        self.register_buffer("bias", torch.ones(5, 5, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.function(self, q, k, v)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    given = shapes if len(shapes) == 3 else (*shapes, SHAPE, SHAPE, SHAPE)[:3]
    return tuple(torch.randn(shape, dtype=dtype) for shape in given)


def optimized(function: Callable[..., Any], inputs: tuple[Tensor, ...], **options: Any) -> Any:
    model = Attention(function).eval()
    with untouched(model):
        return optimizer.optimize(model, inputs, check=None, **options)


def attentions(fast: Any) -> int:
    return sum(callee(n) is F.scaled_dot_product_attention for n in fast.graph.nodes)


SPELLINGS: dict[str, Callable[..., Any]] = {
    "scores / number": lambda m, q, k, v: (q @ k.transpose(-2, -1) / 4.0).softmax(-1) @ v,
    "number * scores": lambda m, q, k, v: (0.3 * (q @ k.mT)).softmax(dim=3) @ v,
    "no scale": lambda m, q, k, v: torch.softmax(q @ k.permute(0, 1, 3, 2), 3) @ v,
    "q * number": lambda m, q, k, v: F.softmax((q * 0.3) @ k.transpose(2, 3), dim=-1) @ v,
    "number * k": lambda m, q, k, v: F.softmax(q @ (k.mT * 0.3), dim=-1) @ v,
    "numbers everywhere": lambda m, q, k, v: m.softmax(2.0 * ((q * 0.3) @ (k.mT / 4) * -3)) @ v,
    "sqrt of a size": lambda m, q, k, v: (q @ k.mT / math.sqrt(k.size(-1))).softmax(-1) @ v,
    "power of a size": lambda m, q, k, v: (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v,
    "functions": lambda m, q, k, v: torch.matmul(
        torch.softmax(input=torch.div(torch.matmul(q, k.mT), 4.0), dim=-1), v
    ),
    "methods": lambda m, q, k, v: q.matmul(k.mT).mul(0.3).softmax(-1).matmul(v),
    "dropout": lambda m, q, k, v: m.dropout(F.softmax(q @ k.mT, -1)) @ v,
    "other readers": lambda m, q, k, v: (q @ k.mT).softmax(-1) @ v + q * k.mean() - v,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_recognizes(spelling: str, dtype: torch.dtype) -> None:
    function, inputs = SPELLINGS[spelling], tensors(dtype=dtype)

    fast = optimized(function, inputs)

    assert attentions(fast) == fast.report.counts()[NAME] == 1
    assert not any(callee(node) is torch.softmax for node in fast.graph.nodes)
    if dtype == torch.float64:
        assert_equivalent(Attention(function).eval(), fast, inputs)
    optimizer.check(Attention(function).eval(), fast, inputs)


@pytest.mark.parametrize(("length", "dtype"), [(128, torch.bfloat16), (129, torch.float32)])
def test_scores_may_be_many_where_their_dtype_is_wide(length: int, dtype: torch.dtype) -> None:
    assert attentions(optimized(PLAIN, tensors(*[(1, 1, length, 8)] * 3, dtype=dtype))) == 1


def test_the_result_pickles_and_exports() -> None:
    fast = optimized(PLAIN, tensors())

    restored = pickle.loads(pickle.dumps(fast))
    exported = torch.export.export(fast, tensors())

    assert torch.equal(restored(*tensors()), fast(*tensors()))
    assert torch.equal(exported.module()(*tensors()), fast(*tensors()))


LATER: dict[str, tuple[tuple[int, ...], ...]] = {
    "other sizes": ((7, 2, 33, 4), (7, 2, 65, 4), (7, 2, 65, 4)),
    "one query": ((1, 1, 1, 8), (1, 1, 6, 8), (1, 1, 6, 8)),
    "no keys": ((1, 1, 3, 8), (1, 1, 0, 8), (1, 1, 0, 8)),
    "no queries": ((1, 1, 0, 8), (1, 1, 3, 8), (1, 1, 3, 8)),
    "an empty batch": ((0, 1, 3, 8), (0, 1, 3, 8), (0, 1, 3, 8)),
    "heads of two sizes": ((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 4)),
    "keys that are broadcast": ((2, 3, 5, 8), (1, 1, 5, 8), (1, 3, 5, 8)),
    "queries that are broadcast": ((1, 3, 5, 8), (2, 1, 5, 8), (2, 3, 5, 8)),
    "values that are broadcast": ((1, 3, 5, 8), (1, 3, 5, 8), (2, 3, 5, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", LATER)
def test_holds_in_later_calls(case: str, dtype: torch.dtype) -> None:
    function = SPELLINGS["sqrt of a size"]
    fast = optimized(function, tensors())

    later = tensors(*LATER[case], dtype=dtype)
    optimizer.check(Attention(function).eval(), fast, later)

    if dtype == torch.float64:
        assert_equivalent(Attention(function).eval(), fast, later)
    assert fast(*later).is_contiguous()


def test_the_result_is_contiguous_whatever_q_is() -> None:
    function = lambda m, q, k, v: (q @ k.mT).softmax(-1) @ v  # noqa: E731
    inputs = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors())

    fast = optimized(function, inputs)

    assert attentions(fast) == 1
    assert fast(*inputs).stride() == function(None, *inputs).stride()


@pytest.mark.parametrize("spelling", ["scores / number", "power of a size", "dropout"])
def test_autocast_changes_nothing_but_rounding(spelling: str) -> None:
    function, inputs = SPELLINGS[spelling], tensors(dtype=torch.float32)
    fast = optimized(function, inputs)

    with torch.autocast("cpu", torch.bfloat16):
        expected, result = Attention(function).eval()(*inputs), fast(*inputs)

    assert result.dtype == expected.dtype
    assert torch.allclose(result.float(), expected.float(), atol=0.05)


def test_gradients_are_the_models() -> None:
    function = SPELLINGS["power of a size"]
    inputs = tuple(x.requires_grad_() for x in tensors())

    fast = optimized(function, inputs)
    found = torch.autograd.grad(fast(*inputs).square().sum(), inputs)
    expected = torch.autograd.grad(function(None, *inputs).square().sum(), inputs)

    assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))


LEFT: dict[str, Callable[..., Any]] = {
    "no product before": lambda m, q, k, v: torch.relu(q).softmax(-1) @ v.mT,
    "a tensor that scales": lambda m, q, k, v: (q @ k.mT * m.bias).softmax(-1) @ v,
    "what divides": lambda m, q, k, v: (2.0 / (q @ k.mT)).softmax(-1) @ v,
    "a division by zero": lambda m, q, k, v: (q @ k.mT / 0).softmax(-1) @ v,
    "something between": lambda m, q, k, v: (q @ k.mT).tanh().softmax(-1) @ v,
    "weights on the right": lambda m, q, k, v: v.mT @ (q @ k.mT).softmax(-1),
}


@pytest.mark.parametrize("case", LEFT)
def test_leaves_alone(case: str) -> None:
    fast = optimized(LEFT[case], tensors(), only=[NAME])

    assert (fast.report.fired, fast.report.refused) == ((), ())
    assert_equivalent(Attention(LEFT[case]).eval(), fast, tensors(), exact=True)


def written(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    q.mul_(2.0)
    return weights @ v


def written_values(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    v = v.clone()
    weights = (q @ k.mT).softmax(-1)
    return weights @ v.mul_(2.0)


def written_scores(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.tanh_()
    return scores.softmax(-1) @ v


def returned_weights(m: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v, weights


def read_scores(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return (scores * 0.5).softmax(-1) @ v + scores.mean()


def hidden(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(m.bias.tril() == 0, -math.inf).softmax(-1) @ v


DIFFERENT = "its softmax is over another axis or dtype"
ELSEWHERE = "what it computes on the way is read elsewhere"
SLOWER = "torch has no faster kernel for it"
MASKED = "a mask may hide all keys from a query"
PLAIN = SPELLINGS["no scale"]
# name: forward, inputs, reason
REFUSALS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "a mask that is added": (
        lambda m, q, k, v: (q @ k.mT + m.bias).softmax(-1) @ v, tensors(), MASKED,
    ),
    "a mask that is filled in": (hidden, tensors(), MASKED),
    "three dimensions": (
        lambda m, q, k, v: (q @ k.mT).softmax(2) @ v,
        tensors(*[SHAPE[1:]] * 3),
        "it has not four dimensions",
    ),
    "values of three dimensions": (
        PLAIN, tensors(SHAPE, SHAPE, SHAPE[1:]), "it has not four dimensions",
    ),
    "another axis": (lambda m, q, k, v: (q @ k.mT).softmax(-2) @ v, tensors(), DIFFERENT),
    "another dtype": (
        lambda m, q, k, v: (q @ k.mT).softmax(-1, dtype=torch.float64) @ v, tensors(), DIFFERENT,
    ),
    "weights that are returned": (returned_weights, tensors(), ELSEWHERE),
    "scores that are read": (read_scores, tensors(), ELSEWHERE),
    "scores that are written": (written_scores, tensors(), ELSEWHERE),
    "an input that is written": (written, tensors(), "its input is written later"),
    "an input that is written after": (
        lambda m, q, k, v: ((q @ k.mT).softmax(-1) @ v) + q.mul_(2.0).mean(),
        tensors(),
        "its input is written later",
    ),
    "a result that is written": (
        lambda m, q, k, v: ((q @ k.mT).softmax(-1) @ v).mul_(2.0),
        tensors(),
        "its result is written",
    ),
    "heads of two sizes": (PLAIN, tensors(SHAPE, SHAPE, (2, 3, 5, 4)), SLOWER),
    "keys that are broadcast": (PLAIN, tensors(SHAPE, (2, 1, 5, 8), (2, 1, 5, 8)), SLOWER),
    "keys in columns": (
        lambda m, q, k, v: (q @ k).softmax(-1) @ v,
        tensors((2, 3, 8, 8), (2, 3, 8, 8), (2, 3, 8, 8)),
        SLOWER,
    ),
    "much in half precision": (
        PLAIN, tensors(*[(1, 1, 129, 8)] * 3, dtype=torch.bfloat16), SLOWER,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    function, inputs, reason = REFUSALS[case]

    fast = optimized(function, inputs, only=[NAME])

    assert_left_alone(Attention(function).eval(), fast, inputs, reason)


def test_values_that_are_written_before_they_are_read_are_read_then() -> None:
    fast = optimized(written_values, tensors())

    assert_equivalent(Attention(written_values).eval(), fast, tensors())


def test_a_number_that_is_an_argument_may_be_a_tensor_in_a_later_call() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Any) -> Tensor:
            return (x @ x.mT * scale).softmax(-1) @ x

    (x, *_), bias = tensors((2, 3, 5, 5)), torch.randn(5, 5).double()

    fast = optimizer.optimize(Scaled().eval(), (x, 2.0), check=None, level=1)

    assert torch.equal(fast(x, bias), Scaled()(x, bias))


def test_the_rank_is_required_of_later_calls() -> None:
    fast = optimized(PLAIN, tensors())

    with pytest.raises(optimizer.InputError, match="4 dimensions and got 3"):
        fast(*tensors(*[SHAPE[1:]] * 3))
