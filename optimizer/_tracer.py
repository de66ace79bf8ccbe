"""Recording a forward as a graph, with nothing of torch run and nothing baked in.

`torch.fx` leaves gaps that change answers: item assignment is a TypeError, `x += y` is
recorded as `x = x + y`, a random tensor or a buffer's value at trace time is baked in as a
constant, an optional argument is always taken to be given. This tracer records the first
three as what they are and binds the last to the example's value, behind a guard.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property

from optimizer._errors import CaptureError
from optimizer._graph import is_plain
from optimizer._guards import expect_value
from optimizer._inputs import Call
from optimizer._proxy import NOT_USER_CODE, Attribute, Value, answering_isinstance

# These change the shape of a tensor that earlier nodes already hold.
_CHANGES_SHAPE = frozenset((
    "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_",
    "transpose_", "unsqueeze_",
))  # fmt: skip
# What a tensor says of itself without its data being read.
_METADATA = frozenset((
    "__get__", "__len__", "__repr__", "__format__", "__hash__", "data_ptr", "detach", "dim",
    "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point",
    "is_same_size", "ndimension", "nelement", "numel", "requires_grad_", "size",
    "storage_offset", "stride", "type", "untyped_storage",
))  # fmt: skip
_READS_DATA = frozenset((
    "__array__", "__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist",
))  # fmt: skip
FACTORIES: frozenset[Callable[..., Any]] = frozenset((
    torch.arange, torch.as_tensor, torch.asarray, torch.empty, torch.empty_strided, torch.eye,
    torch.full, torch.linspace, torch.logspace, torch.normal, torch.ones, torch.rand,
    torch.randint, torch.randn, torch.randperm, torch.scalar_tensor, torch.tensor,
    torch.tril_indices, torch.triu_indices, torch.zeros,
))  # fmt: skip
_RETURN_A_TENSOR = (
    nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm,
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Tanh, nn.Identity,
    nn.modules.dropout._DropoutNd, nn.modules.pooling._AvgPoolNd, nn.Flatten,
)  # fmt: skip


class _RecordConstants(TorchFunctionMode):
    """Record also what depends on no input: factories, random numbers, plain tensors."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        name = getattr(func, "__name__", "")
        constant = any(isinstance(leaf, torch.Tensor) for leaf in leaves) or func in FACTORIES
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves) and func not in FACTORIES:
            return func(*args, **kwargs)
        if not constant or name in _METADATA or self.tracer.is_foreign_thread():
            return func(*args, **kwargs)
        if name in _READS_DATA:
            raise CaptureError("it reads the value of a tensor")
        if is_tensor_method_or_property(func):
            return self.tracer.create_proxy("call_method", name, args, kwargs)
        return self.tracer.create_proxy("call_function", func, args, kwargs)


class Tracer(fx.Tracer):
    """Trace a module, treating every submodule that cannot be traced as one opaque call.

    Args:
        call: the example inputs; they decide optional arguments and flags. Without them,
            defaults do.
        opaque: qualified names of submodules that must not be traced into.
    """

    proxy_buffer_attributes = True

    def __init__(self, call: Call | None = None, opaque: frozenset[str] = frozenset()) -> None:
        super().__init__(autowrap_functions=tuple(FACTORIES))
        self._autowrap_search.append(torch)  # a factory whose size is traced, torch.zeros(n)
        self.call = call
        self.opaque = opaque
        self._thread = threading.get_ident()
        self._attributes: dict[int, fx.Proxy] = {}
        self._names: dict[int, str] = {}
        self._tensors: set[fx.Node] = set()
        self._autocast = _autocast_state()

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        self._names = {
            id(tensor): name for name, tensor in [*root.named_buffers(), *root.named_parameters()]
        }
        with _RecordConstants(self), answering_isinstance(root, self.is_tensor):
            return super().trace(root, concrete_args)

    def is_foreign_thread(self) -> bool:
        """Tracing patches nn.Module for the whole process; other threads must not notice."""
        return threading.get_ident() != self._thread

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether a traced value is sure to be a tensor."""
        if node.op == "call_module":
            return isinstance(self.root.get_submodule(str(node.target)), _RETURN_A_TENSOR)
        return node.op == "get_attr" or node in self._tensors

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if kind == "call_method" and target in _CHANGES_SHAPE:
            raise CaptureError(f"it changes the shape of a tensor in place ({target})")
        if _autocast_state() != self._autocast:
            raise CaptureError("it enters autocast inside its forward")
        node = super().create_node(kind, target, *args, **kwargs)
        node.meta["source"] = _user_line()
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, dict) and type(a) is not dict and not isinstance(a, fx.Proxy):
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
        last = next(iter(reversed(self.graph.nodes)))
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:  # whatever a user's forward raises on traced values
            name = self.path_of_module(m)
            self._forget_after(last)
            return self.create_proxy("call_module", name, args, kwargs)

    def _forget_after(self, last: fx.Node) -> None:
        for node in reversed(self.graph.nodes):
            if node is last:
                return
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
                    raise CaptureError(f"its forward takes any number of '{parameter.name}'")
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
        default = (parameter.default,) if optional else ()
        proxy = self.create_proxy("placeholder", name, default, {})
        value = given.get(name, parameter.default)
        if value is None or isinstance(value, bool | str):
            self.create_proxy("call_function", expect_value, (proxy, value, name), {})
            return value
        if isinstance(value, torch.Tensor):
            self._tensors.add(proxy.node)
        return proxy


def _autocast_state() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _user_line() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*NOT_USER_CODE, "<")):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
