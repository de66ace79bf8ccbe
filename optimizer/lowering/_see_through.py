"""A function of torch's as the functions that it calls."""

from __future__ import annotations

import types
from typing import Any


def see_through(function: Any) -> Any:
    """A function written in Python, so that a mode sees what it calls and not the function."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    code, closure = function.__code__, function.__closure__
    made = types.FunctionType(code, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made
