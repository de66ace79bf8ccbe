"""Traced values that record what `torch.fx` cannot, and are asked for their type in vain."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from optimizer._errors import CaptureError
from optimizer._inplace import INPLACE_OPERATORS

NOT_USER_CODE = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))

_A_TENSOR = torch.empty(0)


class Value(fx.Proxy):
    """A traced value that also records item assignment and in-place operators."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("node", "tracer"):
            raise CaptureError(f"it sets the attribute '{name}' of a tensor")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Member:  # type: ignore[override]
        return Member(self, name)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _record_operator(function: Callable[[Any, Any], Any]) -> Callable[[Value, Any], fx.Proxy]:
    def method(self: Value, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _function in INPLACE_OPERATORS:
    setattr(Value, f"__{_function.__name__}__", _record_operator(_function))


class Member(Value):
    """An attribute of a traced value: a method if it is called, else recorded when it is used."""

    def __init__(self, holder: Value, name: str) -> None:
        vars(self).update(tracer=holder.tracer, _holder=holder, _member=name, _recorded=None)

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """The node that reads the attribute, made on first use."""
        if self._recorded is None:
            read = self.tracer.create_proxy(
                "call_function", getattr, (self._holder, self._member), {}
            )
            vars(self).update(_recorded=read.node)
        recorded: Any = self._recorded
        return recorded  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        name: Any = self._member
        return self.tracer.create_proxy("call_method", name, (self._holder, *args), kwargs)


class Attribute(Value):
    """A parameter or buffer. Its shape is the model's own and may steer control flow."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: torch.Tensor) -> None:
        super().__init__(node, tracer)
        object.__setattr__(self, "_tensor", tensor)

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter or buffer itself."""
        return self.__dict__["_tensor"]  # type: ignore[no-any-return]

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


@contextmanager
def answering_isinstance(root: nn.Module, is_tensor: Callable[[fx.Node], bool]) -> Iterator[None]:
    """Let the code of the modules in `root` see traced tensors as tensors.

    A traced value is no torch.Tensor, so `isinstance(x, torch.Tensor)` would trace a branch that
    eager never takes. A `__class__` that says otherwise is no way out: the argument parser of
    torch believes it and crashes. So the name is shadowed where the forwards look it up.
    """

    def answer(value: Any, kinds: Any) -> bool:
        if not isinstance(value, fx.Proxy) or isinstance(value, kinds):
            return isinstance(value, kinds)
        if isinstance(value, Attribute):
            return isinstance(value.tensor, kinds)
        if isinstance(value, Value) and is_tensor(value.node):
            return isinstance(_A_TENSOR, kinds)
        raise CaptureError("it asks for the type of an intermediate value")

    forwards = (type(module).forward for module in root.modules())
    spaces = {id(space): space for f in forwards if (space := getattr(f, "__globals__", {}))}
    shadowed = [s for s in spaces.values() if _is_users(s) and "isinstance" not in s]
    for space in shadowed:
        space["isinstance"] = answer
    try:
        yield
    finally:
        for space in shadowed:
            del space["isinstance"]


def _is_users(space: dict[str, Any]) -> bool:
    return not str(space.get("__file__", "")).startswith(NOT_USER_CODE)
