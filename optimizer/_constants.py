"""Recording what depends on no input: factories, random numbers, plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode, _get_tensor_methods
from torch.utils._pytree import tree_leaves

from optimizer._vocabulary import FACTORIES, METADATA, READS_DATA


class RecordConstants(TorchFunctionMode):
    """While it is active, a tracer records also calls without a traced argument.

    fx asks torch whether a function is a method, which swaps the filters of warnings each time.
    """

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        name = getattr(func, "__name__", "")
        traced = any(isinstance(leaf, fx.Proxy) for leaf in leaves)
        constant = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if func in FACTORIES:
            constant, traced = traced or self.tracer.records(func), False
        of_another_kind = isinstance(func, torch._C.ScriptMethod | torch._ops.HigherOrderOperator)
        if of_another_kind or not (traced or (constant and name not in METADATA)):
            return func(*args, **kwargs)
        if not traced and name in READS_DATA:
            raise self.tracer.fail("it reads the value of a tensor")
        if func in _get_tensor_methods() or name == "__get__":
            return self.tracer.create_proxy("call_method", name, args, kwargs)
        return self.tracer.create_proxy("call_function", func, args, kwargs)
