"""What runs the calls of a model at level 2, where nothing is timed."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

from ._workloads import offered

_AS_IT_IS = "as it is"
_ENGINES = ("OpenVINO", "ONNX Runtime")  # as reports call them, with a version behind


def lowered(module: Any, inputs: Any) -> dict[str, int]:
    """The calls of torch's functions by what runs them, the regions, and bytes held twice.

    Raises:
        NotImplementedError: the optimizer here is too old to be asked.
    """
    report = module.report
    if not hasattr(report, "tried"):
        raise NotImplementedError("this commit does not report what runs a region")
    outside, regions = _divided(module, inputs)
    chosen = [choice.chosen for choice in report.choices] or [_AS_IT_IS] * len(regions)
    calls = Counter[str]()
    for count, name in zip(regions, chosen, strict=True):
        calls[_kind(name)] += count
    kinds = {kind: calls[kind] for kind in ("engine", "packed", "portable")}
    held = sum(choice.held for choice in report.choices)
    return {"regions": len(regions), "outside": outside, "held": held} | kinds


def _kind(chosen: str) -> str:
    if chosen == _AS_IT_IS:
        return "portable"
    return "engine" if chosen.startswith(_ENGINES) else "packed"


def _divided(module: Any, inputs: Any) -> tuple[int, list[int]]:
    """How many calls are outside all regions, and how many are in each."""
    line = _straight_line(module, inputs)
    if line is None:
        return len(_calls(module.graph)), []
    program = offered("torch.fx", "GraphModule")(line, copy.deepcopy(line.graph))
    offered("optimizer.lowering.partition", "extract_regions")(program)
    regions = [node for node in program.graph.nodes if node.op == "call_module"]
    parts = {part for region in regions for part in region.users}  # that take its outputs apart
    outside = [node for node in _calls(program.graph) if node not in {*regions, *parts}]
    inside = [program.get_submodule(region.target) for region in regions]
    return len(outside), [len(_calls(region.graph)) for region in inside]


def _straight_line(module: Any, inputs: Any) -> Any:
    """The code of this one call; None where it cannot be written down."""
    held = offered("optimizer.core.node", "tensors_of")(module)
    call = offered("optimizer.core.inputs", "as_call")(inputs)
    try:
        write_down = offered("optimizer.lowering.trace", "straight_line")
        return write_down(module.run_portable, held, call).module
    except offered("optimizer.lowering.trace", "NotStraightLineError"):
        return None


def _calls(graph: Any) -> list[Any]:
    return [node for node in graph.nodes if node.op.startswith("call_")]
