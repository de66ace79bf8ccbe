"""Traced values, which record what `torch.fx` cannot, and what code may ask of them.

A traced value is no torch.Tensor, so `isinstance(x, torch.Tensor)` would trace a branch that
eager never takes. A `__class__` that says otherwise is no way out: the argument parser of torch
believes it and crashes. So the names are shadowed where the code looks them up.

A traced value is never None. Where a forward asks `mask is None`, the branch that is recorded
is right for what was given, and an argument that is None in a later call must not take it.
"""

from __future__ import annotations

import dis
import operator
import sys
from abc import ABCMeta
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import fx, overrides

from optimizer.core.errors import CaptureError
from optimizer.core.node import is_user_code
from optimizer.core.ops import INPLACE_OPERATORS
from optimizer.frontend.known import Code, codes

_OF_AUTOGRAD = ("grad", "grad_fn", "names")
_A_TENSOR = torch.empty(0)


def _recording(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Value, *operands: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *operands), {})

    return method


class Value(fx.Proxy):
    """A traced value that also records item assignment and in-place operators."""

    tracer: Any
    __array_priority__ = torch.Tensor.__array_priority__  # numpy's numbers leave products to it

    def __getattr__(self, name: str) -> Member:
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

    __setitem__ = _recording(operator.setitem)


_TELLS = ("BUILD_STRING", "FORMAT", "CONVERT", "LOAD_FAST", "LOAD_CONST", "LOAD_ATTR", "PRECALL")


def _is_told(frame: FrameType) -> bool:
    """Whether a text is an argument of the next call, whose result nothing takes, or is raised."""
    rest = (each for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti)
    then = next((each.opname for each in rest if not each.opname.startswith(_TELLS)), "")
    return then.startswith("CALL") and next(rest).opname in ("POP_TOP", "RAISE_VARARGS")


for _function in INPLACE_OPERATORS:
    setattr(Value, f"__{_function.__name__}__", _recording(_function))


class Member(Value, fx.proxy.Attribute):
    """An attribute of a traced value: a method if it is called, else recorded when it is used."""


class Attribute(Value):
    """A parameter or buffer. Its shape is the model's own and may steer control flow."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self.tensor, self.shape, self.ndim = tensor, tensor.shape, tensor.dim()
        self.dim, self.size = tensor.dim, tensor.size


def answer_for_traced(code: Code, is_tensor: Callable[[fx.Node], bool], patcher: Any) -> None:
    """Let a patcher of fx answer what the user's functions ask of traced values and by name."""
    answer = partial(_is_instance, is_tensor)
    overrides._get_tensor_methods()  # torch keeps these lists: not with a shadow in them
    shadows = {
        "isinstance": answer, "getattr": partial(_get, code),
        "hasattr": partial(_of_no_value, hasattr, "it asks what a value has"),
        "type": partial(_of_no_value, type, "it asks for the type of a value"),
    }  # fmt: skip
    for space in {id(each.__globals__): each.__globals__ for each in code.functions}.values():
        for name in shadows.keys() - space.keys():
            patcher.patch(space, name, shadows[name])
    patcher.patch_method(torch, "is_tensor", lambda value: answer(value, torch.Tensor))


def _is_instance(is_tensor: Callable[[fx.Node], bool], value: Any, kinds: Any) -> bool:
    if not isinstance(value, fx.Proxy) or isinstance(value, kinds):
        return isinstance(value, kinds)
    if isinstance(value, Attribute):
        return isinstance(value.tensor, kinds)
    each = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, Value) and is_tensor(value.node) and all(map(_is_clear, each)):
        return isinstance(_A_TENSOR, kinds)
    raise value.tracer.fail("it asks for the type of an intermediate value")  # type: ignore[attr-defined]


def _is_clear(kind: Any) -> bool:
    """Whether all tensors are of a kind, or none is: not of a subclass, or of one by dtype."""
    plain = type(kind) in (type, ABCMeta) and not issubclass(kind, torch.Tensor)
    return kind is torch.Tensor or plain


def _of_no_value(function: Callable[..., Any], reason: str, asked: Any, *rest: Any) -> Any:
    if isinstance(asked, Value):
        raise asked.tracer.fail(reason)
    return function(asked, *rest)


def _get(code: Code, owner: Any, name: str, *default: Any) -> Any:
    if isinstance(owner, Value) and (default or name.startswith("_")):
        raise owner.tracer.fail("it asks what a value has")
    found = getattr(owner, name, *default)
    if not isinstance(found, fx.Proxy) and code.is_new(found, name):
        raise CaptureError(f"it finds '{name}' by getattr()")
    return found


_TESTS = frozenset(
    code for name, code in dis.opmap.items() if name.endswith(("IS_OP", "_IF_NONE", "_IF_NOT_NONE"))
)
_ASK_FOR_A_TYPE = frozenset(("isinstance", "is_tensor"))


def tests_for_none(code: Code) -> bool:
    """Whether a function of the model asks such a thing."""
    return any(
        not _TESTS.isdisjoint(each.co_code[::2]) or not _ASK_FOR_A_TYPE.isdisjoint(each.co_names)
        for function in code.functions
        for each in codes(function.__code__)
    )
