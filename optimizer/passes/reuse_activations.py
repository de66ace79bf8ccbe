"""relu(x) -> relu_(x), where nothing else reads x, and so for other activations."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.node import arg, callee, module_of
from optimizer.facts.facts import is_read_only, is_spare
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import insert_function, insert_module
from optimizer.rewrite.pattern import call

FUNCTIONS = (
    F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.silu, F.mish, F.hardswish, F.hardsigmoid,
)  # fmt: skip
MODULES = (
    nn.ReLU6, nn.Hardtanh, nn.LeakyReLU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip


@rewrite(
    call(*FUNCTIONS, *MODULES, F.gelu, nn.GELU, name="activation"), numerics="exact", phase="memory"
)
def reuse_activations(activation: fx.Node) -> fx.Node | None:
    """Write the result of an activation over its input, if nobody else reads that.

    Each of these activations keeps shape, dtype and the layout of a dense tensor, and element i
    of the result depends on element i of the input alone, so that the kernel may write where it
    reads. The input is new at each call, and its only reader is the activation.
    """
    if _settings(activation).get("inplace"):
        return None
    require(is_spare(arg(activation, 0)), "its input is needed elsewhere")
    require(_keeps_signs(activation), "a gradient needs the signs, which would not be kept")

    function = callee(activation)
    if activation.op == "call_module":
        return _module(activation)
    if function is F.gelu:
        return _gelu(activation, **activation.kwargs)
    if function is F.relu:  # which has one spelling
        return insert_function(activation, F.relu, (arg(activation, 0), True))
    place = list(inspect.signature(function).parameters).index("inplace")  # the last argument
    settings = activation.kwargs | {"inplace": True}
    return insert_function(activation, function, activation.args[:place], **settings)


def _settings(activation: fx.Node) -> dict[str, Any]:
    """The arguments of a function, or the attributes of a module, by name."""
    if activation.op == "call_module":
        return dict(vars(module_of(activation)))
    if callee(activation) is F.gelu:
        return {}
    signature = inspect.signature(callee(activation))
    return signature.bind(*activation.args, **activation.kwargs).arguments


def _keeps_signs(activation: fx.Node) -> bool:
    """Whether the result shows the signs of the input, where in place autograd needs that.

    Only leaky_relu does, and shows them if its slope is not negative and nobody writes it later.
    """
    if callee(activation) not in (F.leaky_relu, nn.LeakyReLU):
        return True
    slope = _settings(activation).get("negative_slope", 0.0)
    return isinstance(slope, int | float) and slope >= 0 and is_read_only(activation)


def _module(activation: fx.Node) -> fx.Node:
    module = module_of(activation)
    if type(module) is nn.GELU:
        return _gelu(activation, approximate=module.approximate)
    module = copy.copy(module)
    module.inplace = True
    return insert_module(activation, module, activation.args, str(activation.target))


def _gelu(activation: fx.Node, **settings: Any) -> fx.Node:
    gelu_ = torch._C._nn.gelu_  # type: ignore[attr-defined]
    return insert_function(activation, gelu_, activation.args, **settings)


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    model = nn.Sequential(nn.Linear(width, width), nn.Hardswish())
    return model.eval(), (torch.randn(4, width),)
