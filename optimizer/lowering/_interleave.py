"""Channels of two groups that are shuffled in one copy, where images lie in channels_last.

ShuffleNet joins two branches and then shuffles: what lies at (group, channel) goes to (channel,
group). In channels_last the groups are the real and the imaginary part of a complex image, which
lie side by side in memory: to make that of the two branches joins and shuffles them at once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.passes.shape_prop import ShapeProp

from optimizer.lowering._regions import MOVED, convolutions_of, name_of, named_arguments, result_of

_EXCHANGES = ("transpose", "permute", "swapaxes", "swapdims", "movedim")
_PARTS = (torch.float32, torch.float64)  # of which every device has complex numbers


def with_interleaved_channels(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> fx.GraphModule:
    """The same region, with each shuffle of two groups of channels as one copy."""
    names = {name_of(node) for node in region.graph.nodes}
    if names.isdisjoint(("channel_shuffle", *_EXCHANGES)) or not convolutions_of(region):
        return region
    module = fx.GraphModule(region, copy.deepcopy(region.graph))
    ShapeProp(module).propagate(*inputs)
    for node in list(module.graph.nodes):
        steps = _steps(node)
        if steps and _shuffle(steps):
            _interleave(steps[0].all_input_nodes[0], steps[-1])
    module.graph.eliminate_dead_code()
    return fx.GraphModule(module, module.graph)


def _steps(node: fx.Node) -> list[fx.Node]:
    """The moves from an image to an image that may shuffle its channels; none if it is no such."""
    if name_of(node) == "channel_shuffle":
        return [node]
    if name_of(node) not in _EXCHANGES:
        return []
    steps = [node.all_input_nodes[0], node]
    while len(_shape(steps[-1])) == 5:
        steps.append(next(iter(steps[-1].users)))
    moves = all(name_of(step) in MOVED and len(step.all_input_nodes) == 1 for step in steps)
    return steps if moves else []


def _shuffle(steps: Sequence[fx.Node]) -> bool:
    """Whether they shuffle two groups of channels: seen on numbers, however they are spelled."""
    (image,) = steps[0].all_input_nodes
    shape = _shape(image)
    if len(shape) != 4 or shape[1] % 2 or image.meta["tensor_meta"].dtype not in _PARTS:
        return False
    numbers = torch.arange(shape.numel()).view(shape)
    expected, moved = torch.channel_shuffle(numbers, 2), numbers
    for step in steps:
        moved = result_of(step, moved)
    return torch.equal(moved, expected)


def _interleave(image: fx.Node, shuffled: fx.Node) -> None:
    graph = image.graph
    with graph.inserting_before(shuffled.next):
        rows = [graph.call_method("permute", (part, 0, 2, 3, 1)) for part in _groups(image)]
        made = graph.call_function(torch.complex, tuple(rows))
        made = graph.call_function(torch.view_as_real, (made,))
        made = graph.call_method("flatten", (made, 3))
        made = graph.call_method("permute", (made, 0, 3, 1, 2))
    made.meta = dict(shuffled.meta)
    shuffled.replace_all_uses_with(made)


def _groups(image: fx.Node) -> Sequence[fx.Node]:
    """The two groups of channels of an image: what was joined, or slices."""
    joined: dict[str, Any] = {"tensors": (), "dim": 0}
    if name_of(image) == "cat":
        joined = named_arguments(image, joined)
    tensors: Sequence[fx.Node] = joined["tensors"]
    alike = len({(_shape(each), each.meta["tensor_meta"].dtype) for each in tensors}) == 1
    if joined["dim"] == 1 and len(tensors) == 2 and alike:
        return tensors
    half = _shape(image)[1] // 2
    halves = (slice(None), slice(half)), (slice(None), slice(half, None))
    return [image.graph.call_function(getitem, (image, part)) for part in halves]


def _shape(node: fx.Node) -> torch.Size:
    """That of a result; empty if it is no tensor."""
    shape: torch.Size = getattr(node.meta.get("tensor_meta"), "shape", torch.Size())
    return shape
