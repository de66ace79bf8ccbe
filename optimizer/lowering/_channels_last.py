"""A region whose images lie in channels_last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from optimizer.lowering._regions import name_of

_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def in_channels_last(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor], *, weights: bool = True
) -> fx.GraphModule:
    """The same region with its images, and the weights that read them, in channels_last.

    Without the weights for a library that packs them in any case: they are shared, not copied.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    module = fx.GraphModule(region, region.graph)
    example = iter(inputs)
    for node in region.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder":
            memory_format = _MEMORY_FORMATS.get(next(example).dim())
            if memory_format and not _is_multiplied(node):
                options: dict[str, Any] = {"memory_format": memory_format}
                copies[node] = graph.call_method("contiguous", (copies[node],), options)
        elif node.target == "view" and isinstance(node.args[-1], int | tuple | list):
            copies[node].target = "reshape"  # a layout may not allow a view
        elif node.op == "get_attr" and weights:
            weight = getattr(region, str(node.target))
            if weight.dim() in _MEMORY_FORMATS:
                laid_out = weight.clone(memory_format=_MEMORY_FORMATS[weight.dim()])
                setattr(module, str(node.target), laid_out)
    return fx.GraphModule(module, graph)


def _is_multiplied(node: fx.Node) -> bool:
    """Whether the channels of a tensor are its last dimension already."""
    return any(name_of(user) == "linear" for user in node.users)
