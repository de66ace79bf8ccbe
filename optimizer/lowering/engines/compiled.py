"""What an engine made of a region, and when that runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from optimizer.core.node import attribute_of
from optimizer.lowering.engines.aten import in_aten
from optimizer.lowering.partition import LARGEST, as_function, name_of

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Engine(Protocol):
    """A compiler or runtime for float32 on the CPU.

    Attributes:
        name: what `engines=` calls it.
        title: what a report calls it.
        module: what is imported.
    """

    name: str
    title: str
    module: str

    def fault(self, version: str) -> str:
        """Why this version is not used; empty if it is."""

    def compile(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor], threads: int) -> Run:
        """A program for contiguous float32 inputs of these sizes, to be called by any thread.

        It leaves them as they are and returns memory of its own. `graph` holds functions of ATen,
        and weights that it may keep.

        Raises:
            Exception: of whatever kind, if it cannot.
        """


class Compiled(nn.Module):
    """A region by an engine, for moderate inputs; by torch for others.

    Engines make 0 of NaN in a ReLU. A norm is beyond the bound where an element is NaN, infinite
    or huge; of others, which a region makes only finite numbers of, a product with a float32
    weight overflows only where layers amplify 10^28-fold. A forked process has none of the
    engine's threads: there the region runs by torch, too.

    Raises:
        ValueError: the region is not for engines.
        Exception: of the engine's, if it cannot compile it.
    """

    def __init__(
        self, engine: Engine, region: fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        read = region.graph.find_nodes(op="get_attr")
        read = [node for node in read if any(name_of(user) != "index" for user in node.users)]
        held = list(map(attribute_of, read))
        if not all(each.is_cpu and each.dtype == torch.float32 for each in (*inputs, *held)):
            raise ValueError("it is not in float32 on the CPU")
        if not all(map(_is_moderate, held)):
            raise ValueError("a constant is not finite, or huge")
        self.region, self.run_region = region, as_function(region)
        self.run = engine.compile(in_aten(region, inputs), inputs, torch.get_num_threads())
        self.process = os.getpid()

    def forward(self, *inputs: torch.Tensor) -> Any:
        """What the region makes of inputs of the sizes that it was compiled for."""
        if os.getpid() == self.process and all(map(_is_moderate, inputs)):
            return self.run([tensor.resolve_neg().contiguous() for tensor in inputs])
        return self.run_region(*inputs)


def _is_moderate(tensor: torch.Tensor) -> bool:
    return bool(torch.linalg.vector_norm(tensor).item() <= LARGEST)
