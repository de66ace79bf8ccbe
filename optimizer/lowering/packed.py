"""Regions whose layers run on oneDNN, with weights that were packed once.

y = f(W x + b + z) in one call, where the sum alone reads the product, and the activation f alone
the sum. oneDNN's ReLU and its relatives make a number of NaN: they are part of the call where it
is known that none arises. The operators are private to torch: who calls this tries what it returns.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import fx

from optimizer.core.node import arg, attribute_of, name_of_call
from optimizer.lowering.partition import arguments_of, constant_weight, for_moderate, makes_no_nan

_Operation = tuple[Any, tuple[Any, ...]]  # an operator and its arguments
_OPERATORS = (
    "_linear_pointwise", "_reorder_linear_weight",
    "_convolution_pointwise", "_reorder_convolution_weight",
)  # fmt: skip
_NOTHING: Any = ("none", [], "")  # an activation as operators name it, its numbers, its algorithm
_NO_ACTIVATION: Any = (None, [], "")  # of a sum
_ACTIVATIONS = frozenset(("gelu", "hardswish", "sigmoid", "silu", "tanh"))
_LOSING_NAN = frozenset(("hardsigmoid", "hardtanh", "relu"))


def is_available() -> bool:
    """Return whether this build of torch packs weights for oneDNN."""
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)


def packable_in(region: fx.GraphModule) -> list[fx.Node]:
    """Return the layers with weights that can be packed."""
    return [node for node in region.graph.nodes if constant_weight(node) is not None]


def with_packed_weights(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor], *, convolutions: bool = True
) -> Callable[..., Any]:
    """Return the same region with its layers, or its Linear layers alone, on packed weights.

    Raises:
        RuntimeError: oneDNN has no such layer, of this dtype or on this processor.
    """
    module = fx.GraphModule(region, copy.deepcopy(region.graph))
    products = set[fx.Node]()
    for node in packable_in(module):
        if convolutions or name_of_call(node) == "linear":
            products.add(_replace(node, *_product(module, node)))
    activations = _ACTIVATIONS | (_LOSING_NAN if makes_no_nan(region, inputs) else set())
    names = set[str]()
    for node in module.graph.nodes:
        if fused := _sum(node, products) or _activated(node, products, activations):
            names.add(name_of_call(node))
            products.add(_replace(node, *fused))
    module.graph.eliminate_dead_code()
    packed = fx.GraphModule(module, module.graph)  # without the weights that were packed
    return packed if names.isdisjoint(_LOSING_NAN) else for_moderate(region, packed)


def _sum(node: fx.Node, products: Set[fx.Node]) -> _Operation | None:
    """Return the product of which a node is the sum with another value, if it alone reads it."""
    if name_of_call(node) != "add":
        return None
    first, second, alpha = arguments_of(node).values()
    for product, other in ((first, second), (second, first)):
        if product not in products or len(product.users) > 1 or product.args[-3:] != _NOTHING:
            continue
        kinds = {(each.meta["val"].shape, each.meta["val"].dtype) for each in node.all_input_nodes}
        if other is not product and alpha == 1 and isinstance(other, fx.Node) and len(kinds) == 1:
            value, *rest = product.args[:-3]
            is_linear = product.target is torch.ops.mkldnn._linear_pointwise.default
            how = ("add",) if is_linear else ("add", None, *_NO_ACTIVATION)
            return product.target.overloadpacket.binary, (value, other, *rest, *how)
    return None


def _activated(node: fx.Node, products: Set[fx.Node], activations: Set[str]) -> _Operation | None:
    """Return the product or sum whose activation a node is, if it alone reads that."""
    name, product = name_of_call(node), arg(node, 0)
    if name not in activations or product not in products or len(product.users) > 1:
        return None
    _, *numbers = arguments_of(node).values()
    algorithm, free = numbers.pop() if name == "gelu" else "", product.args[-3:]
    takes = free == _NOTHING or (free == _NO_ACTIVATION and name == "relu")
    activation = "swish" if name == "silu" else name, numbers, algorithm
    return (product.target, (*product.args[:-3], *activation)) if takes else None


def _replace(node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, args)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)
    return call


def _product(module: fx.GraphModule, node: fx.Node) -> _Operation:
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
