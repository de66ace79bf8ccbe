"""What a node may overwrite, because nobody else can see it, at any size."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from optimizer._graph import callee
from optimizer._inplace import add_over, mul_over

# They always make a tensor, a dense one, and do not keep it for a backward pass.
_MAKERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d,
    nn.ConvTranspose3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm,
    nn.GroupNorm, operator.matmul, torch.matmul, torch.bmm, torch.cat, operator.add, operator.mul,
    torch.add, torch.mul, add_over, mul_over,
)  # fmt: skip


def is_spare(value: object) -> bool:
    """Whether a value is sure to be a new tensor, and is read by one node, which may overwrite it.

    It is no input, no attribute and no output, and no view of it exists.
    """
    if not isinstance(value, fx.Node) or callee(value) not in _MAKERS:
        return False
    return len(value.users) == 1 and "out" not in value.kwargs
