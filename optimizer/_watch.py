"""What a forward does that an exported program would not: state, changed inputs, caught errors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from optimizer._outside import Outside
from optimizer._random import DRAWS, ProcessState
from optimizer._state import python_state

# Their own errors, which they catch themselves, are not the model's.
_NOT_THE_MODELS = sys.stdlib_module_names | {"torch", "sympy", "mpmath", "numpy", "optimizer"}
_HAND_ON = (
    "torch.random", "torch.cuda.random", "torch.mps", "torch._compile", "torch._dynamo.eval_frame",
    "random", "contextlib",
)  # fmt: skip


def watch(model: nn.Module, state: ProcessState, outside: Outside) -> list[str]:
    """Replace the forward of a module by one that notes what each call does besides computing.

    Export puts attributes back, so that they are looked at before the call ends. An error that
    the forward catches may be one of the fake tensors', which no real tensor would raise.
    """
    forward, noted = model.forward, list[str]()

    def note_draw(frame: FrameType) -> bool:
        noted.extend([DRAWS] if _is_called_by_the_model(frame) and DRAWS not in noted else [])
        return DRAWS in noted

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:  # pragma: no cover - it sets the tracer
        # An assigned buffer is recorded, as a copy into it.
        kept, inputs = (python_state(model, "_buffers"), outside.state()), _parts((args, kwargs))
        with _errors_of_the_model() as errors:
            result = state.watch(lambda: forward(*args, **kwargs), note_draw)
        if (python_state(model, "_buffers"), outside.state()) != kept:
            noted.append("its forward keeps state in Python")
        if _parts((args, kwargs)) != inputs:
            noted.append("it changes a container that it is given")
        if errors:
            noted.append(f"it catches an error ({errors[0]})")
        return result

    model.forward = watched
    return noted


def _parts(inputs: Any) -> tuple[list[int], pytree.TreeSpec]:
    leaves, structure = pytree.tree_flatten(inputs)
    return list(map(id, leaves)), structure


def _is_called_by_the_model(frame: FrameType | None) -> bool:
    """Whether the model's own code seeds or draws, and not that of the fake tensors."""
    while frame and frame.f_globals.get("__name__") in _HAND_ON:
        frame = frame.f_back
    package = str(frame and frame.f_globals.get("__name__")).partition(".")[0]
    return package not in _NOT_THE_MODELS


@contextmanager
def _errors_of_the_model() -> Iterator[list[str]]:
    """The names of the errors that pass through the model's code, caught or not."""
    errors: list[str] = []

    def note(frame: FrameType, event: str, value: Any) -> Any:  # pragma: no cover - a tracer
        if event == "exception":
            errors.append(value[0].__name__)
        return note

    def begin(frame: FrameType, event: str, value: Any) -> Any:  # pragma: no cover - a tracer
        frame.f_trace_lines = False
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        return None if package in _NOT_THE_MODELS else note

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield errors
    finally:
        sys.settrace(before)  # pragma: no cover - it sets the tracer
