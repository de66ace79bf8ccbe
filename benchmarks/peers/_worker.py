"""One peer in a process of its own: prepares a model, then makes the calls that it is asked for.

`python -m benchmarks.peers._worker TASK`, where TASK is a JSON object. Each answer is a line of
JSON: first what preparing took, then one for each line that is read, which says how many calls to
time (`timed`) and how many before them not to (`discarded`). What a peer prints goes to standard
error. A failure is answered by its `reason`, and ends the process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks._memory import give_freed_memory_back
from benchmarks.subjects import Task, named

FIRST_CALLS = 3  # what compiles when it is called does so in these
_SEED = 0


def main(asked: dict[str, Any]) -> None:
    sys.path.insert(0, asked["project"])  # whose optimizer and models are measured
    answers = _answers()
    try:
        for answer in _served(asked):
            print(json.dumps(answer), file=answers, flush=True)
    except Exception as error:
        headline = next(iter(str(error).strip().splitlines()), "")
        print(json.dumps({"reason": f"{type(error).__name__}: {headline}"}), file=answers)
        raise


def _answers() -> Any:
    """What was standard output, now kept from everything that prints."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _served(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    memory, task = _built(asked)
    expected = _leaves(task.module(*_copies(task.inputs)))
    subject = named(asked["peer"])
    started = time.perf_counter()
    call = subject.prepare(task)
    preparing = time.perf_counter() - started
    inputs = task.inputs
    del task  # and with it the module, unless the peer needs it
    first = [_timed(call, inputs) for _ in range(FIRST_CALLS)]
    difference = _difference(_leaves(call(*_copies(inputs))), expected)
    budget = subject.promise if isinstance(subject.promise, float) else 0
    yield {"preparing": preparing, "first": first, "difference": difference, "budget": budget}
    for line in sys.stdin:
        yield _block(call, inputs, memory, **json.loads(line))


def _built(asked: dict[str, Any]) -> tuple[_Memory, Task]:
    import torch

    torch.set_num_threads(asked["threads"])
    torch.set_grad_enabled(False)
    with contextlib.suppress(ImportError):
        importlib.import_module("models._torchvision_import").import_torchvision()
    models = importlib.import_module("models")
    memory = _Memory(asked["device"])
    workload, dtype = models.load(asked["model"]), getattr(torch, asked["dtype"])
    module = workload.module.to(asked["device"], dtype)
    inputs = _batch(workload.example_inputs, asked["batch"])
    inputs = tuple(
        each.to(asked["device"], dtype if each.is_floating_point() else None) for each in inputs
    )
    return memory, Task(module, inputs, asked["threads"], Path(tempfile.gettempdir()))


def _batch(inputs: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """The inputs so many times over; no two floating-point ones are alike."""
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    repeated = [torch.cat([each] * count) for each in inputs]
    noise = 0 if count == 1 else 0.1
    return tuple(
        each + noise * torch.randn(each.shape, generator=generator)
        if each.is_floating_point()
        else each
        for each in repeated
    )


def _block(
    call: Callable[..., Any], inputs: tuple[Any, ...], memory: _Memory, discarded: int, timed: int
) -> dict[str, Any]:
    """The seconds of some calls in a row, after some that do not count."""
    memory.restart()
    for _ in range(discarded):
        _timed(call, inputs)
    return {"seconds": [_timed(call, inputs) for _ in range(timed)], "peak_memory": memory.peak()}


def _timed(call: Callable[..., Any], inputs: tuple[Any, ...]) -> float:
    copies = _copies(inputs)
    _synchronize(copies)
    started = time.perf_counter()
    output = call(*copies)
    _synchronize(copies)
    seconds = time.perf_counter() - started
    del output  # only now: freeing it is not part of the call
    return seconds


def _synchronize(tensors: tuple[Any, ...]) -> None:
    import torch

    if tensors[0].is_cuda:
        torch.cuda.synchronize()


def _copies(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.clone() for each in inputs)


def _leaves(output: Any) -> list[Any]:
    from torch.utils import _pytree as pytree

    return [leaf.detach().cpu().double() for leaf in pytree.tree_leaves(output)]


def _difference(actual: list[Any], expected: list[Any]) -> float:
    """The largest distance of an output from eager's in the 2-norm, relative to eager's.

    Raises:
        ValueError: there is no such number.
    """
    pairs = zip(actual, expected, strict=True)
    found = [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]
    if not all(map(math.isfinite, found)):
        raise ValueError("the answer, or eager's, is not finite, or eager's is zero")
    return max(found)


class _Memory:
    """The most memory that the process took for itself, above what it had when this was made.

    On the CPU it is resident memory as Linux counts it, without what is mapped from files, such as
    code. On a GPU it is what PyTorch reserved there, the memory of graphs included. None where
    neither can be told.
    """

    def __init__(self, device: str) -> None:
        self.device, self.known, self.before = device, True, 0
        self.restart()
        self.before = self.peak() or 0

    def restart(self) -> None:
        give_freed_memory_back()
        if self.device == "cuda":
            cuda = importlib.import_module("torch").cuda
            cuda.empty_cache()
            return cuda.reset_peak_memory_stats()
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # another system
            self.known = False

    def peak(self) -> int | None:
        if self.device == "cuda":
            return importlib.import_module("torch").cuda.max_memory_reserved()
        return _private_peak() - self.before if self.known else None


def _private_peak() -> int:
    status = Path("/proc/self/status").read_text()
    sizes = {name: int(size) for name, size in re.findall(r"(\w+):\s+(\d+) kB", status)}
    return (sizes["VmHWM"] - sizes["RssFile"] - sizes["RssShmem"]) * 1024


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
