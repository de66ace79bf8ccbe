"""Ours beside what a user would pick instead: hours of work, so n/a unless it is asked for.

`BENCHMARK_PEERS` names the models, such as `resnet18,vit_b_16`. One process measures them all, on
one thread; the benchmarks only read what it found. `python -m benchmarks.peers` prints tables.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from benchmarks._unit import counts
from benchmarks._workloads import TORCHVISION
from benchmarks.subjects import EAGER, PEER, names

from ._process import worker
from ._rounds import Cell, Plan, measured

ASKED = "BENCHMARK_PEERS"
_PEERS = [peer for peer in names(PEER) if peer != EAGER]
_PLACE = {"device": "cpu", "dtype": "float32", "batch": 1, "threads": 1}


class Peers:
    """Each model in each peer's hands, called in turn with eager."""

    params: ClassVar[list[list[str]]] = [TORCHVISION, _PEERS]
    param_names: ClassVar[list[str]] = ["model", "peer"]
    timeout = 60
    version = "1"

    def setup_cache(self) -> dict[tuple[str, str], Cell]:
        models = os.environ.get(ASKED)
        return dict(pair for model in models.split(",") for pair in _of(model)) if models else {}

    setup_cache.timeout = 12 * 3600

    def setup(self, cells: dict[tuple[str, str], Cell], model: str, peer: str) -> None:
        self.cell = cells.get((model, peer), {"reason": f"{ASKED} does not name it"})
        if "reason" in self.cell:
            raise NotImplementedError(self.cell["reason"])

    @counts("of eager")
    def track_relative_latency(self, *_: object) -> dict[str, Any]:
        times = zip(self.cell["seconds"], self.cell["eager_seconds"], strict=True)
        return {"samples": [seconds / eager for seconds, eager in times], "number": 1}

    @counts("seconds")
    def track_preparation(self, *_: object) -> float:
        return self.cell["prepared"]


def _of(model: str) -> list[tuple[tuple[str, str], Cell]]:
    def start(peer: str) -> Any:
        return worker({**_PLACE, "model": model, "peer": peer}, Plan().limit)

    return [((model, peer), cell) for peer, cell in measured(_PEERS, start, Plan()).items()]
