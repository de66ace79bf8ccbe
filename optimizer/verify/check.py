"""`optimizer.check`: the answers compared, and where the graphs part."""

from __future__ import annotations

import warnings

from torch import fx, nn

from optimizer.core.context import undisturbed
from optimizer.core.errors import CaptureError, EquivalenceError, OptimizerWarning
from optimizer.core.inputs import Call, ExampleInputs, as_call, require_module
from optimizer.frontend.symbolic import capture, capture_call, leaves_nothing_behind
from optimizer.verify.divergence import first_divergence, values
from optimizer.verify.equivalence import answer, compare_answers, reference
from optimizer.verify.leaves import incomparable


def check(model: nn.Module, fast: nn.Module, example_inputs: ExampleInputs) -> None:
    """Require that two modules give the same answer.

    Same structure, shapes, dtypes and devices; the same NaN and inf; values that differ by no
    more than rounding (relative to the largest value of each output: 1e-9 in float64, 1e-4 in
    float32, 1e-2 in float16, 5e-2 in bfloat16; beyond that, by a comparison of both with the
    model in float64); and inputs left in the same state.

    `model` itself is called where that is sure to leave nothing behind, and else a copy of it. A
    warning names what cannot be compared, such as a generator.

    Raises:
        EquivalenceError: they differ; names the output, the error and the first node at fault.
        InputError: an argument cannot be used, or `model` rejects the inputs.
        CaptureError: one of them cannot be copied, and so not be called.
    """
    call, model, fast = as_call(example_inputs), require_module(model), require_module(fast)

    with undisturbed():
        pure = _leaves_nothing_behind(model, call)
        expected = reference(model, call, itself=pure, draws=not pure)
        for remark in incomparable(expected.output):
            warnings.warn(f"output{remark}", OptimizerWarning, stacklevel=2)
        actual = answer(fast, call, draws=not pure)
        if found := compare_answers(model, call, expected, actual, exact=False):
            raise EquivalenceError(f"{found}{_first_divergence(model, fast, call)}.")


def _leaves_nothing_behind(model: nn.Module, call: Call) -> bool:
    try:
        return leaves_nothing_behind(capture_call(model, call))
    except CaptureError:
        return False


def _first_divergence(model: nn.Module, fast: nn.Module, call: Call) -> str:
    """Where the graphs part, if both are graphs."""
    if not isinstance(fast, fx.GraphModule):
        return ""
    try:
        found = first_divergence(
            values(capture(model, call.kwargs or call.args), call), values(fast, call)
        )
    except CaptureError:
        return ""
    return f"; the first value to differ is {found}" if found else ""
