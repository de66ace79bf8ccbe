"""`torch.compile(model, backend="optimizer")`: the same passes on each graph that Dynamo finds."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from optimizer._optimize import optimize_graph
from optimizer.core.errors import InputError, OptimizerWarning
from optimizer.core.inputs import Call, require_flags
from optimizer.frontend.dynamo import DynamoGraph
from optimizer.passes import select
from optimizer.rewrite.contract import REDUCED

log = logging.getLogger("optimizer")
_DEFAULTS = {"level": 1, "check": "final", "only": None, "disable": (), "freeze": False}


def backend(
    module: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Optimize each graph that Dynamo finds, and log its report to `optimizer`, at level INFO.

    Args:
        module: the graph.
        example_inputs: its first arguments.
        options: `level`, `check`, `only` and `disable`, as in `optimizer.optimize`; and `freeze`,
            the promise that the weights of the first call stay as they are.

    Raises:
        InputError: there is no such option or value; Dynamo wraps it in an error of its own.
    """
    values: dict[str, Any] = {**_DEFAULTS, **(options or {})}
    if unknown := values.keys() - _DEFAULTS.keys():
        raise InputError(f"no option {sorted(map(str, unknown))}: there are {sorted(_DEFAULTS)}.")
    level, check, only, disable, freeze = values.values()
    require_flags(freeze=freeze)
    if check not in ("final", "each", None):
        raise InputError(f"check={check!r} does not exist: use 'final', 'each' or None.")
    settings = {"level": level, "check": check, "only": select(level, only, disable), "engines": ()}
    if level == REDUCED:
        raise InputError("level 3 takes a precision, which is no option here: use 0, 1 or 2.")
    tensors = [each for each in example_inputs if isinstance(each, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        graph = "a graph of torch.compile(backend='optimizer')"
        remark = "runs as it is while gradients are recorded: call it under torch.no_grad()"
        warnings.warn(f"{graph} {remark}", OptimizerWarning, stacklevel=2)
        return module.forward
    if any(torch.is_autocast_enabled(tensor.device.type) for tensor in tensors):
        return module.forward

    def optimize(graph: fx.GraphModule, call: Call) -> nn.Module:
        fast = optimize_graph(graph, call, **settings)
        log.info("%s", fast.report)
        return fast

    return DynamoGraph(module, example_inputs, optimize, frozen=freeze)
