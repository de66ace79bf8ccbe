"""Traced values that record what `torch.fx` cannot, and are asked for their type in vain."""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import fx

from optimizer.core.node import is_user_code
from optimizer.core.ops import INPLACE_OPERATORS

_OF_AUTOGRAD = ("grad", "grad_fn", "names")


class Value(fx.Proxy):
    """A traced value that also records item assignment and in-place operators."""

    tracer: Any
    __array_priority__ = torch.Tensor.__array_priority__  # numpy's numbers leave products to it

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("node", "tracer"):
            raise self.tracer.fail(f"it sets the attribute '{name}' of a tensor")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Member:  # type: ignore[override]
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _OF_AUTOGRAD or not hasattr(torch.Tensor, name):
            raise self.tracer.fail(f"it asks a value for its attribute '{name}'")
        return Member(self, name)

    def __hash__(self) -> int:
        raise self.tracer.fail("it looks a traced value up in a set or dict")

    def __len__(self) -> int:
        raise self.tracer.fail("it takes the len() of a traced value")

    def __index__(self) -> int:
        raise self.tracer.fail("it needs a traced value as a number")

    __int__ = __float__ = __complex__ = __index__

    def __str__(self) -> str:
        if is_user_code(sys._getframe(1).f_code.co_filename):
            raise self.tracer.fail("it writes a traced value as text")
        return super().__str__()

    def __format__(self, specification: str) -> str:
        if _is_told(sys._getframe(1)):  # a message, which is read where something is wrong
            return super().__str__()
        raise self.tracer.fail("it writes a traced value as text")

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


_TELLS = ("BUILD_STRING", "FORMAT", "CONVERT", "LOAD_FAST", "LOAD_CONST", "LOAD_ATTR", "PRECALL")


def _is_told(frame: FrameType) -> bool:
    """Whether a text is an argument of the next call, whose result nothing takes, or is raised."""
    rest = (each for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti)
    then = next((each.opname for each in rest if not each.opname.startswith(_TELLS)), "")
    return then.startswith("CALL") and next(rest).opname in ("POP_TOP", "RAISE_VARARGS")


def _record_operator(function: Callable[[Any, Any], Any]) -> Callable[[Value, Any], fx.Proxy]:
    def method(self: Value, other: Any) -> fx.Proxy:
        proxy: fx.Proxy = self.tracer.create_proxy("call_function", function, (self, other), {})
        return proxy

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
        if self._recorded is None or self._recorded._erased:
            read = self.tracer.create_proxy(
                "call_function", getattr, (self._holder, self._member), {}
            )
            vars(self).update(_recorded=read.node)
        recorded: Any = self._recorded
        return recorded  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        given = (self._holder, *args)
        proxy: fx.Proxy = self.tracer.create_proxy("call_method", self._member, given, kwargs)
        return proxy


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
