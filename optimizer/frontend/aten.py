"""ATen overloads, as `torch.export` records them, in the words of the torch functions they are.

Only operators that a pattern or a spelling names are here: the others run as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.nn import functional as F

from optimizer.core.node import attribute_of, is_attribute

aten = torch.ops.aten
Function: TypeAlias = Callable[..., Any]

# These take the same positional arguments in the same order.
_FUNCTIONS: dict[Any, Function] = {
    aten.conv1d.default: F.conv1d, aten.conv1d.padding: F.conv1d,
    aten.conv2d.default: F.conv2d, aten.conv2d.padding: F.conv2d,
    aten.conv3d.default: F.conv3d, aten.conv3d.padding: F.conv3d,
    aten.linear.default: F.linear, aten.relu.default: torch.relu, aten.relu_.default: torch.relu_,
    aten.t.default: torch.t, aten.transpose.int: torch.transpose,
    aten.swapaxes.default: torch.transpose, aten.permute.default: torch.permute,
    aten.movedim.int: torch.movedim, aten.movedim.intlist: torch.movedim,
    aten.add.Tensor: torch.add, aten.sub.Tensor: torch.sub, aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div, aten.clone.default: torch.clone, aten.where.self: torch.where,
    aten.matmul.default: torch.matmul, aten.mm.default: torch.mm, aten.addmm.default: torch.addmm,
    aten.softmax.int: torch.softmax,
    aten.cat.default: torch.cat, aten.flatten.using_ints: torch.flatten,
    aten.add_.Tensor: operator.iadd, aten.sub_.Tensor: operator.isub,
    aten.mul_.Tensor: operator.imul, aten.div_.Tensor: operator.itruediv,
}  # fmt: skip
_DROPOUTS = (
    aten.dropout.default, aten.dropout_.default, aten.feature_dropout.default,
    aten.feature_dropout_.default, aten.alpha_dropout.default, aten.alpha_dropout_.default,
    aten.feature_alpha_dropout.default, aten.feature_alpha_dropout_.default,
)  # fmt: skip
_CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_METADATA = (aten._assert_tensor_metadata.default,)  # of values whose dtype and device are guarded


def from_aten(graph: fx.Graph) -> None:
    """Replace, in place, each overload that stands for a function of torch by that function."""
    for node in list(graph.nodes):
        if node.target in _METADATA:
            graph.erase_node(node)
        elif node.target in _FUNCTIONS:
            _function(node)
        elif node.target in _DROPOUTS and node.args[2] is False:
            _call(node, F.dropout, node.args[0], node.args[1], False, False)
        elif node.target in _REWRITES:
            _REWRITES[node.target](node)


def _call(node: fx.Node, target: Function, *args: Any) -> None:
    node.target, node.args, node.kwargs = target, args, {}


def _function(node: fx.Node) -> None:
    function = _FUNCTIONS[node.target]
    if not (node.kwargs and function.__module__ == "_operator"):  # x.add_(y, alpha=2) is no +=
        node.target = function


def _batch_norm(node: fx.Node) -> None:
    source, weight, bias, mean, variance, *settings = node.args
    _call(node, F.batch_norm, source, mean, variance, weight, bias, *settings[:3])


def _batch_norm_no_training(node: fx.Node) -> None:
    """It returns statistics as well, of which an inference graph reads none."""
    results = list(node.users)
    if any(result.target is not operator.getitem or result.args[1] != 0 for result in results):
        return
    source, weight, bias, mean, variance, *settings = node.args
    _call(node, F.batch_norm, source, mean, variance, weight, bias, False, *settings)
    for result in results:
        result.replace_all_uses_with(node)
        node.graph.erase_node(result)


def _convolution(node: fx.Node) -> None:
    source, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed is False and isinstance(stride, list | tuple) and len(stride) in _CONVS:
        settings = (stride, padding, dilation, groups)
        _call(node, _CONVS[len(stride)], source, weight, bias, *settings)


def _index_put(node: fx.Node) -> None:
    """y.index_put_([mask], number) is y[mask] = number; who reads the result reads y."""
    target, index, value, *accumulate = node.args
    number = _number(value)
    if len(index) != 1 or index[0] is None or number is None or any(accumulate):  # type: ignore[arg-type, index]
        return
    node.replace_all_uses_with(target)  # type: ignore[arg-type]
    _call(node, operator.setitem, target, index[0], number)  # type: ignore[index]


def _number(value: Any) -> Any:
    """What a scalar that the model's code wrote out holds; None if this is another value."""
    if getattr(value, "target", None) is not aten.lift_fresh_copy.default:
        return None
    constant = value.args[0]
    tensor = attribute_of(constant) if is_attribute(constant) else None
    return tensor.item() if tensor is not None and tensor.dim() == 0 else None


_REWRITES: dict[Any, Callable[[fx.Node], None]] = {
    aten.batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm_no_training,
    aten.convolution.default: _convolution,
    aten.index_put_.default: _index_put,
}
