"""A region whose layers run on oneDNN, with weights that were packed once.

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
from torch.fx.passes.shape_prop import ShapeProp

from optimizer.core.node import attribute_of, named_arguments
from optimizer.lowering.partition import (
    CONVOLUTION,
    CONVOLUTIONS,
    LINEAR,
    constant_weight,
    name_of,
    per_dimension,
)

_Activation = tuple[str, list[float], str]  # as the operator names it, its numbers, its algorithm
_OPERATORS = (
    "_linear_pointwise", "_reorder_linear_weight",
    "_convolution_pointwise", "_reorder_convolution_weight",
)  # fmt: skip
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
    """The layers with weights that can be packed."""
    return [node for node in region.graph.nodes if constant_weight(node) is not None]


def with_packed_weights(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor], *, convolutions: bool = True
) -> fx.GraphModule:
    """The same region with its layers, or its Linear layers alone, on packed weights.

    Raises:
        RuntimeError: oneDNN has no such layer, of this dtype or on this processor.
    """
    module = fx.GraphModule(region, copy.deepcopy(region.graph))
    _note_shapes(module, inputs)
    products = set[fx.Node]()
    for node in packable_in(module):
        if name_of(node) == "linear":
            products.add(_replaced(node, _linear(module, node)))
        elif convolutions:
            products.add(_replaced(node, _convolution(module, node)))
    for node in module.graph.nodes:
        product = node.args[0] if name_of(node) in _ACTIVATIONS and node.args else None
        if product in products and len(product.users) == 1:
            activation = _ACTIVATIONS[name_of(node)](*node.args, **node.kwargs)
            _replaced(node, (product.target, (*product.args[:-3], *activation)))
    module.graph.eliminate_dead_code()
    return fx.GraphModule(module, module.graph)  # without the weights that were packed


def _note_shapes(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    held = {name: tensor.to("meta") for name, tensor in module.named_buffers()}
    ShapeProp(fx.GraphModule(held, module.graph)).propagate(*(each.to("meta") for each in inputs))
    module.graph = module.graph  # its own again


def _replaced(node: fx.Node, call: tuple[Any, tuple[Any, ...]]) -> fx.Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(*call)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return made


def _linear(module: fx.GraphModule, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    value, read, bias = named_arguments(node, LINEAR).values()
    packed = _packed(module, read, torch.ops.mkldnn._reorder_linear_weight)
    return torch.ops.mkldnn._linear_pointwise.default, (value, packed, bias, *_NOTHING)


def _convolution(module: fx.GraphModule, node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    given = named_arguments(node, CONVOLUTION)
    value, read, bias = (given[name] for name in ("input", "weight", "bias"))
    geometry = [
        per_dimension(given[name], CONVOLUTIONS[name_of(node)])
        for name in ("padding", "stride", "dilation")
    ]
    size = list(value.meta["tensor_meta"].shape)
    reorder = torch.ops.mkldnn._reorder_convolution_weight
    packed = _packed(module, read, reorder, *geometry, given["groups"], size)
    args = (value, packed, bias, *geometry, given["groups"], *_NOTHING)
    return torch.ops.mkldnn._convolution_pointwise.default, args


def _packed(module: fx.GraphModule, read: fx.Node, reorder: Any, *geometry: Any) -> fx.Node:
    name = re.sub(r"\W+", "_", f"{read.target}_packed_{geometry}")
    if not hasattr(module, name):
        dense = attribute_of(read).clone()  # oneDNN asks for it as if to write a snapshot
        module.register_buffer(name, reorder(dense, *geometry))
    with read.graph.inserting_after(read):
        return read.graph.get_attr(name)
