"""The parts of straight-line code that a library of fused kernels may take over.

A region is a run of consecutive functions that the library computes, or that only move data
between them, and holds at least one with weights. Everything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx

from optimizer._graph import attribute_of, is_attribute

CONVOLUTIONS = frozenset(("conv2d", "conv3d"))
LINEAR = {"input": None, "weight": None, "bias": None}
WEIGHTED = CONVOLUTIONS | {"linear"}
# Each element of the result is that of one or two values, or the largest of some of one.
POINTWISE = frozenset((
    "relu", "relu6", "hardtanh", "clamp", "hardswish", "hardsigmoid", "sigmoid", "silu", "gelu",
    "tanh", "elu", "leaky_relu", "add", "__add__", "__radd__", "mul", "__mul__", "__rmul__",
    "max_pool2d", "max_pool3d",
))  # fmt: skip
_COMPUTED = POINTWISE | {
    "batch_norm", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "mean"
}  # fmt: skip
MOVED = frozenset((
    "cat", "chunk", "split", "getitem", "__getitem__", "reshape", "view", "flatten", "squeeze",
    "unsqueeze", "transpose", "permute", "contiguous", "dropout", "getattr", "interpolate",
    "swapaxes", "swapdims", "movedim", "channel_shuffle",
))  # fmt: skip


def name_of(node: fx.Node) -> str:
    """What a node calls, however it is spelled."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def named_arguments(node: fx.Node, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a node is called with, by the names of `defaults`."""
    return dict(defaults) | dict(zip(defaults, node.args, strict=False)) | node.kwargs


def result_of(step: fx.Node, value: torch.Tensor) -> torch.Tensor:
    """What a step makes of another value."""
    target: Any = step.target
    read = {node: attribute_of(node) for node in step.all_input_nodes if is_attribute(node)}
    both: Any = fx.map_arg((step.args, step.kwargs), lambda node: read.get(node, value))
    (first, *others), options = both
    run = getattr(first, target) if step.op == "call_method" else partial(target, first)
    result: torch.Tensor = run(*others, **options)
    return result


def constant_weight(node: fx.Node) -> fx.Node | None:
    """What reads the weight of a Linear layer, if that is a constant matrix."""
    if name_of(node) != "linear":
        return None
    read = named_arguments(node, LINEAR)["weight"]
    return read if is_attribute(read) and attribute_of(read).dim() == 2 else None


def convolutions_of(module: fx.GraphModule) -> list[fx.Node]:
    """The convolutions in the code."""
    return [node for node in module.graph.nodes if name_of(node) in CONVOLUTIONS]


def extract_layers(outer: fx.GraphModule) -> None:
    """Make of each run of layers and what is between them a GraphModule that the code calls."""
    for place, nodes in enumerate(list(_regions(outer.graph))):
        extract(outer, nodes, f"region_{place}", (arg for node in nodes for arg in _weights(node)))


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("get_attr", "placeholder"):
            continue
        if name_of(node) in WEIGHTED | _COMPUTED | MOVED and not _never_ends(node):
            run.append(node)
            continue
        yield from _trimmed(run)
        run = []


def _never_ends(node: fx.Node) -> bool:
    """Whether oneDNN Graph takes memory until there is none: of torch 2.13, with no error.

    It does on a batch_norm of a convolution that has another reader.
    """
    if name_of(node) != "batch_norm":
        return False
    source = node.all_input_nodes[0]
    return name_of(source) in WEIGHTED and len(source.users) > 1


def _trimmed(run: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """The run without the moves at its ends; nothing if it has no weights."""
    kept = [place for place, node in enumerate(run) if name_of(node) not in MOVED]
    if any(name_of(node) in WEIGHTED for node in run):
        yield run[kept[0] : kept[-1] + 1]


def extract(
    outer: fx.GraphModule, nodes: Sequence[fx.Node], name: str, held: Iterable[fx.Node]
) -> None:
    """Put nodes into a module of their own, with the constants that it is to hold.

    Other constants are arguments.
    """
    inside, constants = dict.fromkeys(nodes), dict.fromkeys(held)
    own = inside | constants
    inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in own))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{place}") for place, node in enumerate(inputs)}
    for node in inputs:
        copies[node].meta["constant"] = is_attribute(node)
    copies |= {node: graph.get_attr(str(node.target)) for node in constants}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    outer.add_submodule(name, fx.GraphModule(outer, graph))
    with outer.graph.inserting_after(nodes[-1]):
        call = outer.graph.call_module(name, tuple(inputs))
    for place, node in enumerate(outputs):
        with outer.graph.inserting_after(call):
            item = outer.graph.call_function(getitem, (call, place))
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        outer.graph.erase_node(node)


def constant_inputs(region: fx.GraphModule) -> tuple[bool, ...]:
    """Which inputs of a region are the same in each call."""
    inputs = region.graph.find_nodes(op="placeholder")
    return tuple(bool(node.meta.get("constant")) for node in inputs)


def _weights(node: fx.Node) -> Iterator[fx.Node]:
    """Those of a layer; oneDNN Graph rejects a constant that is added to a product of matrices."""
    if name_of(node) in WEIGHTED | {"batch_norm"}:
        yield from (arg for arg in node.all_input_nodes[1:] if arg.op == "get_attr")
