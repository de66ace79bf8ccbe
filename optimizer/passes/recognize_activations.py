"""x * sigmoid(x) -> silu(x), and so hardswish, hardsigmoid and gelu, however they are written."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.ops import alike
from optimizer.facts.facts import is_unchanged, tensor
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import erase_run, insert_function
from optimizer.rewrite.expression import PRODUCTS, Form, form_of_function, is_closed, readings
from optimizer.rewrite.pattern import call

_TANH = {"approximate": "tanh"}
_RATE = math.sqrt(2 / math.pi)
_NATIVE: tuple[tuple[Callable[[Any], Any], Callable[..., Any], dict[str, str]], ...] = (
    (lambda x: x * torch.sigmoid(x), F.silu, {}),
    (lambda x: x * F.relu6(x + 3) / 6, F.hardswish, {}),
    (lambda x: x * F.hardsigmoid(x), F.hardswish, {}),
    (lambda x: F.relu6(x + 3) / 6, F.hardsigmoid, {}),
    (lambda x: x * (1 + torch.tanh(_RATE * (x + 0.044715 * x**3))) / 2, F.gelu, _TANH),
    (lambda x: x * (1 + torch.tanh(_RATE * x * (1 + 0.044715 * x**2))) / 2, F.gelu, _TANH),
)


@rewrite(call(*PRODUCTS, name="root"), numerics="rounding", phase="simplify")
def recognize_activations(root: fx.Node) -> fx.Node | None:
    """Call the operator of torch that computes in one step what is spelled out in several.

    Both are the same function of x, since they have one form, and every call between x and
    the result computes with x and numbers only. None of what it makes is read elsewhere, and
    x, which the operator keeps for gradients, is not written later. The operators compute in
    float32 or better and round once; integers, which a spelling takes, they reject. GELU by erf is
    not among them: F.gelu of an x that has overflowed to +inf is NaN on CPUs in float32, where the
    spelling keeps +inf.
    """
    for form, x, inner in readings(root):
        if form not in _natives():
            continue
        function, settings = _natives()[form]
        require(is_closed(root, inner), "what it computes on the way is read elsewhere")
        require(is_unchanged(x, min(inner)), "its input is written later")
        require(tensor(x).is_floating_point(), "its input is not floating point")
        result = function(tensor(x), **settings)
        require(alike(result, tensor(root)), "the result would differ in layout")
        native = insert_function(root, function, (x,), **settings)
        erase_run(root, inner)
        return native
    return None


@cache
def _natives() -> dict[Form, tuple[Callable[..., Any], dict[str, str]]]:
    return {form_of_function(spelled): (native, settings) for spelled, native, settings in _NATIVE}


class _Swish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _Swish().eval(), (torch.randn(4, width),)
