"""live(n) = the bytes of all storages that are made at n or before and read at n or after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn

from optimizer.analysis.cost import observed
from optimizer.core.context import own_random_numbers
from optimizer.core.device import Device, device_of
from optimizer.core.inputs import Call, ExampleInputs, as_call, tensors_in
from optimizer.core.node import describe, shape_text
from optimizer.core.report import columns
from optimizer.verify.check import NodeByNode


@dataclass(frozen=True)
class Live:
    """The bytes of activations that one node makes, and all that are alive while it runs."""

    node: str
    text: str
    shape: str
    made: int
    live: int
    unknown: str = ""  # why nothing is known of what this node makes; it counts as nothing
    workspace: int = 0  # what it takes besides, while it runs, where that was measured


@dataclass(frozen=True)
class Memory:
    """The activations alive at each node, in the order of execution."""

    rows: tuple[Live, ...]

    @property
    def peak(self) -> int:
        """The least memory that a call in this order takes above its weights and inputs."""
        return self.at.live

    @property
    def at(self) -> Live:
        """The first node at which the peak is reached."""
        return max(self.rows, key=lambda row: row.live)

    @property
    def highest(self) -> Live:
        """The first node at which most is taken, workspaces included."""
        return max(self.rows, key=lambda row: row.live + row.workspace)

    def __str__(self) -> str:
        head = ("node", "calls", "shape", *(f"{name:>12}" for name in ("makes", "live", "besides")))
        rows = [head]
        for row in self.rows:
            sizes = map("{:12,}".format, (row.made, row.live, row.workspace))
            rows.append((row.node, row.text, row.unknown or row.shape, *sizes))
        most = self.highest
        besides = f"; with workspaces {most.live + most.workspace:,} at {most.node}"
        told = besides if any(row.workspace for row in self.rows) else ""
        return f"{columns(rows)}\n\npeak {self.peak:,} bytes at {self.at.node}{told}"


def memory(model: nn.Module, example_inputs: ExampleInputs, *, workspaces: bool = False) -> Memory:
    """A lower bound of a model's peak memory, node by node.

    A storage lives from the node that makes it to the last reader of any view of it; what is
    returned stays. Weights and inputs are there before, and what an operator takes for itself
    while it runs is not seen. What a mask chooses is counted as if it chose all.

    Args:
        model: any module that can be recorded.
        example_inputs: what it is called with.
        workspaces: run each node, and measure what it takes besides what it makes.

    Raises:
        InputError: the model or the inputs cannot be used.
        CaptureError: the model cannot be recorded; the message says why.
        DeviceError: workspaces are asked for on a device that cannot be measured.
    """
    module, facts = observed(model, example_inputs)
    nodes = list(module.graph.nodes)
    sizes, lives = _lifetimes(nodes, facts.external)
    made, freed = [0] * len(nodes), [0] * (len(nodes) + 1)
    for storage, (first, last) in lives.items():
        made[first] += sizes[storage]
        freed[last + 1] += sizes[storage]
    live = accumulate(new - old for new, old in zip(made, freed, strict=False))
    rows = tuple(
        Live(n.name, describe(n), shape_text(n), new, total, n.meta["fact"].error)
        for n, new, total in zip(nodes, made, live, strict=False)
    )
    return Memory(_with_workspaces(rows, module, as_call(example_inputs)) if workspaces else rows)


def _with_workspaces(
    rows: tuple[Live, ...], module: fx.GraphModule, call: Call
) -> tuple[Live, ...]:
    device = device_of(tensors_in([*call, *module.parameters()]))
    run = _Measured(module, call.map(torch.clone), device)
    with own_random_numbers(), torch.no_grad():
        run.run()
    return tuple(replace(row, workspace=max(0, run.taken[row.node] - row.made)) for row in rows)


class _Measured(NodeByNode):
    """Measure the memory that each node takes. Its module is a copy, so buffers may be written."""

    def __init__(self, module: fx.GraphModule, call: Call, device: Device) -> None:
        super().__init__(module, call)
        self.device, self.taken = device, dict[str, int]()

    def run_node(self, n: fx.Node) -> Any:
        results: list[Any] = []
        run = super().run_node
        self.taken[n.name] = self.device.peak_memory(lambda: results.append(run(n)))
        return results.pop()


def _lifetimes(
    nodes: list[fx.Node], external: set[int]
) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """The bytes of each storage that a call makes, and its first and last node."""
    place = {node: index for index, node in enumerate(nodes)}
    sizes: dict[int, int] = {}
    lives: dict[int, tuple[int, int]] = {}
    for node, index in place.items():
        read = max((place[user] for user in node.users), default=index)
        for tensor in tensors_in(node.meta["fact"].value):
            storage = tensor.untyped_storage()
            first, last = lives.get(storage._cdata, (index, read))
            if storage._cdata not in external:
                sizes[storage._cdata] = storage.nbytes()
                lives[storage._cdata] = first, max(last, read)
    return sizes, lives
