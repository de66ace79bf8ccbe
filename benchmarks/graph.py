"""What optimization does to each graph: exact numbers, the same on every machine and every run.

One process optimizes every model and counts; the benchmarks only read its counts.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ._unit import counts
from ._workloads import MODELS, PORTABLE, built, offered, rewriter
from .subjects import EAGER

OPTIMIZED = "optimized-1"

Counts = dict[str, int]
Graphs = dict[tuple[str, str], Counts | Exception]


def setup_cache() -> Graphs:
    return {
        (model, variant): found for model in MODELS for variant, found in _of_model(model).items()
    }


setup_cache.timeout = 600


def _of_model(model: str) -> dict[str, Counts | Exception]:
    graphs: dict[str, Counts | Exception] = {}
    for variant in [EAGER, *PORTABLE]:
        try:
            module, inputs = built(model, "cpu")
            rewritten = _graph_module(variant, module, inputs)
            graphs[variant] = _counts(rewritten) | _work(rewritten, inputs)
        except NotImplementedError as error:
            graphs[variant] = error
        except Exception as error:  # the failure of its own benchmarks, not of every other
            graphs[variant] = RuntimeError(f"{type(error).__name__}: {error}")
    return graphs


def _graph_module(variant: str, module: Any, inputs: Any) -> Any:
    if variant == EAGER:
        return offered("optimizer", "capture")(module, inputs)
    return rewriter(variant)(module, inputs)


def _counts(module: Any) -> Counts:
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
    try:
        ceilings = offered("optimizer.analysis", "Ceilings")(1.0, 1.0)  # no time is asked for
        cost = offered("optimizer.analysis", "roofline")(module, inputs, ceilings)
        live = offered("optimizer.analysis", "memory")(module, inputs)
    except NotImplementedError:
        return {}
    work = {"flops": cost.flops, "bytes_moved": cost.bytes, "launches": cost.launches}
    return work | {"live_bytes": live.peak}


class _OfGraphs:
    timeout = 60
    version = "1"

    def setup(self, graphs: Graphs, model: str, variant: str = OPTIMIZED) -> None:
        found = graphs[model, variant]
        if isinstance(found, Exception):
            raise found


class Graph(_OfGraphs):
    """The graph that runs: as captured (eager), as optimized, and as torch.fx's fuse leaves it."""

    params: ClassVar[list[list[str]]] = [MODELS, [EAGER, *PORTABLE]]
    param_names: ClassVar[list[str]] = ["model", "variant"]

    @counts("nodes")
    def track_nodes(self, graphs: Graphs, model: str, variant: str) -> int:
        return graphs[model, variant]["nodes"]

    @counts("calls")
    def track_calls(self, graphs: Graphs, model: str, variant: str) -> int:
        return graphs[model, variant]["calls"]

    @counts("modules")
    def track_modules(self, graphs: Graphs, model: str, variant: str) -> int:
        return graphs[model, variant]["modules"]

    @counts("numbers")
    def track_parameters(self, graphs: Graphs, model: str, variant: str) -> int:
        return graphs[model, variant]["parameters"]

    @counts("bytes")
    def track_parameter_bytes(self, graphs: Graphs, model: str, variant: str) -> int:
        return graphs[model, variant]["parameter_bytes"]


class Work(_OfGraphs):
    """What one forward of that graph takes, by the shapes of its tensors."""

    params: ClassVar[list[list[str]]] = [MODELS, [EAGER, *PORTABLE]]
    param_names: ClassVar[list[str]] = ["model", "variant"]

    def setup(self, graphs: Graphs, model: str, variant: str = OPTIMIZED) -> None:
        super().setup(graphs, model, variant)
        if "flops" not in graphs[model, variant]:
            raise NotImplementedError("this commit has no optimizer.analysis")

    @counts("operations")
    def track_flops(self, graphs: Graphs, model: str, variant: str) -> int:
        return graphs[model, variant]["flops"]

    @counts("bytes")
    def track_bytes_moved(self, graphs: Graphs, model: str, variant: str) -> int:
        return graphs[model, variant]["bytes_moved"]

    @counts("kernels")
    def track_launches(self, graphs: Graphs, model: str, variant: str) -> int:
        return graphs[model, variant]["launches"]

    @counts("bytes")
    def track_live_bytes(self, graphs: Graphs, model: str, variant: str) -> int:
        return graphs[model, variant]["live_bytes"]


class Rewrites(_OfGraphs):
    """What optimizing at level 1 did, and what it saw and left alone."""

    params: ClassVar[list[list[str]]] = [MODELS]
    param_names: ClassVar[list[str]] = ["model"]

    @counts("rewrites", less_is_better=False)
    def track_fired(self, graphs: Graphs, model: str) -> int:
        return graphs[model, OPTIMIZED]["rewrites"]

    @counts("rewrites")
    def track_refused(self, graphs: Graphs, model: str) -> int:
        return graphs[model, OPTIMIZED]["refusals"]
