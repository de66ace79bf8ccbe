"""Running one node on meta tensors, and what its ATen operators read, write and compute."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from optimizer._effects import Effects
from optimizer._graph import module_of
from optimizer._observation import Facts
from optimizer._trees import storages_in, tensors_in


def run(node: fx.Node, facts: Facts) -> Any:
    """Call what a node calls, with no rule for its shape in the place of its operators."""
    given = (node.args, dict(node.kwargs))
    args, kwargs = fx.node.map_arg(given, lambda each: each.meta["fact"].value)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "meta"}
    if node.op == "call_module":
        return facts.to_meta(module_of(node))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


class Operators(Effects):  # type: ignore[no-untyped-call]
    """Count what the operators do that run a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if _runs_a_kernel(func, (args, kwargs), result):
            formula = flop_registry.get(func.overloadpacket)
            self.launches += 1
            self.flops += formula(*args, **kwargs, out_val=result) if formula else 0
            self.bytes += sum(map(_bytes, tensors_in((args, kwargs, result))))
        return result


def _runs_a_kernel(func: Any, given: Any, result: Any) -> bool:
    """A view takes none, nor does a tensor without content, a number, or a change of shape."""
    without_content = "empty" in str(func) or func is torch.ops.aten.scalar_tensor.default
    if torch.Tag.inplace_view in func.tags or without_content:
        return False
    return func._schema.is_mutable or not storages_in(result) <= storages_in(given)


def _bytes(tensor: torch.Tensor) -> int:
    """The bytes of the elements of a tensor; those that it repeats lie in memory once."""
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.itemsize if tensor.numel() else 0
