"""The part of a graph that computes one value: its nodes, its tensors, its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from optimizer._graph import attribute_of, tensors_of


def computation(last: fx.Node, accepts: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """All nodes that a value is computed from, in order; none if one of them is not accepted."""
    found: set[fx.Node] = set()
    pending = [last]
    while pending:
        node = pending.pop()
        if not accepts(node):
            return []
        found.add(node)
        pending += [each for each in node.all_input_nodes if each not in found]
    return sorted(found)


def tensors_read_by(nodes: list[fx.Node]) -> list[torch.Tensor]:
    """The distinct parameters and buffers of the model that some nodes read."""
    tensors: list[torch.Tensor] = []
    for node in nodes:
        tensors += [attribute_of(node)] if node.op == "get_attr" else []
        tensors += tensors_of(attribute_of(node)) if node.op == "call_module" else []
    return list({id(tensor): tensor for tensor in tensors}.values())


def value_of(nodes: list[fx.Node], given: Callable[[Any], Any]) -> Any:
    """What the last of some nodes yields, on the tensors and modules that `given` makes of them."""
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        if node.op == "get_attr":
            values[node] = given(attribute_of(node))
        elif node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            function: Any = given(attribute_of(node)) if node.op == "call_module" else node.target
            values[node] = function(*args, **kwargs)
    return values[nodes[-1]]
