"""Outputs with the strides that a caller is used to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from optimizer.lowering._function import as_function


class LaidOut(nn.Module):
    """A program whose outputs get the strides that they have in eager."""

    def __init__(self, program: nn.Module, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.program, self.run = program, as_function(program)
        self.strides = [tensor.stride() for tensor in outputs]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(_laid_out, self.run(*inputs), self.strides))


def _laid_out(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The same values with these strides; where one is 0, elements are read again and again."""
    if tensor.stride() == strides:
        return tensor
    held = tensor[tuple(slice(0, None if stride else 1) for stride in strides)]
    made = torch.empty_strided(held.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(held).expand(tensor.shape)
