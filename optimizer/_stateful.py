"""Recording a forward, and which modules keep state: another recording would differ."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn

from optimizer._copy import structural_copy
from optimizer._graph import attribute
from optimizer._outside import Outside
from optimizer._state import python_state
from optimizer._tracer import Tracer


def recorded(tracer: Tracer, model: nn.Module) -> tuple[fx.Graph, set[str]]:
    """The graph of a forward, and the modules that then hold or reach something else than before.

    What a model reaches outside it is put back.

    Raises:
        CaptureError: it cannot be recorded.
    """
    outside = tracer.outside
    assert outside is not None
    before = _state(model, outside)
    with outside.kept(), torch.enable_grad():
        graph = tracer.trace(model)
        after = _state(model, outside)
    for node in graph.nodes:
        if node.target in tracer.opaque:
            node.meta["opaque"] = tracer.opaque[str(node.target)]
    return graph, {name for name, state in before.items() if after.get(name) != state}


def _state(model: nn.Module, outside: Outside) -> dict[str, Any]:
    """What each module holds, and what it reaches outside the model, by name."""
    reached = outside.state()
    return {name: (state, reached.get(name)) for name, state in python_state(model).items()}


def differing_when_recorded_again(model: nn.Module, tracer: Tracer, graph: fx.Graph) -> set[str]:
    """The module that does something else in a second recording, if any.

    Its state is of a kind that does not show, so it is asked where one reaches any.
    """
    copied = structural_copy(model)
    outside = Outside(copied)
    again = tracer.again(outside)
    found, _ = recorded(again, copied)
    nothing = ("", "", torch.empty(0))
    pairs = zip_longest(_told(graph, tracer.root), _told(found, again.root), fillvalue=nothing)
    for (within, does, bits), (other, does_then, bits_then) in pairs:
        if does != does_then or not torch.equal(bits, bits_then):
            name = max(within, other, key=len)
            while name and name not in outside.reaches:
                name = name.rpartition(".")[0]
            return {name}
    return set()


def _told(graph: fx.Graph, root: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Of each node: whose forward made it, what it does, and all bits of a constant, NaN too."""
    for node in graph.nodes:
        does = repr((node.op, node.target, node.args, node.kwargs))
        bits = torch.empty(0)
        if str(node.target).startswith("_tensor_constant"):
            constant: torch.Tensor = attribute(root, str(node.target))
            does += repr((constant.dtype, constant.shape))
            bits = constant.detach().contiguous().view(-1).view(torch.uint8)
        yield node.meta.get("within", ""), does, bits
