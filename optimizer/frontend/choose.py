"""Who turns a model into a graph: symbolic tracing, or who exported it already."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from optimizer.core.inputs import Call
from optimizer.frontend.dynamo import GuardedModule
from optimizer.frontend.export import capture_program
from optimizer.frontend.symbolic import capture_call

Capture: TypeAlias = Callable[[nn.Module, Any], fx.GraphModule]
SYMBOLIC = "symbolic"


def choose(model: Any, call: Call | None) -> tuple[Any, Call | None, str, Capture]:
    """The module to optimize, what it is called with, and who captures it."""
    if isinstance(model, GuardedModule):
        model = model.model
    if not isinstance(model, torch.export.ExportedProgram):
        return model, call, SYMBOLIC, capture_call
    module = model.module()
    module.training = False  # what depends on it is in the program already
    call = call or Call(*(model.example_inputs or ((), {})))
    return module, call, "exported program", partial(capture_program, model)
