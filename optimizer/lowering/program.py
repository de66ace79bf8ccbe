"""A module's computation as a plain function, and outputs with the strides of eager.

A module is called through its hooks and looks its parts up by a failing access. That is little
while it is warm; after a forward, Python's own data are far from the processor, and three modules
within one another took a quarter of a millisecond of each call of mobilenet_v3_large.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn


def as_function(module: nn.Module) -> Callable[..., Any]:
    """What a module computes with the weights and submodules that it has now, without hooks."""
    if not isinstance(module, fx.GraphModule):
        return module.forward
    held = vars(module) | module._parameters | module._buffers
    parts = {name: each for name, each in module._modules.items() if each is not None}
    held |= {name: as_function(each) for name, each in parts.items()}
    return functools.partial(type(module).forward, SimpleNamespace(**held))


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
