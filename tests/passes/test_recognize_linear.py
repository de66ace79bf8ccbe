"""Products with a matrix of the model become calls of a Linear that shares it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer.core.node import callee, module_of
from optimizer.testing import assert_equivalent
from tests.conftest import address
from tests.single_pass import Forward, assert_left_alone, optimized_by

NAME = "recognize_linear"


class Product(Forward):
    def __init__(self, forward: Callable[[Any, Tensor], Any], dtype: torch.dtype) -> None:
        super().__init__(forward)
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 4, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(5, dtype=dtype))
        self.vector = nn.Parameter(torch.randn(4, dtype=dtype))
        self.square = nn.Parameter(torch.randn(4, 4, dtype=dtype))
        self.register_buffer("untransposed", torch.randn(4, 5, dtype=dtype))


def optimized(function: Callable[[Any, Tensor], Any], x: Tensor | None, **options: Any) -> Any:
    model = Product(function, torch.float64 if x is None else x.dtype).eval()
    return optimized_by(NAME, model, *(() if x is None else (x,)), **options)


def linears(fast: Any) -> list[Any]:
    return [module_of(node) for node in fast.graph.nodes if callee(node) is nn.Linear]


MATRIX: dict[str, Callable[[Any, Tensor], Any]] = {
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.weight.t()),
    "addmm, a method": lambda m, x: m.bias.addmm(x, m.weight.T),
    "mm": lambda m, x: torch.mm(x, m.weight.t()),
    "mm, a method": lambda m, x: x.mm(m.weight.t()),
    "addmm, not transposed": lambda m, x: torch.addmm(m.bias, x, m.untransposed),
}
ANY_RANK: dict[str, Callable[[Any, Tensor], Any]] = {
    "@ t()": lambda m, x: x @ m.weight.t(),
    "@ T": lambda m, x: x @ m.weight.T,
    "@ mT": lambda m, x: x @ m.weight.mT,
    "@ transpose": lambda m, x: x @ m.weight.transpose(0, 1),
    "@ permute": lambda m, x: x @ m.weight.permute(-1, 0),
    "@ movedim": lambda m, x: x @ m.weight.movedim(0, 1),
    "matmul": lambda m, x: torch.matmul(x, m.weight.t()),
    "matmul, a method": lambda m, x: x.matmul(m.weight.t()),
    "not transposed": lambda m, x: x @ m.untransposed,
    "a square matrix": lambda m, x: x @ m.square,
    "a square matrix, transposed": lambda m, x: x @ m.square.t(),
    "a square matrix, transposed on itself": lambda m, x: x @ m.square.transpose(1, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("spelling", [*MATRIX, *ANY_RANK])
def test_a_product_is_a_linear_to_the_last_bit(spelling: str, dtype: torch.dtype) -> None:
    function = (MATRIX | ANY_RANK)[spelling]
    x = torch.randn(7, 4, dtype=dtype)

    fast = optimized(function, x)

    assert len(linears(fast)) == 1
    assert not [node for node in fast.graph.nodes if node.op == "call_function"]
    shapes = [(7, 4), (1, 4), (0, 4)] + [(4,), (2, 3, 4), (2, 3, 1, 4)] * (spelling in ANY_RANK)
    for shape in shapes:
        later = torch.randn(shape, dtype=dtype)
        assert_equivalent(Product(function, dtype), fast, (later,), exact=True)


@pytest.mark.parametrize("spelling", [*MATRIX, *ANY_RANK])
def test_it_shares_the_models_own_numbers(spelling: str) -> None:
    model = Product((MATRIX | ANY_RANK)[spelling], torch.float32).eval()

    (linear,) = linears(
        optimizer.optimize(model, torch.randn(7, 4), only=[NAME], check=None, level=1)
    )

    pointers = [address(value) for value in (model.weight, model.square)]
    copied = "not transposed" in spelling  # a buffer, which is the result's own
    assert copied or address(linear.weight) in pointers
    assert linear.bias is None or address(linear.bias) == address(model.bias)


def test_a_matrix_of_integers_is_one_too() -> None:
    model: Any = Forward(lambda m, x: x @ m.matrix, matrix=torch.arange(12).reshape(4, 3)).eval()
    x = torch.arange(28).reshape(7, 4)

    fast = optimized_by(NAME, model, x)

    assert len(linears(fast)) == 1
    assert torch.equal(fast(x), model(x))


def test_what_follows_folds_into_it() -> None:
    model = Product(lambda m, x: torch.relu(torch.addmm(m.bias, x, m.weight.t())), torch.float32)

    fast = optimizer.optimize(model.eval(), torch.randn(7, 4), level=1)

    assert fast.report.counts() == {NAME: 1, "fuse_linear_relu": 1}


LEFT: dict[str, Callable[[Any, Tensor], Any]] = {
    "no matrix of the model": lambda m, x: x @ x.mT,
    "the matrix on the left": lambda m, x: m.weight @ x.mT,
    "a matrix that is computed": lambda m, x: x @ (m.weight * 2.0).t(),
    "axes that are computed": lambda m, x: x @ m.weight.transpose(0, x.dim() - 1),
    "a bias that is computed": lambda m, x: torch.addmm(m.bias * 2.0, x, m.weight.t()),
}


@pytest.mark.parametrize("case", LEFT)
def test_leaves_alone(case: str) -> None:
    x = torch.randn(7, 4, dtype=torch.float64)

    fast = optimized(LEFT[case], x)

    assert_left_alone(Product(LEFT[case], x.dtype), fast, (x,))


def writes(m: Any, x: Tensor) -> Tensor:
    y = x @ m.untransposed
    m.untransposed.mul_(2.0)
    return y + x @ m.untransposed


SCALED = "its terms are scaled, or the result is written elsewhere"
REFUSALS: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "beta": (lambda m, x: torch.addmm(m.bias, x, m.weight.t(), beta=2.0), SCALED),
    "alpha": (lambda m, x: m.bias.addmm(x, m.weight.t(), alpha=0.5), SCALED),
    "a vector": (lambda m, x: x @ m.vector, "the model's tensor is no matrix"),
    "a bias for each row": (
        lambda m, x: torch.addmm(m.square, x, m.square.t()),
        "what is added is no bias, one number for each output",
    ),
    "a matrix that is written": (writes, "the forward may write the matrix"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    function, reason = REFUSALS[case]
    x = torch.randn(4, 4, dtype=torch.float64)

    fast = optimized(function, x)

    assert {refusal.reason for refusal in fast.report.refused} == {reason}
    assert fast.report.fired == ()
    assert_equivalent(Product(function, x.dtype), fast, (x,), exact=True)


@pytest.mark.parametrize("path", ["@ T", "not transposed"])
def test_the_result_still_changes_its_dtype(path: str) -> None:
    fast = optimized(ANY_RANK[path], torch.randn(7, 4)).double()

    assert fast(torch.randn(7, 4).double()).dtype == torch.float64


@pytest.mark.parametrize("learns", [True, False])
def test_the_kernel_is_the_same_for_every_layout(learns: bool) -> None:
    x = torch.randn(4, 3, 2, 64)
    model: Any = Product(lambda m, x: x @ m.matrix, torch.float32)
    model.matrix = nn.Parameter(torch.randn(64, 48), requires_grad=learns)

    fast = optimizer.optimize(model.eval(), x, only=[NAME], check=None, level=1)

    assert [linear.weight.requires_grad for linear in linears(fast)] == [learns]
    with torch.no_grad():
        assert torch.equal(fast(x.permute(2, 1, 0, 3)), model(x.permute(2, 1, 0, 3)))
