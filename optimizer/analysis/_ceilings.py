"""What this machine can do at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ceilings:
    """What a machine can do at best, in floating-point operations and bytes per second."""

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
        product = _fastest(lambda: matrix @ matrix)
        copy = _fastest(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)
    return Ceilings(2 * side**3 / product, 2 * source.nbytes / copy)


def _fastest(run: Callable[[], object], times: int = 4) -> float:
    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return min(seconds() for _ in range(times))
