"""Recording a forward, and which modules keep state: another recording would differ."""

from __future__ import annotations

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
    outside = tracer.outside or Outside(model)
    before = _state(model, outside)
    with outside.kept(), torch.enable_grad():
        graph = tracer.trace(model)
        after = _state(model, outside)
    for node in graph.nodes:
        if node.op == "call_module" and node.target in tracer.opaque:
            node.meta["opaque"] = tracer.opaque[node.target]
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
    for one, other in zip_longest(graph.nodes, found.nodes):
        if one is None or other is None or not _is_same(one, other, tracer.root, again.root):
            name = (one or other).meta.get("within", "")
            while name and name not in outside.reaches:
                name = name.rpartition(".")[0]
            return {name}
    return set()


def _is_same(one: fx.Node, other: fx.Node, root: nn.Module, other_root: nn.Module) -> bool:
    """Whether two nodes do the same; constants that were made while tracing are compared."""
    told, name = repr((one.op, one.target, one.args, one.kwargs)), str(one.target)
    if told != repr((other.op, other.target, other.args, other.kwargs)):
        return False
    made = one.op == "get_attr" and name.startswith("_tensor_constant")
    return not made or _are_equal(attribute(root, name), attribute(other_root, name))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    real = one.is_floating_point()
    return torch.equal(one, other) or (
        alike and real and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    )
