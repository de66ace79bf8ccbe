"""A program as one CUDA graph: all of its kernels in one launch, on memory of their own.

A graph reads and writes the same memory in every replay. So the inputs of a call are copied to
where the graph reads them, and its outputs from where it writes them: who holds an output keeps it.
Calls take turns, also where they are made in several threads or on several streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from optimizer.core.device import Cuda, device_of


class CudaGraph(nn.Module):
    """A program for inputs of the sizes, strides and dtypes of the given ones.

    It holds what one forward needs at its peak, its inputs and outputs, for as long as it lives.

    Raises:
        RuntimeError: the program does something that cannot be recorded, such as to wait.
    """

    def __init__(self, program: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        device = device_of(inputs)
        if not isinstance(device, Cuda):
            raise TypeError(f"{device.name} has no CUDA graphs")
        self.turn = device.turns()
        self.replay, self.own, self.outputs = device.record(program, inputs)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs for some inputs, which are left as they are."""
        with self.turn():
            torch._foreach_copy_(self.own, inputs)
            self.replay()
            return tuple(output.clone() for output in self.outputs)
