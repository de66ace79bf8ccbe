"""A region whose Linear layers run on oneDNN, with weights that were packed once.

y = f(x W^T + b) in one call, where f is the activation that alone reads the product. oneDNN's
ReLU and its relatives make a number of NaN: they stay calls of their own. The operators are
private to torch: who calls this tries what it returns.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from optimizer._graph import attribute_of
from optimizer.lowering._regions import LINEAR, constant_weight, name_of, named_arguments

_Activation = tuple[str, list[float], str]  # as the operator names it, its numbers, its algorithm
_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")
_NOTHING: _Activation = ("none", [], "")
_ACTIVATIONS: dict[str, Callable[..., _Activation]] = {
    "gelu": lambda _, approximate="none": ("gelu", [], approximate),
    "hardswish": lambda _, inplace=False: ("hardswish", [], ""),
    "sigmoid": lambda _: ("sigmoid", [], ""),
    "silu": lambda _, inplace=False: ("swish", [], ""),
    "tanh": lambda _: ("tanh", [], ""),
}


def is_available() -> bool:
    """Whether this build of torch packs weights for oneDNN."""
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return there and all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)


def packable_in(region: fx.GraphModule) -> list[fx.Node]:
    """The Linear layers with weights that can be packed."""
    return [node for node in region.graph.nodes if constant_weight(node) is not None]


def with_packed_weights(region: fx.GraphModule) -> fx.GraphModule:
    """The same region with its Linear layers on packed weights.

    Raises:
        RuntimeError: oneDNN has no such product, of this dtype or on this processor.
    """
    module = fx.GraphModule(region, copy.deepcopy(region.graph))
    for node in packable_in(module):
        _replace(node, functools.partial(_product, module))
    for node in module.graph.nodes:
        if name_of(node) in _ACTIVATIONS and _is_private_product(*node.args[:1]):
            _replace(node, _activated)
    module.graph.eliminate_dead_code()
    return fx.GraphModule(module, module.graph)  # without the weights that were packed


def _replace(node: fx.Node, make: Callable[[fx.Node], fx.Node]) -> None:
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(make(node))
    node.graph.erase_node(node)


def _product(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    value, read, bias = named_arguments(node, LINEAR).values()
    name = f"{read.target}_packed"
    if not hasattr(module, name):
        dense = attribute_of(read).clone()  # oneDNN asks for it as if to write a snapshot
        module.register_buffer(name, torch.ops.mkldnn._reorder_linear_weight(dense))
    args = (value, node.graph.get_attr(name), bias, *_NOTHING)
    return node.graph.call_function(torch.ops.mkldnn._linear_pointwise.default, args)


def _activated(node: fx.Node) -> fx.Node:
    product: Any = node.args[0]
    activation = _ACTIVATIONS[name_of(node)](*node.args, **node.kwargs)
    return node.graph.call_function(product.target, (*product.args[:3], *activation))


def _is_private_product(value: Any = None) -> bool:
    found = isinstance(value, fx.Node) and len(value.users) == 1
    return found and value.target is torch.ops.mkldnn._linear_pointwise.default
