"""Many generated models, new ones for each seed: how many does the optimizer get wrong?"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from optimizer._lowered import LoweredModule
from optimizer.testing._assemble import Spec
from optimizer.testing._check import check_spec
from optimizer.testing._report import Counterexample
from optimizer.testing._strategies import models
from optimizer.testing._subject import Optimize

BATCH = 500


@dataclass
class Tally:
    """What came of so many models.

    Attributes:
        examples: how many were tried; none is rejected.
        lowered: how many of them have a program of level 2.
        wrong: those that the optimizer got wrong.
        seconds: of the processor, for building, optimizing and comparing them.
    """

    examples: int = 0
    lowered: int = 0
    wrong: list[Counterexample] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.examples} models, {len(self.wrong)} wrong, {self.lowered} lowered,"
            f" {self.examples / max(self.seconds, 1e-9):.1f} a second of the processor"
        )


def soak(
    subject: Optimize, examples: int, *, dtype: torch.dtype = torch.float64, first_seed: int = 0
) -> Iterator[Tally]:
    """Try so many models, and tell how it stands after each batch.

    The same seeds give the same models. Hypothesis is asked for one batch after another, since it
    remembers every example of a run.
    """
    torch.set_num_threads(1)
    tally = Tally()
    for batch in range(-(-examples // BATCH)):
        count = min(BATCH, examples - batch * BATCH)
        start = time.process_time()
        _try(subject, count, dtype, first_seed + batch, tally)
        tally.seconds += time.process_time() - start
        gc.collect()
        yield tally


def _try(subject: Optimize, count: int, dtype: torch.dtype, start: int, tally: Tally) -> None:
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=[HealthCheck.too_slow],
    )
    @seed(start)
    @given(models())
    def holds(spec: Spec) -> None:
        tally.examples += 1
        try:
            candidate = check_spec(spec, subject, dtype=dtype, later=subject.level < 2)
        except Counterexample as failure:
            tally.wrong.append(failure)
        else:
            is_lowered = isinstance(candidate, LoweredModule) and candidate.meta.get("lowered")
            tally.lowered += bool(is_lowered)

    holds()
