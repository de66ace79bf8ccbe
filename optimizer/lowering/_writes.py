"""Which torch functions write a tensor, and the functions that return what they would write."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

_IN_PLACE_OPERATORS = frozenset(
    ("iadd", "isub", "imul", "itruediv", "idiv", "ipow", "iand", "ior", "ixor", "imod")
)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written. Of one made in inference mode, nobody knows."""
    return 0 if tensor.is_inference() else tensor._version


def written_tensor(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that a torch function writes, or None."""
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None:
        return kwargs["out"]
    in_place = name.endswith("_") and not name.endswith("__")
    operator_form = name.startswith("__i") and name[2:-2] in _IN_PLACE_OPERATORS
    if in_place or operator_form or name == "__setitem__":
        return args[0]
    return args[0] if any(_in_place_flags(func, args, kwargs)) else None


def _in_place_flags(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[bool]:
    yield bool(kwargs.get("inplace", False))
    if inspect.isfunction(func) and func.__module__ == F.__name__:
        names = list(inspect.signature(func).parameters)
        yield any(bool(a) for n, a in zip(names, args, strict=False) if n == "inplace")


def returning_new(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any] | None:
    """The call that returns what `func` writes, for a `func` that writes; None if there is none."""
    name = getattr(func, "__name__", "")
    if "out" in kwargs:
        return func, args, {key: value for key, value in kwargs.items() if key != "out"}
    if any(_in_place_flags(func, args, kwargs)):
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.arguments["inplace"] = False
        return func, bound.args, bound.kwargs
    pure = f"__{name[3:]}" if name.startswith("__i") else name[:-1]
    owners = (torch.Tensor, torch, F)
    found: Any = next((getattr(owner, pure) for owner in owners if hasattr(owner, pure)), None)
    return None if found is None or name == "__setitem__" else (found, args, kwargs)
