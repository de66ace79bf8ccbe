"""One thread for each worker, set before torch is imported, the fuzz profiles, and the path."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# A model that kills its worker is found there, as a test to paste.
os.environ.setdefault("FUZZ_CRASHES", str(Path(__file__).parents[1] / ".hypothesis" / "crashes"))

# `models`, `benchmarks` and `tests` are those of the checkout. `optimizer` may be installed.
sys.path.append(str(Path(__file__).parents[1]))

import pytest
import torch
from hypothesis import Phase, settings

torch.set_num_threads(1)
if sys.platform == "linux":  # what is freed is kept: a tenth of the time was that of new pages
    ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    ctypes.CDLL(None).mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
collect_ignore = ["browser"]  # it has an environment of its own, without torch


def pytest_collection() -> None:
    """What is imported lives as long as the process: it is not searched for garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def address(tensor: torch.Tensor) -> int:
    """Where the data lie. `data_ptr()` counts as a write, which parts a model and its snapshot."""
    found: int = torch._C._data_address(tensor)
    return found


@pytest.fixture(autouse=True)
def _graphs_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed: what only Dynamo records counts as faster in its graphs."""

    class Pays:
        def __init__(self, calls: Any) -> None:
            self.slower = lambda runs, deadline: ""

    monkeypatch.setattr("optimizer._optimize.Times", Pays)


@pytest.fixture
def right_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed at level 2: the last candidate that is right counts as the fastest."""
    from tests import level_2

    level_2.offer(monkeypatch)
    level_2.racing(monkeypatch, level_2.last_wins)


def shared() -> dict[str, Any]:
    """What failed anywhere, for all that fuzz together: HYPOTHESIS_REDIS=redis://host:port."""
    address = os.environ.get("HYPOTHESIS_REDIS")
    if not address:
        return {}
    from hypothesis.extra.redis import RedisExampleDatabase
    from redis import Redis

    return {"database": RedisExampleDatabase(Redis.from_url(address))}


# Without `explain`, which reruns a failure many times, and `target`, which nothing here uses.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)

# quick: what everyone runs, always the same examples. nightly: others each time, and those that
# failed before first. deep: the same, ten times as long.
settings.register_profile(
    "quick", max_examples=24, derandomize=True, database=None, deadline=None, phases=PHASES
)
settings.register_profile("nightly", max_examples=1_000, deadline=None, phases=PHASES, **shared())
settings.register_profile("deep", settings.get_profile("nightly"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
