"""Any model as a graph whose facts are those of one run: nothing stands in for anything else."""

from __future__ import annotations

from torch import fx, nn

from optimizer._capture import observe
from optimizer._front_ends import FRONT_ENDS, record
from optimizer._inputs import ExampleInputs, as_call, require_module
from optimizer._observation import Facts


def observed(model: nn.Module, example_inputs: ExampleInputs) -> tuple[fx.GraphModule, Facts]:
    """The graph that a model runs, or the one that an optimized module holds, and its facts.

    Raises:
        InputError: the model or the inputs have no use.
        CaptureError: no front end can record the model; the message says why.
    """
    call = as_call(example_inputs)
    _, module = record(FRONT_ENDS, require_module(model), call)
    return module, observe(module, call)
