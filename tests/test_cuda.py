"""Level 2 on a GPU. Everything here needs one; what it shares with a faked one is tested there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import optimizer
from tests import level_2
from tests.internals import Times
from tests.level_2 import chosen, pickled, plan_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="captures graphs and calls cuDNN: needs an NVIDIA GPU"
)
assert_close = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)  # tf32


def net(dtype: torch.dtype = torch.float32) -> Any:
    return level_2.net().to("cuda", dtype)


def image(batch: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return level_2.image(batch, 3, 32, 32, seed=seed).to("cuda", dtype)


@pytest.fixture(autouse=True)
def _any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is tested is the answer."""
    monkeypatch.setattr("optimizer.lowering.choose.WORTH_IT", float("inf"))
    monkeypatch.setattr(Times, "slower", lambda *_: "")
    with torch.no_grad():
        yield


def lowered(dtype: torch.dtype = torch.float32, seconds: float = 0, engine: str = "") -> Any:
    engines = (engine,) if engine else ()
    x = image(dtype=dtype)
    fast = level_2.lowered(net(dtype), x, tune_seconds=seconds, engines=engines)
    assert plan_of(fast, x) is not None, str(fast.report)
    assert seconds or chosen(fast)[-1] == "CUDA graph", fast.report
    return fast


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("seconds", "engine"), [(0, ""), (1, ""), (0, "inductor")])
def test_it_gives_the_models_answer_and_keeps_nan(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seconds: int, engine: str
) -> None:
    # Inductor chose kernels that differ by 1.1e-4 in tf32, which the bound rightly rejects.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not engine)
    model, fast, x = net(dtype), lowered(dtype, seconds, engine), image(dtype=dtype)
    assert any(name.startswith("Inductor ") for name in chosen(fast)) is bool(engine)
    for other in (x, image(dtype=dtype, seed=1), image(3, dtype)):
        optimizer.check(model, fast, other)

    x[0, 0, 0, 0] = float("nan")
    assert torch.equal(fast(x).isnan(), model(x).isnan())


def test_attention_in_16_bits_is_one_region_of_inductors() -> None:
    x = image(dtype=torch.float16)
    model = level_2.Running(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x))
    fast = level_2.lowered(model.eval(), x, tune_seconds=0, engines=("inductor",))
    assert chosen(fast)[0].startswith("Inductor "), fast.report


def test_who_holds_an_output_keeps_it_and_weights_that_were_written_are_seen() -> None:
    fast, x = lowered(), image(seed=1)
    first = fast(x)
    kept = first.clone()
    fast(image(seed=2))
    assert torch.equal(first, kept)

    fast.head.weight.mul_(2)
    for _ in range(3):
        assert_close(fast(x), fast.run_portable(x))


def test_streams_and_threads_do_not_mix_their_calls() -> None:
    fast, given = lowered(), [image(seed=seed) for seed in range(16)]
    expected = list(map(fast.run_portable, given))
    torch.cuda.synchronize()

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            return fast(x)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(call, given))
    torch.cuda.synchronize()
    assert_close(answers, expected)


def test_it_can_be_captured_by_its_caller() -> None:
    fast, x = lowered(), image()
    expected = fast(x)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        fast.run_portable(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        answer = fast(x)
    graph.replay()

    assert_close(answer, expected)


def test_a_pickle_records_its_own_also_in_inference_mode() -> None:
    fast, x = pickled(lowered()), image()
    torch.inference_mode()(fast)(x)

    assert plan_of(fast, x) is not None
    optimizer.check(net(), fast, x)


def reserved() -> int:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_the_memory_that_a_graph_holds_is_counted_and_given_back() -> None:
    slow, x = optimizer.optimize(net(), image(), level=1), image()
    lowered()  # libraries allocate what they keep
    before = reserved()
    fast = lowered()
    assert reserved() > before
    ours, theirs = (optimizer.measure(each, x, repeats=1).peak_memory for each in (fast, slow))
    assert ours >= theirs

    del fast
    assert reserved() <= before
