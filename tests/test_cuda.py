"""Level 2 on a GPU. Everything here needs one; what it shares with a faked one is tested there."""

from __future__ import annotations

import gc
import pickle
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optimizer
from optimizer.lowering.choose import Times
from optimizer.lowering.module import LoweredModule
from tests import level_2
from tests.level_2 import plan_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="captures graphs and calls cuDNN: needs an NVIDIA GPU"
)
assert_close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)  # tf32


class Net(nn.Module):
    """Convolutions with a residual sum, and a Linear with an activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.second = nn.Conv2d(64, 64, 3, padding=1)
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)
        self.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu_()
        x = F.relu(self.second(x) + x)
        x = F.gelu(self.hidden(x.mean((2, 3))), approximate="tanh")
        return self.head(x)


def net(dtype: torch.dtype = torch.float32) -> Net:
    return Net().eval().to("cuda", dtype)


def image(batch: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return level_2.image(batch, 3, 32, 32, seed=seed).to("cuda", dtype)


@pytest.fixture(autouse=True)
def _any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is tested is the answer."""
    monkeypatch.setattr("optimizer.lowering.choose.WORTH_IT", float("inf"))
    monkeypatch.setattr(Times, "slower", lambda *_: "")
    with torch.no_grad():
        yield


def lowered(model: nn.Module, x: torch.Tensor, **options: Any) -> LoweredModule:
    fast = level_2.lowered(model, x, **options)
    assert plan_of(fast, x) is not None, fast.report
    return fast


def in_a_graph(model: nn.Module) -> Any:
    fast = lowered(model, image(), tune_seconds=0)
    assert fast.report.choices[-1].chosen == "CUDA graph", fast.report
    return fast


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seconds", [0, 1])
def test_it_gives_the_models_answer(dtype: torch.dtype, seconds: int) -> None:
    model, x = net(dtype), image(dtype=dtype)
    fast = lowered(model, x, tune_seconds=seconds)

    for other in (x, image(dtype=dtype, seed=1), image(3, dtype)):
        optimizer.check(model, fast, other)


def test_who_holds_an_output_keeps_it() -> None:
    fast = in_a_graph(net())
    first = fast(image(seed=1))
    kept = first.clone()
    fast(image(seed=2))

    assert torch.equal(first, kept)


def test_what_its_kernels_read_is_held() -> None:
    model, x = net(torch.float16), image(dtype=torch.float16)
    fast = lowered(model, x, tune_seconds=0)
    assert [each.chosen for each in fast.report.choices] == ["channels_last", "CUDA graph"]
    gc.collect()
    torch.cuda.empty_cache()  # what nobody holds is unmapped
    torch.full((2**26,), float("nan"), device="cuda")

    optimizer.check(model, fast, x)


def test_a_call_waits_for_nothing() -> None:
    fast, x = in_a_graph(net()), image()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        fast(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("threads", [1, 8])
def test_streams_and_threads_do_not_mix_their_calls(threads: int) -> None:
    fast = in_a_graph(net())
    given = [image(seed=seed) for seed in range(16)]
    expected = [fast.run_portable(x) for x in given]
    torch.cuda.synchronize()

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            return fast(x)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(call, given))
    torch.cuda.synchronize()
    for answer, other in zip(answers, expected, strict=True):
        assert_close(answer, other)


def test_it_can_be_captured_by_its_caller() -> None:
    fast, x = in_a_graph(net()), image()
    expected = fast(x)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        fast.run_portable(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        answer = fast(x)
    graph.replay()

    assert_close(answer, expected)


def test_weights_that_were_written_are_seen() -> None:
    fast, x = in_a_graph(net()), image()
    fast.head.weight.mul_(2)
    expected = fast.run_portable(x)

    for _ in range(3):
        assert_close(fast(x), expected)


def test_a_pickle_records_its_own_also_in_inference_mode() -> None:
    model, x = net(), image()
    fast = pickle.loads(pickle.dumps(in_a_graph(model)))
    with torch.inference_mode():
        fast(x)

    assert plan_of(fast, x) is not None
    optimizer.check(model, fast, x)


def test_nan_stays_nan() -> None:
    model, x = net(), image()
    fast = lowered(model, x)
    x[0, 0, 0, 0] = float("nan")

    assert torch.equal(fast(x).isnan(), model(x).isnan())


def test_peak_memory_counts_what_a_graph_holds() -> None:
    x = image()
    fast, slow = in_a_graph(net()), optimizer.optimize(net(), x, level=1)
    ours, theirs = (optimizer.measure(each, x, repeats=1).peak_memory for each in (fast, slow))

    assert ours >= theirs


def reserved() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_the_memory_is_given_back() -> None:
    model = net()
    in_a_graph(model)  # libraries allocate what they keep
    before = reserved()
    fast = in_a_graph(model)
    assert reserved() > before

    del fast
    assert reserved() <= before
