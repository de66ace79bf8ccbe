"""The runner of CUDA graphs, on a device that is faked: kernels on a tape, replayed in place.

As with a real graph, a replay runs no Python of the model, reads and writes the same memory each
time, and knows nothing of the arguments but what is in that memory.
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import optimizer
from optimizer.core import device as _device
from optimizer.core.device import Cuda
from optimizer.core.inputs import map_tensors, storages_in, tensors_in
from optimizer.lowering import candidates as _candidates
from optimizer.lowering import choose as _choose
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES, POLICIES
from optimizer.lowering.module import LoweredModule
from tests.level_2 import last_wins, lowered, plan_of, racing
from tests.single_pass import ForwardOfTwo


class FreedError(RuntimeError):
    """What a GPU answers by an illegal memory access, or by wrong numbers."""


class Read:
    """A tensor that kernels read and did not make: a recording does not keep it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = weakref.ref(tensor)

    def __call__(self) -> torch.Tensor:
        tensor = self.tensor()
        if tensor is None:
            raise FreedError("a kernel reads memory that was freed")
        return tensor


class Tape(TorchDispatchMode):
    """Writes down the kernels that run on the memory of a recording, and on other memory."""

    def __init__(self, own: list[torch.Tensor]) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, Any, Any]] = []
        self.held = own.copy()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kernels.append((func, map_tensors(self.reference, (args, kwargs or {})), result))
        self.held += tensors_in(result)
        return result

    def reference(self, tensor: torch.Tensor) -> Any:
        return tensor if any(each is tensor for each in self.held) else Read(tensor)

    def replay(self) -> None:
        for func, given, result in self.kernels:
            args, kwargs = tree_map_only(Read, lambda each: each(), given)
            again = func(*args, **kwargs)
            for old, new in zip(tensors_in(result), tensors_in(again), strict=True):
                if storages_in(old).isdisjoint(storages_in((args, kwargs))):
                    old.copy_(new.reshape(old.shape))  # it may have been squeezed in place


