"""Recording a forward as a graph, with nothing of torch run and nothing baked in.

`torch.fx` leaves gaps that change answers: item assignment is a TypeError, `x += y` is
recorded as `x = x + y`, a random tensor or a buffer's value at trace time is baked in as a
constant, an optional argument is always taken to be given. This tracer records the first
three as what they are and binds the last to the example's value, behind a guard.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict
from torch.utils._pytree import tree_leaves

from optimizer._constants import RecordConstants
from optimizer._errors import CaptureError
from optimizer._graph import is_plain, overrides_call
from optimizer._guards import chooses_a_branch, expect_none_given, expect_value
from optimizer._inputs import Call
from optimizer._isinstance import answering_isinstance
from optimizer._none_tests import tests_for_none
from optimizer._proxy import Attribute, Value
from optimizer._source import reason_of, user_line
from optimizer._state import held
from optimizer._vocabulary import (
    CHANGES_SHAPE,
    FACTORIES,
    RANDOM,
    RETURN_A_TENSOR,
    writes,
)

# Tracing patches nn.Module for the whole process: two at once would undo each other's patches
# in the wrong order.
_TRACING = threading.RLock()


class Tracer(fx.Tracer):
    """Trace a module, treating every submodule that cannot be traced as one opaque call.

    Args:
        call: the example inputs; they decide optional arguments and flags. Without them,
            defaults do.
        opaque: qualified names of submodules that must not be traced into, and why not.
        record_factories: record tensors that are made of nothing. Else they are made now and
            become constants, as caches in the model's code expect; random ones never do.
    """

    proxy_buffer_attributes = True

    def __init__(
        self,
        call: Call | None = None,
        opaque: Mapping[str, str] = MappingProxyType({}),
        *,
        record_factories: bool = True,
    ) -> None:
        super().__init__(autowrap_functions=tuple(FACTORIES))
        self._autowrap_search.append(torch)  # a factory whose size is traced, torch.zeros(n)
        self.call = call
        self.opaque = opaque
        self.record_factories = record_factories
        self.failure: CaptureError | None = None
        self._thread = threading.get_ident()
        self._attributes: dict[int, fx.Proxy] = {}
        self._names: dict[int, str] = {}
        self._tensors: set[fx.Node] = set()
        self._autocast = _autocast_state()
        self._tests_for_none = False
        self._held: dict[int, list[Any]] = {}

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        self._names = {
            id(tensor): name for name, tensor in [*root.named_buffers(), *root.named_parameters()]
        }
        self._tests_for_none = tests_for_none(root)
        self._held = {id(module): held(module) for module in root.modules()}
        with _TRACING, RecordConstants(self), answering_isinstance(root, self.is_tensor):
            graph = super().trace(root, concrete_args)
        if self.failure is not None:  # a try statement of the forward swallowed it
            raise self.failure
        for node in graph.nodes:
            if node.target in FACTORIES:
                node.meta.pop("is_wrapped", None)  # or the code would mark torch's own for fx
        return graph

    def fail(self, reason: str) -> CaptureError:
        """An error that is remembered, should the code that is traced swallow it."""
        self.failure = CaptureError(reason)
        return self.failure

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise self.fail("its control flow depends on a traced value")

    def iter(self, obj: fx.Proxy) -> Any:
        raise self.fail("it iterates over a traced value")

    def keys(self, obj: fx.Proxy) -> Any:
        raise self.fail("it asks a traced value for its keys")

    def records(self, factory: Callable[..., Any]) -> bool:
        """Whether a factory is recorded although all its arguments are constants."""
        return self.record_factories or factory in RANDOM

    def is_foreign_thread(self) -> bool:
        """Tracing patches nn.Module for the whole process; other threads must not notice."""
        return threading.get_ident() != self._thread

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether a traced value is sure to be a tensor."""
        if node.op == "call_module":
            return isinstance(self.root.get_submodule(str(node.target)), RETURN_A_TENSOR)
        return node.op == "get_attr" or node in self._tensors

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if kind == "call_method" and target in CHANGES_SHAPE:
            raise self.fail(f"it changes the shape of a tensor in place ({target})")
        if kind == "call_module" and not self._is_as_it_was(target):
            raise self.fail("it changes a submodule before it calls it")
        if target in (torch.autograd.grad, "backward", "requires_grad_"):
            raise self.fail("it uses autograd")
        if _autocast_state() != self._autocast:
            raise self.fail("it enters autocast inside its forward")
        if not torch.is_grad_enabled() and writes(kind, target):
            raise self.fail("it writes a tensor under no_grad")
        node = super().create_node(kind, target, *args, **kwargs)
        node.meta["source"] = user_line()
        return node

    def _is_as_it_was(self, name: str) -> bool:
        pairs = ((held(m), self._held[id(m)]) for m in self.root.get_submodule(name).modules())
        return all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in pairs)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, dict) and type(a) not in (dict, immutable_dict):
            if type(a) is not OrderedDict:
                raise self.fail(f"it makes a {type(a).__name__}, which a graph cannot hold")
            items = [(key, self.create_arg(value)) for key, value in a.items()]
            return self.create_node("call_function", type(a), (items,), {})
        return super().create_arg(a)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        name = self._names.get(id(attr_val)) if isinstance(attr_val, torch.Tensor) else None
        if name is None or self.is_foreign_thread():
            return attr_val
        known = self._attributes.get(id(attr_val))
        if known is None or known.node._erased:
            node = self.create_node("get_attr", name, (), {})
            known = self._attributes[id(attr_val)] = Attribute(node, self, attr_val)
        return known

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, torch.jit.ScriptModule) or not is_plain(m):
            return True
        ours = type(m).__module__.startswith("optimizer.passes.")
        opaque = module_qualified_name in self.opaque
        return ours or opaque or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.is_foreign_thread():
            return forward(*args, **kwargs)
        if overrides_call(type(m)):
            raise self.fail("it calls a module whose class has a __call__ of its own")
        last = next(iter(reversed(self.graph.nodes)))
        try:
            result = super().call_module(m, forward, args, kwargs)
            if self.failure is None:
                return result
            error: Exception = self.failure
        except Exception as raised:  # whatever a user's forward raises on traced values
            error = self.failure or raised
        self.failure = None
        name = self.path_of_module(m)
        # The next try does not begin it, and so leaves no half of it done.
        self.opaque = {**self.opaque, name: reason_of(error)}
        self._forget_after(last)
        return self.create_proxy("call_module", name, args, kwargs)

    def _forget_after(self, last: fx.Node) -> None:
        while (node := next(iter(reversed(self.graph.nodes)))) is not last:
            self.graph.erase_node(node)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        signature = inspect.signature(root_fn)
        given = self._given(signature)
        positional: list[Any] = [self.root]
        keyword: dict[str, Any] = {}
        for parameter in list(signature.parameters.values())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                if given.get(parameter.name):
                    raise self.fail(f"its forward takes any number of '{parameter.name}'")
                stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
                rest = self.create_proxy("placeholder", f"{stars}{parameter.name}", (), {})
                self.create_proxy("call_function", expect_none_given, (rest, parameter.name), {})
            elif parameter.kind is parameter.KEYWORD_ONLY:
                keyword[parameter.name] = self._argument(parameter, given)
            else:
                positional.append(self._argument(parameter, given))
        return lambda *args: root_fn(*args, **keyword), positional

    def _given(self, signature: inspect.Signature) -> dict[str, Any]:
        if self.call is None:
            return {}
        bound = signature.bind(self.root, *self.call.args, **self.call.kwargs)
        return dict(bound.arguments)

    def _argument(self, parameter: inspect.Parameter, given: dict[str, Any]) -> Any:
        name, optional = parameter.name, parameter.default is not parameter.empty
        if isinstance(parameter.default, torch.Tensor):
            raise self.fail(f"the default of '{name}' is a tensor")
        default = (parameter.default,) if optional else ()
        proxy = self.create_proxy("placeholder", name, default, {})
        value = given.get(name, parameter.default)
        if chooses_a_branch(value):
            self.create_proxy("call_function", expect_value, (proxy, value, name), {})
            return value
        proxy.node.meta["tested"] = self._tests_for_none
        if isinstance(value, torch.Tensor):
            self._tensors.add(proxy.node)
        elif any(map(chooses_a_branch, tree_leaves(value))):
            raise self.fail(f"'{name}' holds what may choose a branch")
        return proxy


class Retracer(Tracer):
    """Records code that was generated from a graph, where no argument chooses a branch."""

    def _argument(self, parameter: inspect.Parameter, given: dict[str, Any]) -> Any:
        default = () if parameter.default is parameter.empty else (parameter.default,)
        return self.create_proxy("placeholder", parameter.name, default, {})


def _autocast_state() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
