"""seconds(node) = max(FLOPs / (FLOPs per second), bytes / (bytes per second)): a roofline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn

from optimizer._graph import describe, shape_text
from optimizer._inputs import ExampleInputs
from optimizer._known_results import EVERY_MASK_IS_FULL
from optimizer._observation import Facts
from optimizer._report import columns
from optimizer.analysis._ceilings import Ceilings, ceilings
from optimizer.analysis._observed import observed
from optimizer.analysis._operators import Operators, run


@dataclass(frozen=True)
class Cost:
    """What one node does: arithmetic, tensors read and written, operators that run a kernel."""

    node: str = ""
    text: str = ""
    shape: str = ""
    flops: int = 0
    bytes: int = 0
    launches: int = 0
    unknown: str = ""  # why nothing is known of this node; it counts as nothing

    @property
    def intensity(self) -> float:
        """Floating-point operations for each byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    def seconds(self, at: Ceilings) -> float:
        """The least time that this takes on such a machine."""
        return max(self.flops / at.flops, self.bytes / at.bytes)

    def bound(self, at: Ceilings) -> str:
        """What that time is spent on: compute, memory, or nothing."""
        if self.unknown or not self.launches:
            return "unknown" if self.unknown else ""
        return "compute" if self.flops / at.flops > self.bytes / at.bytes else "memory"


@dataclass(frozen=True)
class Roofline:
    """The cost of each node, and the least time that it takes below two ceilings."""

    rows: tuple[Cost, ...]
    ceilings: Ceilings

    @property
    def flops(self) -> int:
        """Of all nodes, as `torch.utils.flop_counter` counts: products, and nothing else."""
        return sum(row.flops for row in self.rows)

    @property
    def bytes(self) -> int:
        """Read and written by all nodes."""
        return sum(row.bytes for row in self.rows)

    @property
    def launches(self) -> int:
        """ATen operators that run a kernel."""
        return sum(row.launches for row in self.rows)

    @property
    def seconds(self) -> float:
        """The sum over all nodes, one after the other."""
        return sum(row.seconds(self.ceilings) for row in self.rows)

    def __str__(self) -> str:
        return f"{columns([_HEAD, *map(self._line, self.rows)])}\n\n{self.totals()}"

    def totals(self) -> str:
        """All of it in one line."""
        unknown = sum(bool(row.unknown) for row in self.rows)
        rest = f", and {unknown} nodes of which nothing is known" if unknown else ""
        return (
            f"{self.launches} kernels, {self.flops / 1e9:.3f} GFLOP, {self.bytes / 1e6:.1f} MB,"
            f" {self.seconds * 1e3:.3f} ms at {self.ceilings}{rest}"
        )

    def _line(self, row: Cost) -> tuple[str, ...]:
        flops, moved = f"{row.flops / 1e6:10.2f}", f"{row.bytes / 1e6:10.3f}"
        time = f"{row.seconds(self.ceilings) * 1e6:10.1f}"
        numbers = (f"{row.launches:7}", flops, moved, f"{row.intensity:9.1f}", time)
        return (row.node, row.text, row.unknown or row.shape, *numbers, row.bound(self.ceilings))


_NUMBERS = (f"{'kernels':>7}", f"{'MFLOP':>10}", f"{'MB':>10}", f"{'FLOP/byte':>9}", f"{'us':>10}")
_HEAD = ("node", "calls", "shape", *_NUMBERS, "bound by")


def roofline(
    model: nn.Module, example_inputs: ExampleInputs, at: Ceilings | None = None
) -> Roofline:
    """What a model costs node by node, below the ceilings `at`, else those measured here.

    Raises:
        InputError: the model or the inputs have no use.
        CaptureError: the model cannot be recorded; the message says why.
    """
    module, facts = observed(model, example_inputs)
    calls = [node for node in module.graph.nodes if node.op.startswith("call")]
    return Roofline(tuple(_cost(node, facts) for node in calls), at or ceilings())


def _cost(node: fx.Node, facts: Facts) -> Cost:
    told = node.name, describe(node), shape_text(node)
    ran = Operators()
    try:
        if node.meta["fact"].error:
            return Cost(*told, unknown=node.meta["fact"].error)
        with torch.no_grad(), torch.device("meta"), EVERY_MASK_IS_FULL, ran:
            run(node, facts)
    except Exception as error:
        return Cost(*told, unknown=str(error).partition("\n")[0])
    return Cost(*told, ran.flops, ran.bytes, ran.launches)
