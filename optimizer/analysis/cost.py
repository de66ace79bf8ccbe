"""What each node of a model computes, moves and keeps alive.

seconds(node) = max(FLOPs / (FLOPs per second), bytes / (bytes per second)).
live(node) = the bytes of all storages that are made at it or before and read at it or after.
"""

from __future__ import annotations

import math
import timeit
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import flop_registry

from optimizer.analysis.measure import compare, measure
from optimizer.core.errors import CaptureError, InputError
from optimizer.core.inputs import ExampleInputs, as_call, require_module, storages_in, tensors_in
from optimizer.core.node import describe, shape_text
from optimizer.core.report import Report, columns
from optimizer.facts.facts import Effects
from optimizer.frontend.dynamo import capture_by_dynamo
from optimizer.frontend.symbolic import capture_call


@dataclass(frozen=True)
class Ceilings:
    """The most floating-point operations and bytes per second of a machine."""

    flops: float
    bytes: float

    def __str__(self) -> str:
        return f"{self.flops / 1e9:.1f} GFLOP/s, {self.bytes / 1e9:.1f} GB/s"


def ceilings() -> Ceilings:
    """Measure one thread of this machine's CPU: a matrix product, and a copy beyond its caches."""
    side, count = 1024, 1 << 25
    matrix, source = torch.ones(side, side), torch.ones(count)
    target = torch.empty_like(source)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        product = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=4))
        copy = min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=4))
    finally:
        torch.set_num_threads(threads)
    return Ceilings(2 * side**3 / product, 2 * source.nbytes / copy)


