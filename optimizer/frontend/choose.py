"""Who turns a model into a graph: symbolic tracing, `torch.export`, or who exported it already."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from optimizer.core.errors import CaptureError, InputError
from optimizer.core.inputs import Call
from optimizer.frontend.export import capture_exported, capture_program
from optimizer.frontend.symbolic import capture_call

FrontEnds: TypeAlias = dict[str, Callable[[nn.Module, Any], fx.GraphModule]]
FRONT_ENDS: FrontEnds = {"symbolic": capture_call, "export": capture_exported}


def choose(
    model: Any, call: Call | None, capture: str, *, static_shapes: bool
) -> tuple[Any, Call | None, FrontEnds]:
    """The module to optimize, what it is called with, and who may capture it, in order.

    Export takes sizes from the example, and so is not asked unless sizes may be fixed.

    Raises:
        InputError: `capture` names none, or one that needs example inputs.
    """
    if capture not in ("auto", *FRONT_ENDS):
        raise InputError(f"capture={capture!r} does not exist: use 'auto', 'symbolic' or 'export'.")
    if isinstance(model, torch.export.ExportedProgram):
        call = call or Call(*(model.example_inputs or ((), {})))
        module = model.module()
        module.training = False  # what depends on it is in the program already
        return module, call, {"exported program": partial(capture_program, model)}
    if capture == "export" and call is None:
        raise InputError("capture='export' runs the model: pass example_inputs.")
    both = capture == "auto" and call is not None and static_shapes
    names = list(FRONT_ENDS) if both else [capture.replace("auto", "symbolic")]
    return model, call, {name: FRONT_ENDS[name] for name in names}


def record(
    front_ends: FrontEnds, model: nn.Module, call: Call | None
) -> tuple[str, fx.GraphModule]:
    """The first front end that can capture a model, and the graph.

    Raises:
        CaptureError: none can; the message has the reason of each.
    """
    reasons = []
    for name, capture in front_ends.items():
        try:
            return name, capture(model, call)
        except CaptureError as error:
            reasons.append(str(error))
    raise CaptureError("; by export: ".join(reasons))
