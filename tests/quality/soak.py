"""Many generated models, new ones for each seed: how many does the optimizer get wrong?

They are tried in a process of their own: a kernel that ends it ends one batch.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import torch

from optimizer.lowering.module import LoweredModule
from optimizer.testing._assemble import Spec
from optimizer.testing._check import check_spec
from optimizer.testing._report import Counterexample
from optimizer.testing._strategies import models, on_each
from optimizer.testing._subject import Optimize, assert_loses_no_nan

BATCH = 500
_BATCHES_EACH = 8  # of a process: what kernels keep is let go with it


@dataclass
class Tally:
    """What came of so many models."""

    examples: int = 0  # how many were tried; none is rejected
    lowered: int = 0  # how many of them have a program of level 2
    regions: Counter[str] = field(default_factory=Counter)  # of these programs, by what runs them
    wrong: list[str] = field(default_factory=list)  # what was told of those that are
    seconds: float = 0.0  # of the processor, for building, optimizing and comparing them

    def add(self, other: Tally) -> None:
        """Count what came of further models."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {name}" for name, count in self.regions.most_common())
        return (
            f"{self.examples} models, {len(self.wrong)} wrong, {self.lowered} lowered"
            f"{f' (regions: {kinds})' * bool(kinds)},"
            f" {self.examples / max(self.seconds, 1e-9):.1f} a second of the processor"
        )


def soak(
    subject: Optimize, examples: int, *, dtype: torch.dtype = torch.float64, first_seed: int = 0
) -> Iterator[Tally]:
    """Try so many models, and tell how it stands after each batch.

    The same seeds give the same models. Hypothesis is asked for one batch after another, since it
    remembers every example of a run. What ends the process is a wrong answer, and the end of its
    batch; the model is on disk where the variable FUZZ_CRASHES names a folder.
    """
    tally, pool = Tally(), _pool()
    for batch in range(-(-examples // BATCH)):
        given = min(BATCH, examples - batch * BATCH), dtype, first_seed + batch
        try:
            tally.add(pool.submit(tried, subject, *given).result())
        except BrokenProcessPool:
            tally.wrong.append(f"a model of seed {given[-1]} ended the process")
            pool = _pool()
        yield tally
    pool.shutdown()


def _pool() -> ProcessPoolExecutor:
    fresh = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=_BATCHES_EACH)


def tried(subject: Optimize, count: int, dtype: torch.dtype, start: int) -> Tally:
    """What comes of one batch, in this process."""
    torch.set_num_threads(1)
    tally, began = Tally(), time.process_time()

    @on_each(models(), count, number=start)
    def holds(spec: Spec) -> None:
        tally.examples += 1
        try:
            later = subject.level < 2 or dtype is torch.float64
            candidate = check_spec(spec, subject.on(spec), dtype=dtype, later=later)
            if isinstance(candidate, LoweredModule) and candidate.meta.get("lowered"):
                tally.lowered += 1
                tally.regions.update(choice.chosen for choice in candidate.report.choices)
                with spec.surroundings():
                    assert_loses_no_nan(candidate, spec.inputs(dtype))
        except Counterexample as failure:
            tally.wrong.append(str(failure))
        except AssertionError as failure:
            tally.wrong.append(f"{failure}\n{spec}\n{spec.source()}")

    tally.seconds = time.process_time() - began
    gc.collect()
    return tally
