"""The arguments of a forward that is recorded, and of the graph that it becomes.

An ordinary forward cannot tell whether an argument is passed by name. One that can, as a decorator
does, is not recorded so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from optimizer.core.errors import CaptureError
from optimizer.core.guards import chooses_a_branch, expect_value
from optimizer.core.inputs import Call
from optimizer.core.literals import is_literal

NO_ARGUMENTS = Call((), {})
_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def sees_how_it_is_called(forward: Callable[..., Any]) -> bool:
    """Whether a forward can tell what is passed by name: one with `*args, **kwargs` can."""
    own, wrapped = inspect.signature(forward, follow_wrapped=False), inspect.signature(forward)
    stars = any(parameter.kind in _STARS for parameter in own.parameters.values())
    return stars or list(own.parameters) != list(wrapped.parameters)


class Arguments(fx.Tracer):
    """A tracer that calls a forward as the example does; branches take the example's values."""

    call: Call | None
    fail: Callable[[str], CaptureError]
    tests_for_none: bool
    _tensors: set[fx.Node]

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        positional: list[Any] = [self.root]
        keyword: dict[str, Any] = {}
        signature = inspect.signature(root_fn)
        args, kwargs = self.call or NO_ARGUMENTS
        given = signature.bind_partial(self.root, *args, **kwargs).arguments
        for parameter in list(signature.parameters.values())[1:]:
            if parameter.kind is parameter.KEYWORD_ONLY:
                keyword[parameter.name] = self._argument(parameter, given)
            else:
                positional.append(self._argument(parameter, given))
        return lambda *args: root_fn(*args, **keyword), positional

    def _argument(self, parameter: inspect.Parameter, given: Mapping[str, Any]) -> Any:
        name, default = parameter.name, parameter.default
        optional = default is not parameter.empty
        bound = optional and not is_literal(default)
        if bound and (name in given or isinstance(default, torch.Tensor)):
            raise self.fail(f"the default of '{name}' has no literal")
        written: Any = ... if bound else default
        node = self.create_node("placeholder", name, (written,) if optional else (), {})
        if bound:  # as it is, in a call that gives no other
            self.create_proxy("call_function", expect_value, (self.proxy(node), ..., name), {})
            return default
        return self._input(node, given.get(name, default))

    def _input(self, node: fx.Node, value: Any) -> Any:
        proxy, name = self.proxy(node), str(node.target)
        if chooses_a_branch(value):
            self.create_proxy("call_function", expect_value, (proxy, value, name), {})
            return value
        node.meta["tested"] = self.tests_for_none
        if isinstance(value, torch.Tensor):
            self._tensors.add(node)
        elif any(map(chooses_a_branch, tree_leaves(value))):
            raise self.fail(f"'{name}' holds what may choose a branch")
        return proxy
