"""Straight-line code whose Linear layers multiply integers of 8 bits, by torchao.

y = (s * q(x)) (w * q(W))^T + b: each row of a weight is scaled to [-127, 127] and rounded once,
each row of an input in every call, and the integer products add up exactly (Dettmers et al.,
2022, without the outliers). All else stays as it is.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.errors import InputError
from optimizer.core.node import attribute_of
from optimizer.lowering.partition import constant_weight, name_of
from optimizer.lowering.trace import NotStraightLineError


def require_torchao() -> None:
    """Refuse where the library is not installed.

    Raises:
        InputError: it is not.
    """
    if importlib.util.find_spec("torchao") is None:
        raise InputError("precision='int8' needs torchao: run python -m pip install torchao.")


def in_int8(line: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The same code with its Linear layers of constant float32 weights in 8 bits.

    Raises:
        NotStraightLineError: torchao cannot compute it.
    """
    module = fx.GraphModule(line, copy.deepcopy(line.graph))
    for node in list(module.graph.nodes):
        _quantize(module, node)
    module.graph.lint()
    module.recompile()
    try:
        with torch.no_grad():
            module(*inputs)
    except Exception as error:  # whatever torchao raises
        reason = str(error).strip().split("\n")[0]
        raise NotStraightLineError(f"torchao cannot compute it: {reason}") from error
    return module


def int8_linear(
    input: torch.Tensor,  # noqa: A002 - as torch calls it
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A Linear by whatever its weight says, under a name that no library of kernels takes over.

    torchao reads positional arguments only.
    """
    return F.linear(input, weight, bias)


def _quantize(module: fx.GraphModule, node: fx.Node) -> None:
    read = constant_weight(node) if name_of(node) == "linear" else None
    if read is None or attribute_of(read).dtype != torch.float32:
        return
    name = f"{read.target}_in_8_bits"
    setattr(module, name, _rounded(attribute_of(read)))
    with module.graph.inserting_before(node):
        node.replace_input_with(read, module.graph.get_attr(name))
    node.target = int8_linear


def _rounded(weight: torch.Tensor) -> nn.Parameter:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    linear = nn.Linear(1, 1, bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(linear, Int8DynamicActivationInt8WeightConfig())
    return linear.weight
