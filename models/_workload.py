"""What a workload is: a module ready to run, and the inputs to run it with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn


# Compared by identity: modules have no equality, and tensors compare element by element.
@dataclass(frozen=True, eq=False)
class Workload:
    """A module in eval mode, and the positional arguments of one call of it.

    `module(*example_inputs)` runs. Floating-point parameters, buffers and inputs are float32.
    """

    name: str
    family: str
    module: nn.Module
    example_inputs: tuple[torch.Tensor, ...]

    def to(self, device: torch.device | str) -> Workload:
        """The same workload with its inputs and its module, which is moved itself, on `device`."""
        inputs = tuple(tensor.to(device) for tensor in self.example_inputs)
        return replace(self, module=self.module.to(device), example_inputs=inputs)
