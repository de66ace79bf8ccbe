"""What the tracer knows of torch's functions by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from optimizer._inplace import INPLACE_OPERATORS

# These change the shape of a tensor that earlier nodes already hold.
CHANGES_SHAPE = frozenset((
    "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_",
    "transpose_", "unsqueeze_",
))  # fmt: skip
# What a tensor says of itself without its data being read.
METADATA = frozenset((
    "__get__", "__len__", "__repr__", "__format__", "__hash__", "data_ptr", "detach", "dim",
    "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point",
    "is_same_size", "ndimension", "nelement", "numel", "requires_grad_", "size",
    "storage_offset", "stride", "type", "untyped_storage",
))  # fmt: skip
READS_DATA = frozenset((
    "__array__", "__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist",
))  # fmt: skip
FACTORIES: frozenset[Callable[..., Any]] = frozenset((
    torch.arange, torch.as_tensor, torch.asarray, torch.empty, torch.empty_strided, torch.eye,
    torch.full, torch.linspace, torch.logspace, torch.normal, torch.ones, torch.rand,
    torch.randint, torch.randn, torch.randperm, torch.scalar_tensor, torch.tensor,
    torch.tril_indices, torch.triu_indices, torch.zeros,
))  # fmt: skip
# What these make is not the same each time; what is empty holds what lay in memory.
RANDOM = (
    torch.empty, torch.empty_strided, torch.normal, torch.rand, torch.randint, torch.randn,
    torch.randperm,
)  # fmt: skip
# These return their input, or a copy where dtype, device or strides make them.
MAY_COPY = frozenset((
    "bfloat16", "bool", "contiguous", "cpu", "cuda", "double", "flatten", "float", "half", "int",
    "long", "ravel", "reshape", "reshape_as", "short", "to", "type", "type_as",
))  # fmt: skip
RETURN_A_TENSOR = (
    nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm,
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Tanh, nn.Identity,
    nn.modules.dropout._DropoutNd, nn.modules.pooling._AvgPoolNd, nn.Flatten,
)  # fmt: skip


def writes(kind: str, target: Any) -> bool:
    """Whether a node writes a tensor, by the name of what it calls."""
    method = kind == "call_method" and str(target).endswith("_") and not str(target).endswith("__")
    return method or target is operator.setitem or target in INPLACE_OPERATORS
