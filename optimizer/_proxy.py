"""Traced values that record what `torch.fx` cannot, and do not lie about their type."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from optimizer._errors import CaptureError
from optimizer._inplace import INPLACE_OPERATORS

NOT_USER_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Value(fx.Proxy):
    """A traced value that also records item assignment and in-place operators."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What isinstance() sees: a wrong answer would trace a branch that eager never takes."""
        if sys._getframe(1).f_code.co_filename.startswith(NOT_USER_CODE):
            return Value
        if not self.tracer.is_tensor(self.node):  # type: ignore[attr-defined]
            raise CaptureError("it asks for the type of an intermediate value")
        return torch.Tensor

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("node", "tracer"):
            raise CaptureError(f"it sets the attribute '{name}' of a tensor")
        super().__setattr__(name, value)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _record_operator(function: Callable[[Any, Any], Any]) -> Callable[[Value, Any], fx.Proxy]:
    def method(self: Value, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _function in INPLACE_OPERATORS:
    setattr(Value, f"__{_function.__name__}__", _record_operator(_function))


class Attribute(Value):
    """A parameter or buffer. Its shape is the model's own and may steer control flow."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: torch.Tensor) -> None:
        super().__init__(node, tracer)
        object.__setattr__(self, "_tensor", tensor)

    @property
    def shape(self) -> torch.Size:
        return self.__dict__["_tensor"].shape  # type: ignore[no-any-return]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]
