"""Regions whose layers run on oneDNN, with weights that were packed once.

y = f(W x + b) in one call, where f is the activation that alone reads the product. oneDNN's
ReLU and its relatives make a number of NaN: they stay calls of their own. The operators are
private to torch: who calls this tries what it returns.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from optimizer.core.node import attribute_of, name_of_call
from optimizer.lowering.partition import arguments_of, constant_weight

_Activation = tuple[str, list[float], str]  # as the operator names it, its numbers, its algorithm
_OPERATORS = (
    "_linear_pointwise", "_reorder_linear_weight",
    "_convolution_pointwise", "_reorder_convolution_weight",
)  # fmt: skip
_NOTHING: _Activation = ("none", [], "")
_ACTIVATIONS: dict[str, Callable[..., _Activation]] = {
    "gelu": lambda _, approximate="none": ("gelu", [], approximate),
    "hardswish": lambda _: ("hardswish", [], ""),
    "sigmoid": lambda _: ("sigmoid", [], ""),
    "silu": lambda _: ("swish", [], ""),
    "tanh": lambda _: ("tanh", [], ""),
}


def is_available() -> bool:
    """Return whether this build of torch packs weights for oneDNN."""
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)


def packable_in(region: fx.GraphModule) -> list[fx.Node]:
    """Return the layers with weights that can be packed."""
    return [node for node in region.graph.nodes if constant_weight(node) is not None]


def with_packed_weights(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor], *, convolutions: bool = True
) -> fx.GraphModule:
    """Return the same region with its layers, or its Linear layers alone, on packed weights.

    Raises:
        RuntimeError: oneDNN has no such layer, of this dtype or on this processor.
    """
    module = fx.GraphModule(region, copy.deepcopy(region.graph))
    products = set[fx.Node]()
    for node in packable_in(module):
        if convolutions or name_of_call(node) == "linear":
            products.add(_replace(node, *_product(module, node)))
    for node in module.graph.nodes:
        product = node.args[0] if name_of_call(node) in _ACTIVATIONS and node.args else None
        if product in products and len(product.users) == 1:
            activation = _ACTIVATIONS[name_of_call(node)](*node.args, **node.kwargs)
            _replace(node, product.target, (*product.args[:-3], *activation))
    module.graph.eliminate_dead_code()
    return fx.GraphModule(module, module.graph)  # without the weights that were packed


def _replace(node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)
    return call


def _product(module: fx.GraphModule, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator that computes a layer on packed weights, and its arguments."""
    mkldnn = torch.ops.mkldnn
    value, read, bias, *geometry = arguments_of(node).values()
    if not geometry:
        packed = _packed(module, read, mkldnn._reorder_linear_weight)
        return mkldnn._linear_pointwise.default, (value, packed, bias, *_NOTHING)
    stride, padding, dilation, groups = geometry
    geometry = [padding, stride, dilation, groups]  # in the order of these operators
    size = list(value.meta["val"].shape)
    packed = _packed(module, read, mkldnn._reorder_convolution_weight, *geometry, size)
    return mkldnn._convolution_pointwise.default, (value, packed, bias, *geometry, *_NOTHING)


def _packed(module: fx.GraphModule, read: fx.Node, reorder: Any, *geometry: Any) -> fx.Node:
    name = re.sub(r"\W+", "_", f"{read.target}_packed_{geometry}")
    if not hasattr(module, name):
        dense = attribute_of(read).clone()  # oneDNN takes it as if to write a snapshot
        module.register_buffer(name, reorder(dense, *geometry))
    with read.graph.inserting_after(read):
        return read.graph.get_attr(name)
