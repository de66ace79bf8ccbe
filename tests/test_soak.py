"""What a soak counts, and how it is asked for."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from hypothesis import strategies as st
from torch import nn

from optimizer.lowering import partition as _partition
from optimizer.lowering.engines import engines_here
from optimizer.testing import Optimize, Spec
from tests.quality import soak as _soak
from tests.quality.__main__ import main
from tests.repository import table


@dataclasses.dataclass(frozen=True)
class Deadly(Optimize):
    """Ends the process, as a kernel may; at level 0 its answer is what cannot be called."""

    def __call__(self, model, inputs):
        if self.level:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.Module()


def test_a_soak_counts_what_it_tries_and_what_is_wrong_or_ends_its_process(monkeypatch):
    forked = partial(ProcessPoolExecutor, 1, multiprocessing.get_context("fork"))
    monkeypatch.setattr(_soak, "_pool", forked)
    monkeypatch.setattr(_soak, "BATCH", 2)
    (right, _), (wrong, _), (ended, _) = (
        list(_soak.soak(subject, 3, dtype=torch.float64, first_seed=5))
        for subject in (Optimize(1), Deadly(0), Deadly(1))
    )

    assert (right.examples, right.wrong, right.lowered, right.seconds > 0) == (3, [], 0, True)
    assert (wrong.examples, len(wrong.wrong)) == (3, 3)
    assert ended.wrong == [f"a model of seed {seed} ended the process" for seed in (5, 6)]


def test_a_soak_at_level_2_counts_regions_and_sees_a_nan_that_is_lost(monkeypatch):
    monkeypatch.setattr(_partition, "is_moderate", lambda tensor: True)
    relu = Spec(("conv", "relu", "conv"), (2, 4, 4, 4), "random", 0, "contiguous", "module")
    monkeypatch.setattr(_soak, "models", lambda: st.just(relu))
    tally = _soak.tried(Optimize(2), 1, torch.float32, 0)

    [engine] = engines_here(["openvino"])
    assert (tally.examples, tally.lowered, tally.regions) == (1, 1, {engine: 1})
    assert f"(regions: 1 {engine})" in str(tally)
    assert [told.splitlines()[0] for told in tally.wrong] == ["nan in input 0 is lost"]


@table("named given", ("none", ()), ("auto", "auto"))
def test_a_soak_goes_without_engines_where_it_is_asked_to(monkeypatch, named, given):
    seen = []
    monkeypatch.setattr(_soak, "soak", lambda subject, *rest, **more: seen.append(subject) or [])
    main(["soak", "--level", "2", "--engines", named])

    assert seen == [Optimize(2, engines=given)]