class FakeCuda(Cuda):
    """A GPU whose kernels are those of the CPU."""

    records, capturing = 0, False

    def synchronize(self) -> None:
        return

    def is_capturing(self) -> bool:  # type: ignore[override]
        return self.capturing

    def record(self, program: Any, inputs: Any) -> Any:
        self.records += 1
        own = [torch.full_like(each, 7) for each in inputs]
        with Tape(own) as tape:
            outputs = program(*own)
        return tape.replay, own, outputs

    def turns(self) -> Callable[[], Any]:
        lock = threading.Lock()
        return lambda: lock


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The CPU counts as a GPU, on which the last candidate is the fastest."""
    fake = FakeCuda(0)
    monkeypatch.setitem(POLICIES, "cpu", POLICIES["cuda"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(Cuda, "is_capturing", fake.is_capturing)
    for module in (_choose, _candidates):
        monkeypatch.setattr(module, "device_of", lambda tensors: fake)
    racing(monkeypatch, last_wins)
    return fake


def net() -> nn.Module:
    """Layers that become regions, and code around them that does not."""
    torch.manual_seed(0)
    forward = (
        "y = m.layer(x).relu_();"
        "return {'image': y.permute(0, 2, 3, 1).sin(), 'scores': m.head(y.mean((2, 3))) * z}"
    )
    return ForwardOfTwo(forward, layer=nn.Conv2d(3, 8, 3), head=nn.Linear(8, 5)).eval()


def inputs(seed: int = 0, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 9, 9, generator=generator), torch.rand(5, generator=generator)


def assert_answers(fast: Any, of: Any, *seeds: int) -> None:
    for seed in seeds:
        given = inputs(seed)
        assert plan_of(fast, *given) is not None
        answer, expected = fast(*given), of(*inputs(seed))
        torch.testing.assert_close(answer, expected)
        torch.testing.assert_close(given, inputs(seed), rtol=0, atol=0)
        assert answer["image"].stride() == expected["image"].stride()


def runner(fast: LoweredModule) -> str:
    """What runs a whole call."""
    assert fast.report.choices[-1].region == "the whole call"
    return fast.report.choices[-1].chosen


def test_a_call_is_one_replay_with_the_models_answer(gpu: FakeCuda) -> None:
    fast = lowered(net(), *inputs())

    assert runner(fast) == "CUDA graph"
    assert_answers(fast, net(), 0, 1, 2)
    assert gpu.records == 1


def test_who_holds_an_output_keeps_it(gpu: FakeCuda) -> None:
    fast = lowered(net(), *inputs())
    first = fast(*inputs(1))
    kept = {name: value.clone() for name, value in first.items()}
    fast(*inputs(2))
    torch.testing.assert_close(first, kept, rtol=0, atol=0)

    first["image"].zero_()
    torch.testing.assert_close(fast(*inputs(1)), kept)


def test_the_memory_that_a_graph_holds_is_measured_by_launching_its_kernels(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = lowered(net(), *inputs())
    monkeypatch.setattr(Tape, "replay", None)  # it cannot be called
    monkeypatch.setattr(Cuda, "is_measured", True)

    assert_answers(fast, net(), 1, 2)


def test_it_can_be_declined(gpu: FakeCuda) -> None:
    fast = lowered(net(), *inputs(), cuda_graph=False)
    other = pickle.loads(pickle.dumps(fast))
    fast.lower(inputs(batch=3))
    other.lower(inputs(batch=4))
    fast.refit(net().state_dict(), inputs())

    assert_answers(fast, net(), 0)
    assert gpu.records == 0


def test_other_calls_run_without_it(gpu: FakeCuda) -> None:
    fast, (x, scale) = lowered(net(), *inputs()), inputs()

    assert plan_of(fast, *inputs(batch=3)) is None
    torch.testing.assert_close(fast(*inputs(batch=3)), net()(*inputs(batch=3)))
    assert fast(x.requires_grad_(), scale)["scores"].requires_grad

    gpu.capturing = True  # a graph of the caller's, into which the model is launched
    assert plan_of(fast, *inputs()) is None
    torch.testing.assert_close(fast(*inputs()), net()(*inputs()))
    with pytest.raises(optimizer.InputError):
        fast.lower(inputs(batch=3))


def test_weights_that_were_written_are_recorded_again(gpu: FakeCuda) -> None:
    fast = lowered(net(), *inputs())
    fast.load_state_dict({name: each * 2 for name, each in fast.state_dict().items()})

    assert_answers(fast, fast.run_portable, 0, 1, 2)
    assert gpu.records == 2


def test_a_pickle_records_its_own(gpu: FakeCuda) -> None:
    fast = pickle.loads(pickle.dumps(lowered(net(), *inputs())))

    with torch.inference_mode():
        fast(*inputs())
    assert_answers(fast, net(), 1, 0)
    assert gpu.records == 2


def test_threads_take_turns(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(self: Tape) -> None:
        time.sleep(0.002)
        replay(self)
        time.sleep(0.002)

    replay = Tape.replay
    monkeypatch.setattr(Tape, "replay", slowly)
    fast = lowered(net(), *inputs())
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: fast(*inputs(seed)), range(8)))

    for seed, answer in enumerate(answers):
        torch.testing.assert_close(answer, net()(*inputs(seed)))


def cannot(self: FakeCuda, program: Any, given: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


def stale(self: FakeCuda, program: Any, given: Any) -> Any:
    return (lambda: None), list(given), program(*given)


@pytest.mark.parametrize(
    ("record", "reason"), [(cannot, "not permitted"), (stale, "relative error")]
)
def test_what_cannot_be_recorded_is_launched(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, record: Any, reason: str
) -> None:
    monkeypatch.setattr(FakeCuda, "record", record)
    fast = lowered(net(), *inputs())

    assert runner(fast) == AS_IT_IS
    assert reason in fast.report.choices[-1].rejected["CUDA graph"]
    assert_answers(fast, net(), 0, 1)


def test_without_timing_it_is_chosen_and_its_answer_is_compared_all_the_same(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: FakeCuda, program: Any, given: Any) -> Any:
        return (lambda: None), list(given), tuple(each * 1.5 for each in program(*given))

    monkeypatch.setattr(_choose.Times, "race", None)
    fast = lowered(net(), *inputs(), tune_seconds=0)
    monkeypatch.setattr(FakeCuda, "record", wrong)

    assert runner(fast) == "CUDA graph"
    with pytest.raises(optimizer.InputError, match="its answer differs"):
        fast.lower(inputs(batch=3), tune_seconds=0)


def test_a_call_is_decided_apart_from_the_region_that_it_consists_of(gpu: FakeCuda) -> None:
    choices = lowered(nn.Conv2d(3, 8, 3), inputs()[0]).report.choices

    assert [choice.chosen for choice in choices] == ["channels_last", "CUDA graph"]
    assert len({choice.key for choice in choices}) == 2


def test_on_a_device_without_graphs_there_is_none() -> None:
    with pytest.raises(TypeError, match="cpu has no CUDA graphs"):
        CANDIDATES["CUDA graph"](nn.Identity(), [torch.ones(1)])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of torch.cuda, for which a stub stands."""
    calls: list[str] = []

    @contextmanager
    def within(name: str) -> Iterator[None]:
        calls.append(f"enter {name}")
        yield
        calls.append(f"leave {name}")

    def stream(name: str) -> SimpleNamespace:
        members = ("wait_stream", "wait_event", "record_event")
        return SimpleNamespace(
            name=name,
            **{m: lambda given, m=m: calls.append(f"{name}.{m}({given})") for m in members},
        )

    patches = {
        "Stream": lambda device: stream("side"),
        "current_stream": lambda device: stream("current"),
        "stream": lambda stream: within(stream.name),
        "Event": lambda: "done",
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: calls.append("replay")),
        "graph": lambda graph, stream, capture_error_mode: within(
            f"capture on {stream.name}, {capture_error_mode}"
        ),
    }
    for name, value in patches.items():
        monkeypatch.setattr(torch.cuda, name, value)
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: calls.append("clear workspaces"), raising=False)
    return calls


def test_a_graph_is_captured_after_a_warm_up_on_a_side_stream(asked: list[str]) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor]:
        asked.append("run")
        assert not _device._CAPTURE.acquire(blocking=False)  # no two captures at once
        return (x + 1,)

    x = torch.ones(2, 3).t()
    replay, [own], [output] = Cuda(0).record(program, [x])
    replay()

    side = asked.index("enter side")
    assert asked[side - 1].startswith("side.wait_stream(")
    assert asked[side:] == [
        *("enter side", "run", "run", "run", "leave side", "clear workspaces"),
        *("enter capture on side, thread_local", "run", "leave capture on side, thread_local"),
        *("clear workspaces", "replay"),
    ]
    assert own is not x
    assert own.stride() == x.stride()
    assert output.shape == x.shape


def test_a_turn_waits_for_the_one_before_it_on_any_stream(asked: list[str]) -> None:
    turn = Cuda(0).turns()
    with turn():
        asked.append("work")
    with pytest.raises(ZeroDivisionError), turn():
        asked.append(str(1 // 0))
    with turn():
        asked.append("work")

    waits, records = "current.wait_event(done)", "current.record_event(done)"
    assert asked == [waits, "work", records, waits, records, waits, "work", records]
