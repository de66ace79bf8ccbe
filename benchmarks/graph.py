"""What optimization does to each graph: exact numbers, the same on every run.

The first benchmark that asks for a model in a variant has it counted, and the folder in which asv
runs them keeps that for the others. So one model's numbers take no other's time.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from ._counted import counted
from ._unit import counts
from ._workloads import LEVEL_2, MODELS, PORTABLE
from .subjects import EAGER

OPTIMIZED = "optimized-1"


def setup_cache() -> str:
    """The folder that asv gives the benchmarks of this module, and removes in the end."""
    return str(Path.cwd())


setup_cache.timeout = 60


class _Counted:
    """A benchmark that reads one part of what was counted."""

    part: ClassVar[str]
    params: ClassVar[list[list[str]]]
    param_names: ClassVar[list[str]] = ["model", "variant"]
    timeout = 300  # of which the first to ask for the largest model takes 10
    version = "1"

    def setup(self, folder: str, model: str, variant: str = OPTIMIZED) -> None:
        self.counts = counted(Path(folder), model, variant, self.part)


class Graph(_Counted):
    """The graph that runs: as captured (eager), as optimized, and as torch.fx's fuse leaves it."""

    part = "graph"
    params: ClassVar[list[list[str]]] = [MODELS, [EAGER, *PORTABLE]]

    @counts("nodes")
    def track_nodes(self, *_: str) -> int:
        return self.counts["nodes"]

    @counts("calls")
    def track_calls(self, *_: str) -> int:
        return self.counts["calls"]

    @counts("modules")
    def track_modules(self, *_: str) -> int:
        return self.counts["modules"]

    @counts("numbers")
    def track_parameters(self, *_: str) -> int:
        return self.counts["parameters"]

    @counts("bytes")
    def track_parameter_bytes(self, *_: str) -> int:
        return self.counts["parameter_bytes"]


class Work(_Counted):
    """What one forward of that graph takes, by the shapes of its tensors."""

    part = "work"
    params: ClassVar[list[list[str]]] = [MODELS, [EAGER, *PORTABLE]]

    @counts("operations")
    def track_flops(self, *_: str) -> int:
        return self.counts["flops"]

    @counts("bytes")
    def track_bytes_moved(self, *_: str) -> int:
        return self.counts["bytes_moved"]

    @counts("kernels")
    def track_launches(self, *_: str) -> int:
        return self.counts["launches"]

    @counts("bytes")
    def track_live_bytes(self, *_: str) -> int:
        return self.counts["live_bytes"]


class Rewrites(_Counted):
    """What optimizing at level 1 did, and what it saw and left alone."""

    part = "graph"
    params: ClassVar[list[list[str]]] = [MODELS]
    param_names: ClassVar[list[str]] = ["model"]

    @counts("rewrites", less_is_better=False)
    def track_fired(self, *_: str) -> int:
        return self.counts["rewrites"]

    @counts("rewrites", less_is_better=None)  # a new pass that is careful refuses more
    def track_refused(self, *_: str) -> int:
        return self.counts["refusals"]


class Lowered(_Counted):
    """What runs the calls of torch's functions at level 2, where nothing is timed.

    What a race on a clock chooses is not the same every time. So this is the untimed choice, that
    of `tune_seconds=0`: an engine that is offered takes each region that it can compile; without
    one, packed weights take the regions in which at least a third of the layers are convolutions,
    and others run as they are, though a race might have packed them.
    """

    part = "lowered"
    params: ClassVar[list[list[str]]] = [MODELS, LEVEL_2]

    @counts("regions", less_is_better=None)  # one may be cut in two, or a first one be found
    def track_regions(self, *_: str) -> int:
        return self.counts["regions"]

    @counts("calls", less_is_better=None)
    def track_calls_of_engines(self, *_: str) -> int:
        """Those in regions that an engine runs."""
        return self.counts["engine"]

    @counts("calls", less_is_better=None)
    def track_calls_of_packed(self, *_: str) -> int:
        """Those in regions that run on packed weights or in channels_last."""
        return self.counts["packed"]

    @counts("calls")
    def track_calls_as_they_are(self, *_: str) -> int:
        """Those in regions that run as they are."""
        return self.counts["portable"]

    @counts("calls")
    def track_calls_outside(self, *_: str) -> int:
        """Those in no region; all calls of the graph, where the call cannot be lowered at all."""
        return self.counts["outside"]

    @counts("bytes")
    def track_held_twice(self, *_: str) -> int:
        """Dense weights of the regions that something runs which has them in its own layout."""
        return self.counts["held"]


class Error(_Counted):
    """How far the answer in float32 is from the same model's on the same inputs in float64.

    At level 2 that of the untimed choice, as in `Lowered`.
    """

    part = "error"
    params: ClassVar[list[list[str]]] = [MODELS, [EAGER, OPTIMIZED, *LEVEL_2]]

    @counts("eps of the largest value")
    def track_error(self, *_: str) -> int:
        """The largest, as the next power of two, in eps of float32 (1.2e-7)."""
        return self.counts["bound"]
