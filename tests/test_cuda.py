"""Level 2 on a GPU. Everything here needs one; what it shares with a faked one is tested there."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optimizer
from optimizer.lowering.module import LoweredModule

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="captures graphs and calls cuDNN: needs an NVIDIA GPU"
)


class Net(nn.Module):
    """Convolutions with a residual sum, and a Linear with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.second = nn.Conv2d(64, 64, 3, padding=1)
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu_()
        x = F.relu(self.second(x) + x)
        x = F.gelu(self.hidden(x.mean((2, 3))), approximate="tanh")
        return self.head(x)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    made = Net().eval()
    made.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    return made.to("cuda", dtype)


def image(batch: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 32, 32, generator=generator).to("cuda", dtype)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested is the answer: any speed will do."""
    monkeypatch.setattr("optimizer.lowering.choose.WORTH_IT", float("inf"))


def lowered(model: nn.Module, x: torch.Tensor, **options: Any) -> LoweredModule:
    fast = optimizer.optimize(model, x, level=2, **options)
    assert isinstance(fast, LoweredModule)
    assert fast.plan_for((x,), {}) is not None, fast.report
    return fast


def in_a_graph(model: nn.Module, x: torch.Tensor) -> LoweredModule:
    fast = lowered(model, x, tune_seconds=0)
    assert fast.report.choices[-1].chosen == "CUDA graph", fast.report
    return fast


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seconds", [0, 1])
def test_it_gives_the_models_answer(dtype: torch.dtype, seconds: int) -> None:
    model, x = net(dtype), image(dtype=dtype)
    fast = lowered(model, x, tune_seconds=seconds)

    optimizer.check(model, fast, x)
    optimizer.check(model, fast, image(dtype=dtype, seed=1))
    optimizer.check(model, fast, image(3, dtype))


def test_who_holds_an_output_keeps_it() -> None:
    fast = in_a_graph(net(), image())
    first = fast(image(seed=1))
    kept = first.clone()
    fast(image(seed=2))

    assert torch.equal(first, kept)


def test_a_call_waits_for_nothing() -> None:
    fast, x = in_a_graph(net(), image()), image()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams_do_not_mix_their_calls() -> None:
    model = net()
    fast = in_a_graph(model, image())
    given = [image(seed=seed) for seed in range(16)]
    expected = [fast.run_portable(x) for x in given]
    torch.cuda.synchronize()
    answers = []
    for x in given:
        with torch.cuda.stream(torch.cuda.Stream()):
            answers.append(fast(x))
    torch.cuda.synchronize()

    for answer, other in zip(answers, expected, strict=True):
        torch.testing.assert_close(answer, other, rtol=1e-3, atol=1e-3)  # tf32


def test_threads_do_not_mix_their_calls() -> None:
    fast = in_a_graph(net(), image())
    expected = {seed: fast.run_portable(image(seed=seed)) for seed in range(8)}
    answers: dict[int, torch.Tensor] = {}

    def call(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            answers[seed] = fast(image(seed=seed))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for seed, answer in answers.items():
        torch.testing.assert_close(answer, expected[seed], rtol=1e-3, atol=1e-3)  # tf32


def test_it_can_be_captured_by_its_caller() -> None:
    fast, x = in_a_graph(net(), image()), image()
    expected = fast(x)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        fast.run_portable(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        answer = fast(x)
    graph.replay()

    torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-3)  # tf32


def test_weights_that_were_written_are_seen() -> None:
    fast, x = in_a_graph(net(), image()), image()
    fast.head.weight.mul_(2)  # type: ignore[operator, union-attr]
    expected = fast.run_portable(x)

    for _ in range(3):
        torch.testing.assert_close(fast(x), expected, rtol=1e-3, atol=1e-3)  # tf32


def test_a_pickle_records_its_own_also_in_inference_mode() -> None:
    model, x = net(), image()
    fast = pickle.loads(pickle.dumps(in_a_graph(model, x)))
    with torch.inference_mode():
        fast(x)

    assert fast.plan_for((x,), {}) is not None
    optimizer.check(model, fast, x)


def test_nan_stays_nan() -> None:
    model, x = net(), image()
    fast = lowered(model, x)
    x[0, 0, 0, 0] = float("nan")

    assert torch.equal(fast(x).isnan(), model(x).isnan())


def reserved() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_the_memory_is_given_back() -> None:
    model, x = net(), image()
    in_a_graph(model, x)  # libraries allocate what they keep
    before = reserved()
    fast = in_a_graph(model, x)
    assert reserved() > before

    del fast
    assert reserved() <= before
