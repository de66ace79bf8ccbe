"""Straight-line code in mixed precision: products in 16 bits, or 8, all that is delicate in 32.

The rule is that of automatic mixed precision (Micikevicius et al., 2018), applied once instead of
in every call: convolutions and matrix products read and yield 16 bits, and add up in 32 inside
their kernels; what only moves values, or computes each from one or two others, follows its inputs;
norms, softmax, means and everything unknown stay as they are. Weights are rounded once.

A value whose magnitude comes close to what 16 bits can hold is kept in 32, and so is what reads it.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.errors import InputError
from optimizer.core.inputs import tensors_in
from optimizer.core.node import attribute_of, is_attribute, name_of_call, owner, run_nodes
from optimizer.lowering.partition import MOVED, POINTWISE, WEIGHTED, constant_weight
from optimizer.verify.equivalence import BOUNDS

HEADROOM = 16  # how much larger the values of later calls may be before they overflow


class Precision(NamedTuple):
    """16 or 8 bits of a kind, and the largest error that they may cause."""

    name: str
    dtype: torch.dtype
    budget: float  # relative to the largest value of an output

    @classmethod
    def of(cls, name: str | None, budget: float | None) -> Precision | None:
        """Return what a caller asks for; the budget is by default what so few bits explain.

        Raises:
            InputError: there is no such precision, none for the budget, or that is no error.
        """
        if name is None and budget is None:
            return None
        if name is None:
            raise InputError(f"error_budget={budget!r} is for a precision: pass that as well.")
        if not isinstance(name, str) or name not in _DTYPES:
            raise InputError(f"precision={name!r} does not exist: use 'bf16', 'fp16' or 'int8'.")
        if name == "int8" and importlib.util.find_spec("torchao") is None:
            raise InputError("precision='int8' needs torchao: run python -m pip install torchao.")
        dtype = _DTYPES[name]
        budget = BOUNDS.get(dtype, BOUNDS[torch.bfloat16]) if budget is None else budget
        if not isinstance(budget, int | float) or not 0 < budget < 1:
            raise InputError(f"error_budget is {budget!r}: pass a number between 0 and 1.")
        return cls(name, dtype, float(budget))


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
_PRODUCTS = WEIGHTED | {"mm", "addmm", "baddbmm"}


def in_precision(
    line: fx.GraphModule, calls: Sequence[Sequence[torch.Tensor]], low: torch.dtype
) -> fx.GraphModule:
    """Return the same code with products in few bits where no value of these calls overflows."""
    if low == torch.int8:
        return in_int8(line)
    module = fx.GraphModule(line, copy.deepcopy(line.graph))
    wide, overflowing = _ranges(module.graph, calls, torch.finfo(low).max / HEADROOM)
    reduced, casts = set[fx.Node](), dict[fx.Node, fx.Node]()
    for node in list(module.graph.nodes):
        floats = [read for read in node.all_input_nodes if read in wide]
        name, fits = name_of_call(node), overflowing.isdisjoint((node, *floats))
        follows = name in POINTWISE | MOVED and reduced.issuperset(floats)
        if floats and fits and (name in _PRODUCTS or follows):
            reduced.add(node)
        for read in floats:
            if (read in reduced) is not (node in reduced):
                casts[read] = casts.get(read) or _cast(read, low if node in reduced else None)
                node.replace_input_with(read, casts[read])
    return fx.GraphModule(module, module.graph)


def _cast(node: fx.Node, low: torch.dtype | None) -> fx.Node:
    """Return what reads a value in 16 bits, or in its own where there is no `low`."""
    with node.graph.inserting_after(node):
        if low and is_attribute(node):
            name = f"{node.target}_in_16_bits"
            owner(node).register_buffer(name, attribute_of(node).to(low))
            return node.graph.get_attr(name)
        cast = node.graph.call_method("to", (node, low or torch.float32))
    cast.meta = dict(node.meta)
    return cast


def _ranges(
    graph: fx.Graph, calls: Sequence[Sequence[torch.Tensor]], limit: float
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes whose values are float32 in some calls, and those that go beyond a limit."""
    wide, overflowing = set[fx.Node](), set[fx.Node]()
    placeholders = graph.find_nodes(op="placeholder")
    for inputs in calls:
        for node, value in run_nodes(graph.nodes, dict(zip(placeholders, inputs, strict=True))):
            tensors = tensors_in(value)
            if tensors and all(tensor.dtype == torch.float32 for tensor in tensors):
                wide.add(node)
                finite = (each.nan_to_num(0.0, 0.0, 0.0).abs() for each in tensors if each.numel())
                if any(each.max().item() > limit for each in finite):
                    overflowing.add(node)
    return wide, overflowing


def in_int8(line: fx.GraphModule) -> fx.GraphModule:
    """Return the same code with its Linear layers of constant float32 weights in 8 bits.

    y = (s * q(x)) (w * q(W))^T + b: each row of a weight is scaled to [-127, 127] and rounded
    once, each row of an input in every call, and the integer products add up exactly (Dettmers et
    al., 2022, without the outliers), by torchao. All else stays as it is.
    """
    torchao: Any = importlib.import_module("torchao.quantization")
    module = fx.GraphModule(line, copy.deepcopy(line.graph))
    for node in list(module.graph.nodes):
        read = constant_weight(node) if name_of_call(node) == "linear" else None
        if read is None or attribute_of(read).dtype != torch.float32:
            continue
        name = f"{read.target}_in_8_bits"
        linear = nn.Linear(1, 1, bias=False)
        linear.weight = nn.Parameter(attribute_of(read), requires_grad=False)
        torchao.quantize_(linear, torchao.Int8DynamicActivationInt8WeightConfig())
        setattr(module, name, linear.weight)
        with module.graph.inserting_before(node):
            node.replace_input_with(read, module.graph.get_attr(name))
        node.target = int8_linear
    module.recompile()
    return module


def int8_linear(value: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    """Call `linear` under a name that no library of kernels takes over.

    torchao reads positional arguments only.
    """
    return F.linear(value, weight, bias)
