"""What is counted of a model in one variant: once, by the first benchmark that asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from ._error import answered, error_bound, in_float64
from ._kept import kept, or_why_not, required
from ._lowered import lowered
from ._workloads import built, offered, rewriter
from .subjects import EAGER

Counts: TypeAlias = dict[str, int]

_PARTS = {
    EAGER: ("graph", "work", "error"),
    "optimized-1": ("graph", "work", "error"),
    "fx_fuse": ("graph", "work"),
    "optimized-2": ("lowered", "error"),
    "optimized-2-openvino": ("lowered", "error"),
}


def counted(folder: Path, model: str, variant: str, part: str) -> Counts:
    """One part of what is counted of a variant, which `folder` keeps for all who ask later.

    Raises:
        NotImplementedError: it is n/a; the message says why.
        RuntimeError: it failed; the message says how.
    """
    found = kept(folder, f"{model}, {variant}", lambda: _parts(folder, model, variant))
    return required(found[part])


def _parts(folder: Path, model: str, variant: str) -> dict[str, Counts | Exception]:
    module, inputs = built(model, "cpu")
    made = _graph_module(variant, module, inputs)
    run = module if variant == EAGER else made
    counts: dict[str, Callable[[], Counts]] = {
        "graph": lambda: _graph(made),
        "work": lambda: _work(made, inputs),
        "lowered": lambda: lowered(made, inputs),
        "error": lambda: {"bound": error_bound(answered(run, inputs), exact())},
    }

    def exact() -> list[Any]:
        return kept(folder, f"{model} in float64", lambda: in_float64(module, inputs))

    return {part: or_why_not(counts[part]) for part in _PARTS[variant]}


def _graph_module(variant: str, module: Any, inputs: Any) -> Any:
    if variant == EAGER:
        return offered("optimizer", "capture")(module, inputs)
    return rewriter(variant, timed=False)(module, inputs)


def _graph(module: Any) -> Counts:
    parameters = list(module.parameters())
    found = {
        "nodes": len(module.graph.nodes),
        "calls": sum(node.op.startswith("call_") for node in module.graph.nodes),
        "modules": sum(1 for _ in module.modules()),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
    }
    if hasattr(module, "report"):
        found["rewrites"] = len(module.report.fired)
        found["refusals"] = len(module.report.refused)
    return found


def _work(module: Any, inputs: Any) -> Counts:
    """What a forward takes by the shapes of its tensors; nothing runs."""
    ceilings = offered("optimizer.analysis", "Ceilings")(1.0, 1.0)  # no time is asked for
    cost = offered("optimizer.analysis", "roofline")(module, inputs, ceilings)
    alone = not hasattr(cost, "peak")  # as older versions count it
    live = offered("optimizer.analysis", "memory")(module, inputs) if alone else cost
    work = {"flops": cost.flops, "bytes_moved": cost.bytes, "launches": cost.launches}
    return work | {"live_bytes": live.peak}
