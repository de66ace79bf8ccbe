"""A layer and the activation after it as one kernel, where torch has such an operator on a GPU.

cuDNN computes relu(conv(x) + bias) and relu(conv(x) + z + bias), cublasLt relu(x W^T + bias) and
the same with GELU approximated by tanh: one launch, and one pass over the result, instead of two
or three. The operators are private to torch, and cuDNN's run nowhere else: who calls this tries
what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.shape_prop import ShapeProp

from optimizer.core.node import named_arguments
from optimizer.lowering.partition import CONVOLUTION, LINEAR, name_of, per_dimension

_GELU = {"input": None, "approximate": "none"}
_SUMS = ("add", "__add__", "__radd__")


def can_fuse(region: fx.GraphModule) -> bool:
    """Whether an activation follows a layer, or the sum of one and another value."""
    return any(_source(node) is not None for node in region.graph.nodes)


def with_fused_kernels(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The same region with each such pair called as one operator, for inputs of these shapes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(region.graph, {}))
    module = fx.GraphModule(region, graph)
    ShapeProp(module).propagate(*inputs)
    for node in graph.nodes:
        with graph.inserting_before(node):
            fused = _fused(node)
        if fused is not None:
            fused.meta = node.meta
            node.replace_all_uses_with(fused)
    graph.eliminate_dead_code()
    module.recompile()
    return module


def _fused(node: fx.Node) -> Any:
    source = _source(node)
    if source is None:
        return None
    if name_of(source) == "linear":
        return _linear(source, gelu=name_of(node) == "gelu")
    if name_of(source) == "conv2d":
        return _convolution(source)
    one, other = source.args
    return _convolution(one, other) or _convolution(other, one)


def _source(node: fx.Node) -> Any:
    """The layer or sum that only an activation reads, for that activation."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or len(source.users) > 1:
        return None
    if name_of(source) not in _sources(node):
        return None
    if name_of(source) not in _SUMS:
        return source
    plain = len(source.args) == 2 and not source.kwargs
    return source if plain and any(map(_is_convolution, source.args)) else None


def _sources(node: fx.Node) -> tuple[str, ...]:
    if name_of(node) == "relu":
        return ("linear", "conv2d", *_SUMS)
    gelu = name_of(node) == "gelu" and named_arguments(node, _GELU)["approximate"] == "tanh"
    return ("linear",) if gelu else ()


def _is_convolution(value: Any) -> bool:
    return isinstance(value, fx.Node) and name_of(value) == "conv2d" and len(value.users) == 1


def _convolution(node: Any, addend: Any = None) -> fx.Node | None:
    if not _is_convolution(node):
        return None
    graph: fx.Graph = node.graph
    given = named_arguments(node, CONVOLUTION)
    batched = len(_shape(given["input"])) == 4
    if not batched or isinstance(given["padding"], str):
        return None
    sizes = [per_dimension(given[name], 2) for name in ("stride", "padding", "dilation")]
    last = (given["bias"], *sizes, given["groups"])
    if addend is None:
        relu = torch.cudnn_convolution_relu
        return graph.call_function(relu, (given["input"], given["weight"], *last))
    alike = isinstance(addend, fx.Node) and addend is not node and _meta(addend) == _meta(node)
    add_relu = torch.cudnn_convolution_add_relu
    args = (given["input"], given["weight"], addend, 1.0, *last)
    return graph.call_function(add_relu, args) if alike else None


def _linear(node: fx.Node, *, gelu: bool) -> fx.Node | None:
    value, weight, bias = named_arguments(node, LINEAR).values()
    if bias is None or len(_shape(value)) < 2:
        return None
    graph = node.graph
    rows = value if len(_shape(value)) == 2 else graph.call_method("flatten", (value, 0, -2))
    product: tuple[Any, ...] = (bias, rows, graph.call_method("t", (weight,)))
    options: dict[str, Any] = {"use_gelu": gelu}
    result = graph.call_function(torch._addmm_activation, product, options)
    return graph.call_method("view", (result, tuple(_shape(node))))


def _meta(node: fx.Node) -> tuple[torch.Size, torch.dtype]:
    known = node.meta["tensor_meta"]
    return known.shape, known.dtype


def _shape(node: fx.Node) -> torch.Size:
    return _meta(node)[0]