class Operators(Effects):  # type: ignore[no-untyped-call]
    """Count what the operators do that run a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.bytes = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if _runs_a_kernel(func, (args, kwargs), result):
            formula = flop_registry.get(func.overloadpacket)
            self.launches += 1
            self.flops += formula(*args, **kwargs, out_val=result) if formula else 0
            self.bytes += sum(map(_bytes, tensors_in((args, kwargs, result))))
        return result


def _runs_a_kernel(func: Any, args: Any, result: Any) -> bool:
    """Return whether it does: no view, tensor without content, number or change of shape does."""
    without_content = "empty" in str(func) or func is torch.ops.aten.scalar_tensor.default
    if torch.Tag.inplace_view in func.tags or without_content:
        return False
    return func._schema.is_mutable or not storages_in(result) <= storages_in(args)


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; those that it repeats lie in memory once."""
    sizes = (n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.itemsize if tensor.numel() else 0


@dataclass(frozen=True)
class Cost:
    """What one node does, in operations, bytes and kernels, and what is alive while it runs.

    `made` are the bytes of the activations that it makes, `live` those of all alive meanwhile.
    """

    node: str = ""
    text: str = ""
    shape: str = ""
    flops: int = 0
    bytes: int = 0
    launches: int = 0
    made: int = 0
    live: int = 0
    unknown: str = ""  # why nothing is known of this node; it counts as nothing

    def seconds(self, at: Ceilings) -> float:
        """Return the least time that this takes on such a machine."""
        return max(self.flops / at.flops, self.bytes / at.bytes)

    def bound(self, at: Ceilings) -> str:
        """Return what that time is spent on: compute, memory, or nothing."""
        if self.unknown or not self.launches:
            return "unknown" if self.unknown else ""
        return "compute" if self.flops / at.flops > self.bytes / at.bytes else "memory"


@dataclass(frozen=True)
class Roofline:
    """The cost of each node in the order of execution, and of all, below two ceilings."""

    rows: tuple[Cost, ...]
    ceilings: Ceilings
    flops: int  # as `torch.utils.flop_counter` counts: of products, and of nothing else
    bytes: int  # read and written
    launches: int  # ATen operators that run a kernel

    @property
    def seconds(self) -> float:
        """Return the sum over all nodes, one after the other."""
        return sum(row.seconds(self.ceilings) for row in self.rows)

    @property
    def peak(self) -> int:
        """Return the least memory that a call in this order takes above its weights and inputs."""
        return max(row.live for row in self.rows)

    def __str__(self) -> str:
        head = "kernels", "MFLOP", "MB", "us", "bytes alive"
        rows = [("node", "calls", "shape", *(f"{name:>11}" for name in head), "bound by")]
        for row in self.rows:
            work, time = (row.flops / 1e6, row.bytes / 1e6), row.seconds(self.ceilings) * 1e6
            numbers = f"{row.launches:11}", *(f"{n:11.3f}" for n in work), f"{time:11.1f}"
            row_ends = f"{row.live:11,}", row.bound(self.ceilings)
            rows.append((row.node, row.text, row.unknown or row.shape, *numbers, *row_ends))
        return "\n".join([*columns(rows), "", self.totals()])

    def totals(self) -> str:
        """Return all of it in one line."""
        unknown = sum(bool(row.unknown) for row in self.rows)
        most = max(self.rows, key=lambda row: row.live)
        rest = f", and {unknown} nodes of which nothing is known" if unknown else ""
        return (
            f"{self.launches} kernels, {self.flops / 1e9:.3f} GFLOP, {self.bytes / 1e6:.1f} MB,"
            f" {self.seconds * 1e3:.3f} ms at {self.ceilings}, at most"
            f" {most.live:,} bytes alive, at {most.node}{rest}"
        )


def roofline(
    model: nn.Module, example_inputs: ExampleInputs, at: Ceilings | None = None
) -> Roofline:
    """Return what a model costs node by node, below the ceilings `at`, else those measured here.

    A storage lives from the node that makes it to the last reader of any view of it; what is
    returned stays. Weights and inputs are there before, and what an operator takes for itself
    while it runs is not seen. What a mask chooses is counted as if it chose all.

    Raises:
        InputError: an argument cannot be used.
        CaptureError: the model cannot be recorded; the message says why.
    """
    if not isinstance(at, Ceilings | None):
        raise InputError(f"at is {at!r}: pass optimizer.analysis.Ceilings, or None to measure.")
    call = as_call(example_inputs)
    try:
        module = capture_call(require_module(model), call)
    except CaptureError:
        module = capture_by_dynamo(model, call)
    facts, nodes = module.meta["facts"], list(module.graph.nodes)
    made, live = [0] * len(nodes), [0] * len(nodes)
    for size, first, last in _lifetimes(nodes, facts.external):
        made[first] += size
        for place in range(first, last + 1):
            live[place] += size
    rows = []
    for node, new, total in zip(nodes, made, live, strict=True):
        calls, ran = node.op.startswith("call"), Operators()
        unknown = node.meta["fact"].error if calls else ""
        try:
            if calls and not unknown:
                facts.run(node, ran)
        except Exception as error:
            ran, unknown = Operators(), str(error).partition("\n")[0]
        work = ran.flops, ran.bytes, ran.launches
        rows.append(Cost(node.name, describe(node), shape_text(node), *work, new, total, unknown))
    sums = (sum(getattr(row, of) for row in rows) for of in ("flops", "bytes", "launches"))
    return Roofline(tuple(rows), at or ceilings(), *sums)


def measured(model: nn.Module, fast: Any, example_inputs: ExampleInputs) -> Report:
    """Return the report of an optimized module with what was counted and timed.

    Kernels, FLOPs and bytes are those of the portable code; what cannot be recorded has none.

    Raises:
        DeviceError: the inputs are on a device that cannot be measured.
    """
    rounds = int(0.25 / measure(model, example_inputs, repeats=3).latency.median)  # in a second
    compared = compare(model, fast, example_inputs, rounds=min(50, max(6, rounds)))
    sides = compared.model, compared.fast
    figures: dict[str, Any] = {}
    with suppress(CaptureError):
        costs = [roofline(each, example_inputs, Ceilings(1, 1)) for each in (model, fast)]
        counts = {"kernels": "launches", "FLOPs": "flops", "bytes moved": "bytes"}
        figures = {name: [getattr(c, each) for c in costs] for name, each in counts.items()}
    figures["milliseconds"] = [1e3 * each.latency.median for each in sides]
    figures["peak memory"] = [each.peak_memory for each in sides]
    report: Report = replace(fast.report, figures=figures, compared=str(compared))
    return report


def _lifetimes(nodes: list[fx.Node], external: set[int]) -> list[tuple[int, int, int]]:
    """Return the bytes of each storage that a call makes, and its first and last node's place."""
    place = {node: index for index, node in enumerate(nodes)}
    lives: dict[int, tuple[int, int, int]] = {}
    for node, index in place.items():
        read = max((place[user] for user in node.users), default=index)
        for tensor in tensors_in(node.meta["fact"].value):
            storage = tensor.untyped_storage()
            _, first, last = lives.get(storage._cdata, (0, index, read))
            lives[storage._cdata] = storage.nbytes(), first, max(last, read)
    return [life for storage, life in lives.items() if storage not in external]
