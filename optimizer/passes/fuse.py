"""A result is written where its input lay."""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from optimizer.core.errors import require
from optimizer.core.node import arg, callee, has_plain_tensors, module_of
from optimizer.core.ops import LINEAR_LAYERS, add_over, alike, mul_over
from optimizer.facts.facts import fact, is_read_only, tensor
from optimizer.rewrite.affine import layer_like
from optimizer.rewrite.contract import call, rewrite
from optimizer.rewrite.edit import insert_function, insert_module

FUNCTIONS = (
    F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.silu, F.mish, F.hardswish, F.hardsigmoid,
)  # fmt: skip
MODULES = (
    nn.ReLU6, nn.Hardtanh, nn.LeakyReLU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip
OVER: dict[Callable[..., object], Callable[..., object]] = {
    operator.add: add_over, torch.add: add_over, operator.mul: mul_over, torch.mul: mul_over,
}  # fmt: skip
# They always make a tensor, a dense one, and do not keep it for a backward pass.
_MAKERS = (
    *LINEAR_LAYERS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm,
    operator.matmul, torch.matmul, torch.bmm, torch.cat, operator.add, operator.mul, torch.add,
    torch.mul, add_over, mul_over,
)  # fmt: skip
WORTHWHILE = 1 << 17  # bytes: up to half of it, to look at the operands takes what it saves


class LinearReLU(nn.Linear):
    """`relu(linear(x))` without a second tensor: `(*, in_features) -> (*, out_features)`.

    It shares the weight and bias of the Linear it is made of.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as nn.Linear has it
        """Apply the layer; the in-place relu writes only the tensor that it just made."""
        return torch.relu_(F.linear(input, self.weight, self.bias))


@rewrite(
    call(F.relu, args=(call(nn.Linear, name="linear"),), name="relu"),
    numerics="exact",
    phase="fuse",
)
def fuse_linear_relu(linear: fx.Node, relu: fx.Node) -> fx.Node:
    """Fuse a Linear and the ReLU after it into one module that needs one tensor less.

    relu(linear(x)) -> one module that clamps the linear's output where it lies.

    The Linear's output is fresh, and the ReLU alone reads it. The same two kernels run.
    """
    require(len(linear.users) == 1, "the layer's output is read elsewhere")
    layer = module_of(linear)
    require(not has_plain_tensors(layer), "the layer has tensors that no cast of it reaches")

    fused = layer_like(layer, LinearReLU)
    return insert_module(linear, fused, linear.args, f"{linear.target}_relu")


@rewrite(
    call(*FUNCTIONS, *MODULES, F.gelu, nn.GELU, name="activation"), numerics="exact", phase="memory"
)
def reuse_activations(activation: fx.Node) -> fx.Node | None:
    """Write the result of an activation over its input, if nothing else reads that.

    relu(x) -> relu_(x), where nothing else reads x, and so for other activations.

    Each of these activations keeps shape, dtype and the layout of a dense tensor, and element i
    of the result depends on element i of the input alone, so that the kernel may write where it
    reads. The input is new at each call, and its only reader is the activation.
    """
    function, settings = callee(activation), _settings(activation)
    if settings.get("inplace"):
        return None
    require(_is_spare(arg(activation, 0)), "its input is needed elsewhere")
    require(not _is_one_place(activation), "its result may be laid out otherwise")
    slope = settings.get("negative_slope", 0.0)
    keeps_signs = function not in (F.leaky_relu, nn.LeakyReLU) or (
        isinstance(slope, int | float) and slope >= 0 and is_read_only(activation)
    )
    require(keeps_signs, "a gradient needs the signs, which would not be kept")

    if function in (F.gelu, nn.GELU):
        gelu_ = torch._C._nn.gelu_  # type: ignore[attr-defined]
        approximate = settings.get("approximate", "none")
        return insert_function(activation, gelu_, activation.args, approximate=approximate)
    if activation.op == "call_module":
        module = copy.copy(module_of(activation))
        module.inplace = True
        return insert_module(activation, module, activation.args, str(activation.target))
    in_place = inspect.signature(function).bind(**settings | {"inplace": True})
    return insert_function(activation, function, in_place.args, **in_place.kwargs)


def _settings(activation: fx.Node) -> dict[str, Any]:
    """Return the arguments of a function, or the attributes of a module, by name."""
    if activation.op == "call_module":
        return dict(vars(module_of(activation)))
    if callee(activation) is F.gelu:
        return activation.kwargs
    signature = inspect.signature(callee(activation))
    return signature.bind(*activation.args, **activation.kwargs).arguments


@rewrite(call(*OVER, name="combination"), numerics="exact", phase="memory")
def reuse_operands(combination: fx.Node) -> fx.Node | None:
    """Write the sum or product of two large tensors over one that nothing else reads.

    x + y -> x.add_(y) and x * y -> x.mul_(y), where nothing else reads x.

    Element i of the result depends on element i of each, so a kernel may write where it reads,
    and both are commutative, so either operand will do. It has to have the dtype, shape and
    layout of the result. That is so if the other has them too, which each call looks at anew:
    what agrees here may be broadcast, or another dtype under autocast, in a later call.
    """
    operands = [each for each in combination.args if isinstance(each, fx.Node)]
    tensors = all(isinstance(fact(each).value, Tensor) for each in operands)
    if not tensors or len(operands) != 2 or combination.kwargs:  # such as alpha
        return None
    first, second = operands
    require(alike(tensor(first), tensor(second)), "the operands differ in dtype, shape or layout")
    require(_is_spare(first) or _is_spare(second), "its operands are needed elsewhere")
    squared = first is second and OVER[callee(combination)] is mul_over
    require(not squared, "a gradient of a square needs its root")
    require(tensor(first).nbytes >= WORTHWHILE, "its operands are too small for it to pay")

    overwritten = 0 if _is_spare(first) else 1
    return insert_function(combination, OVER[callee(combination)], (first, second, overwritten))


def _is_one_place(activation: fx.Node) -> bool:
    """Return whether a result is an image of one place: new tensors of such are contiguous."""
    value = getattr(activation.meta.get("fact"), "value", None)
    places = value.shape[2:] if isinstance(value, Tensor) else ()
    return len(places) > 0 and math.prod(places) == 1


def _is_spare(value: object) -> bool:
    """Return whether a value is a new tensor without views that one node alone reads."""
    if not isinstance(value, fx.Node) or callee(value) not in _MAKERS:
        return False
    return len(value.users) == 1 and "out" not in value.kwargs
