"""Seconds that optimizing takes, beside torch.fx's own fuse on the same models."""

from __future__ import annotations

from typing import ClassVar

from ._memory import give_freed_memory_back
from ._workloads import MODELS, PORTABLE, REWRITTEN, chain, load, rewriting

NODES_PER_LAYER = 3  # Linear, BatchNorm, ReLU


class _Cost:
    number = 1
    rounds = 1
    warmup_time = 0  # `rewriting` has made the first call
    timeout = 180
    version = "1"


class Models(_Cost):
    """Each model. No check of the result is part of it.

    What copies the weights has to get memory for them, as where a model is optimized once: that of
    the result before is given back.
    """

    version = "2"
    params: ClassVar[list[list[str]]] = [MODELS, REWRITTEN]
    param_names: ClassVar[list[str]] = ["model", "tool"]
    repeat = (7, 20, 1.0)

    def setup(self, model: str, tool: str) -> None:
        self.optimize = rewriting(load, (model, "cpu"), tool)
        give_freed_memory_back()

    def time_optimize(self, model: str, tool: str) -> None:
        self.optimize()


class Scaling(_Cost):
    """One chain of Linear, BatchNorm and ReLU, longer and longer: time should grow in step."""

    params: ClassVar[list[list[str]]] = [["300", "1000", "3000", "9000"], PORTABLE]
    param_names: ClassVar[list[str]] = ["nodes", "tool"]
    repeat = (3, 7, 1.0)

    def setup(self, nodes: str, tool: str) -> None:
        self.optimize = rewriting(chain, (int(nodes) // NODES_PER_LAYER,), tool)

    def time_optimize(self, nodes: str, tool: str) -> None:
        self.optimize()
