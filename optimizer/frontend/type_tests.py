"""Tests of a type, or for None, in code that is recorded.

A traced value is no torch.Tensor, so `isinstance(x, torch.Tensor)` would trace a branch that
eager never takes. A `__class__` that says otherwise is no way out: the argument parser of torch
believes it and crashes. So the names are shadowed where the forwards look them up.

A traced value is never None. Where a forward asks `mask is None`, the branch that is recorded
is right for what was given, and an argument that is None in a later call must not take it.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn, overrides

from optimizer.core.node import NOT_USER_CODE
from optimizer.frontend.proxy import Attribute, Value
from optimizer.frontend.state import Outside, codes

_A_TENSOR = torch.empty(0)


def answer_isinstance(root: nn.Module, is_tensor: Callable[[fx.Node], bool], patcher: Any) -> None:
    """Let a patcher of fx answer isinstance() and torch.is_tensor() for traced values.

    In the code of `root`, as long as it patches.
    """

    def answer(value: Any, kinds: Any) -> bool:
        if not isinstance(value, fx.Proxy) or isinstance(value, kinds):
            return isinstance(value, kinds)
        if isinstance(value, Attribute):
            return isinstance(value.tensor, kinds)
        if isinstance(value, Value) and is_tensor(value.node):
            return isinstance(_A_TENSOR, kinds)
        raise value.tracer.fail("it asks for the type of an intermediate value")  # type: ignore[attr-defined]

    overrides._get_tensor_methods()  # torch keeps these lists: not with a shadow in them
    for space in [space for module in root.modules() for space in _namespaces(module)]:
        if "isinstance" not in space:
            patcher.patch(space, "isinstance", answer)
    patcher.patch_method(torch, "is_tensor", lambda value: answer(value, torch.Tensor))


def _namespaces(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The globals of a forward, and of what it decorates, unless they are torch's or ours."""
    forward: Any = getattr(type(module), "forward", None)  # a scripted module has none
    for function in (forward, inspect.unwrap(forward)):
        space = getattr(function, "__globals__", {})
        if space and not str(space.get("__file__", "")).startswith(NOT_USER_CODE):
            yield space


_TESTS = frozenset(
    code
    for name, code in dis.opmap.items()
    if name == "IS_OP" or name.endswith(("_IF_NONE", "_IF_NOT_NONE"))
)
_ASK_FOR_A_TYPE = frozenset(("isinstance", "is_tensor"))


def tests_for_none(outside: Outside) -> bool:
    """Whether a forward of a model, or a function that one may run, asks such a thing."""
    functions = (each for reach in outside.reaches.values() for each in reach.functions)
    return any(
        not _TESTS.isdisjoint(code.co_code[::2]) or not _ASK_FOR_A_TYPE.isdisjoint(code.co_names)
        for function in functions
        for code in codes(function.__code__)
    )
