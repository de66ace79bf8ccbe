"""The benchmarks of one forward, which each device's module makes its own.

Every benchmark is prepared once a process and called before it is measured: asv runs `setup`
before each sample, and one cold sample can hide a slow-down of half.
Raise `version` when what is measured changes, here, in `_workloads` or in `subjects`: asv then
starts a new series.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ._unit import counts
from ._workloads import EVERY_MODEL, REWRITTEN, VARIANTS, forward, load, offered, subject


class _Forward:
    """A benchmark over models and variants, on the `device` that a subclass names."""

    device: ClassVar[str]
    params: ClassVar[list[list[str]]] = [EVERY_MODEL, VARIANTS]
    param_names: ClassVar[list[str]] = ["model", "variant"]
    timeout = 120
    version = "1"


class _Latency(_Forward):
    """Seconds of one forward, until the device is done."""

    number = 1
    repeat = (10, 50, 1.0)  # at least, at most, and for at most so many seconds between the two
    rounds = 1
    warmup_time = 0.1

    def setup(self, model: str, variant: str) -> None:
        self.forward = forward(model, variant, self.device)

    def time_forward(self, model: str, variant: str) -> None:
        self.forward()


class _Memory(_Forward):
    """Most bytes held during one forward above weights and inputs."""

    def setup(self, model: str, variant: str) -> None:
        self.subject = subject(model, variant, self.device)
        self.measure = offered("optimizer", "measure")

    @counts("bytes")
    def track_peak_memory(self, model: str, variant: str) -> int:
        return self.measure(*self.subject, repeats=1, warmup=1).peak_memory


class _Paired(_Forward):
    """Time of a variant over time of eager, both called in turn in one process.

    Below 1 is faster. What the machine does meanwhile slows both alike, so this finds differences
    that two latencies measured apart cannot. Each round is one sample.
    """

    params: ClassVar[list[list[str]]] = [EVERY_MODEL, REWRITTEN]
    seconds = 1.0
    rounds_between = (7, 50)

    def setup(self, model: str, variant: str) -> None:
        self.eager, self.inputs = load(model, self.device)
        self.rewritten, _ = subject(model, variant, self.device)
        self.compare = offered("optimizer", "compare")
        self.rounds_to_run = self._rounds()

    def _rounds(self) -> int:
        """As many as fit the time, within bounds."""
        measure = offered("optimizer", "measure")
        latency = measure(self.eager, self.inputs, repeats=1, warmup=1).latency.median
        fewest, most = self.rounds_between
        return min(most, max(fewest, int(self.seconds / (4 * latency))))

    @counts("of eager")
    def track_relative_latency(self, model: str, variant: str) -> dict[str, Any]:
        compared = self.compare(self.eager, self.rewritten, self.inputs, rounds=self.rounds_to_run)
        return {"samples": [1 / ratio for ratio in compared.speedup.samples], "number": 1}
