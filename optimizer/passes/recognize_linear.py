"""x @ w.T -> Linear(x), b + x @ w.T -> Linear(x), for tensors w and b of the model."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from optimizer.core.node import arg, attribute_of, callee, is_attribute
from optimizer.core.ops import LAYOUTS
from optimizer.facts.facts import is_read_only
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import insert_module
from optimizer.rewrite.pattern import call


@rewrite(
    call(operator.matmul, torch.matmul, torch.mm, torch.addmm, name="product"),
    numerics="exact",
    phase="simplify",
)
def recognize_linear(product: fx.Node) -> fx.Node | None:
    """Call a product with a matrix of the model a Linear, which other passes fold into.

    A Linear computes x @ weight.T, and on a matrix with a bias addmm, by these very kernels. So
    weight is the transpose of the right matrix: the model's own parameter if the forward
    transposes it, else a view of it. Transposed again it is what the forward multiplied with, to
    the strides. The numbers are shared, and nobody may write them.
    """
    terms: tuple[Any, ...] = product.args
    terms = terms if product.target is torch.addmm else (None, *terms)
    if len(terms) != 3 or not isinstance(terms[1], fx.Node):
        return None
    bias, source, right = terms
    matrix = arg(right, 0) if _is_transpose(right) else right
    if not (is_attribute(matrix) and (bias is None or is_attribute(bias))):
        return None
    require(not product.kwargs, "its terms are scaled, or the result is written elsewhere")
    require(attribute_of(matrix).dim() == 2, "the model's tensor is no matrix")
    weight = _weight(right, matrix)
    row = bias is None or attribute_of(bias).shape == weight.shape[:1]
    require(row, "what is added is no bias, one number for each output")
    require(all(is_read_only(n) for n in (matrix, bias) if n), "the forward may write the matrix")

    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta").eval()
    linear.weight = _parameter(weight, attribute_of(matrix))
    if bias is not None:
        linear.bias = _parameter(attribute_of(bias), attribute_of(bias))
    return insert_module(product, linear, (source,), f"{matrix.target}_linear", like=product)


def _is_transpose(node: Any) -> bool:
    """Whether a node is a call of one with axes that are written out."""
    called = isinstance(node, fx.Node) and callee(node) in LAYOUTS
    return called and node.all_input_nodes == [arg(node, 0)]


def _weight(right: Any, matrix: fx.Node) -> torch.Tensor:
    """The transpose of the right matrix: the model's own tensor, where it is the same view."""
    held: torch.Tensor = attribute_of(matrix)
    seen = held if right is matrix else right.target(held, *right.args[1:])
    weight = seen.detach().t()
    same = (weight.shape, weight.stride()) == (held.shape, held.stride())
    return held if same else weight


def _parameter(value: torch.Tensor, held: torch.Tensor) -> nn.Parameter:
    """A matmul chooses its kernel also by whether the matrix may ask for a gradient."""
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value, held.requires_grad)


class _Product(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _Product(width).eval(), (torch.randn(4, width),)
