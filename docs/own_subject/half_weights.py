"""A rewriter of one's own: Linear layers that keep their weights in 16 bits."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F


class HalfLinear(nn.Module):
    """A Linear whose weight is rounded to 16 bits, and widened in each call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().half())
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


def subject(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    """What is called in the place of a model; the model stays as it is."""
    rewritten = copy.deepcopy(model)
    for parent in rewritten.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, name, HalfLinear(child))
    return rewritten


subject.promise = 1e-3  # of an output's norm; without it, the fuzz hunts for what differs
