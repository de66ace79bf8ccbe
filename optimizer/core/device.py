"""What a device is asked: is it done, how much memory did a run take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch._C import _autograd, _profiler
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.core.errors import DeviceError

Program: TypeAlias = Callable[..., Sequence[torch.Tensor]]
# What replays the launches, where they read their inputs, and where they write their outputs.
Recording: TypeAlias = tuple[Callable[[], object], list[torch.Tensor], Sequence[torch.Tensor]]

_CAPTURE = threading.Lock()  # one graph is captured at a time


class Device:
    """What `measure` needs of a device; by itself the CPU, whose calls are synchronous.

    Peak memory is the running sum of what PyTorch's CPU allocator reports to the profiler. It sees
    the workspaces that an operator allocates for itself (36 % of the peak of a resnet18), which a
    count of live tensors between operators cannot, and is the same in every run. The profiler's
    older entry is used because the newer one prints two lines to the terminal at each use.
    """

    name = "cpu"

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""

    def peak_memory(self, run: Callable[[], object]) -> int:
        """Return the most bytes that `run()` held at once above what was allocated before it."""
        _autograd._enable_profiler_legacy(_MEMORY_ONLY)
        try:
            run()
        finally:
            events = _autograd._disable_profiler_legacy()
        changes = (event.cpu_memory_usage() for thread in events for event in thread)
        return max(accumulate(changes, initial=0))


class Cuda(Device):
    """One NVIDIA (or ROCm) GPU: the caching allocator keeps the peak itself.

    A graph holds what was allocated when it was recorded: while `is_measured`, its kernels are
    launched instead, into memory that counts.
    """

    is_measured = False

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.name)

    def peak_memory(self, run: Callable[[], object]) -> int:
        self.synchronize()
        before = torch.cuda.memory_allocated(self.name)
        torch.cuda.reset_peak_memory_stats(self.name)
        Cuda.is_measured = True
        try:
            run()
        finally:
            Cuda.is_measured = False
        return int(torch.cuda.max_memory_allocated(self.name) - before)

    @staticmethod
    def is_capturing() -> bool:
        """Return whether launches are being captured as a graph of the caller's."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, program: Program, inputs: Sequence[torch.Tensor]) -> Recording:
        """Record the launches of `program` for inputs like these, in a memory pool of their own.

        Elsewhere in the process the device may be used meanwhile, but no graph be captured.
        """
        with _CAPTURE:
            stream = torch.cuda.Stream(self.name)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self.name))
            with torch.cuda.stream(stream):
                for _ in range(3):  # in the first, libraries choose kernels and allocate
                    program(*inputs)
            graph = torch.cuda.CUDAGraph()
            # The workspace that cuBLAS keeps for a stream would be shared with what else uses that.
            torch._C._cuda_clearCublasWorkspaces()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                copies = [torch.empty_like(each) for each in inputs]
                outputs = program(*copies)
            torch._C._cuda_clearCublasWorkspaces()
            return graph.replay, copies, outputs

    def turns(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a context for one thread at a time, whose work waits for that of the last."""
        lock, done = threading.Lock(), torch.cuda.Event()  # type: ignore[no-untyped-call]

        @contextmanager
        def turn() -> Iterator[None]:
            with lock:
                stream = torch.cuda.current_stream(self.name)
                stream.wait_event(done)
                try:
                    yield
                finally:
                    stream.record_event(done)

        return turn


class Mps(Device):
    """Apple's GPU. It keeps no peak, so allocated memory is read after every operator.

    Workspaces that an operator frees before it returns are not seen.
    """

    name = "mps"

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def peak_memory(self, run: Callable[[], object]) -> int:
        self.synchronize()
        before = torch.mps.current_allocated_memory()
        with _AllocatedAfterEachOperator() as mode:  # type: ignore[no-untyped-call]
            run()
        return max(0, int(mode.most) - before)


def device_of(tensors: Iterable[torch.Tensor]) -> Device:
    """Return the device of the first tensor that is not on the CPU, or else the CPU."""
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    if device.type == "cuda":
        return Cuda(device.index)
    kinds = {"cpu": Device, "mps": Mps}
    if device.type not in kinds:
        raise DeviceError(f"'{device}' is not a device that can be measured: use cpu, cuda or mps.")
    return kinds[device.type]()


class _AllocatedAfterEachOperator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, torch.mps.current_allocated_memory())
        return result


_MEMORY_ONLY = _profiler.ProfilerConfig(
    _profiler.ProfilerState.CPU, False, True, False, False, False, _profiler._ExperimentalConfig()
)
