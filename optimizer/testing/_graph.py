"""A generated model as a `GraphModule`, each operation of which is one node."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

IN_PLACE = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor,
    operator.ilshift, operator.irshift, operator.setitem,
)  # fmt: skip


def as_graph(model: nn.Module) -> fx.GraphModule:
    """A GraphModule that shares the submodules of `model`, with a node for each operation.

    Args:
        model: its forward has no loops, and takes what it has by default from what it is given.

    Raises:
        fx.proxy.TraceError: the forward asks for the value of a tensor.
    """
    tracer = _Tracer()
    with _Recorded(tracer):
        graph = tracer.trace(model)
    return fx.GraphModule(model, graph)


class _Proxy(fx.Proxy):
    """Stands for a tensor; what is written to it, or to a view that is no call, is recorded."""

    __array_priority__ = torch.Tensor.__array_priority__  # numpy's numbers leave products to it

    def __getattr__(self, name: str) -> Any:
        # Named tuples of results have these, which are methods of sparse tensors.
        if name not in ("values", "indices") and callable(getattr(torch.Tensor, name, None)):
            return super().__getattr__(name)
        return self.tracer.create_proxy("call_function", getattr, (self, name), {})


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    def record(self: fx.Proxy, *args: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, *args), {})

    return record


for _each in IN_PLACE:
    setattr(_Proxy, f"__{_each.__name__}__", _recorded(_each))


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_arg(self, a: Any) -> Any:
        return super().create_arg(a.item() if type(a).__module__ == "numpy" else a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


class _Recorded(TorchFunctionMode):
    """Records what makes tensors of nothing, too."""

    def __init__(self, tracer: fx.Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracer.create_proxy("call_function", func, args, kwargs or {})
