"""The runner of CUDA graphs, on a device that is faked: kernels on a tape, replayed in place.

As with a real graph, a replay runs no Python of the model, reads and writes the same memory each
time, and knows nothing of the arguments but what is in that memory.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import optimizer
from optimizer.core import device as _device
from optimizer.core.device import Cuda
from optimizer.core.inputs import storages_in, tensors_in
from optimizer.lowering import candidates as _cuda_graph
from optimizer.lowering import choose as _times
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES, POLICIES
from optimizer.lowering.choose import Times
from optimizer.lowering.module import LoweredModule


class Tape(TorchDispatchMode):
    """Writes down the kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kernels.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.kernels:
            given = storages_in((args, kwargs))
            again = func(*args, **kwargs)
            for old, new in zip(tensors_in(result), tensors_in(again), strict=True):
                if storages_in(old).isdisjoint(given):
                    old.copy_(new.reshape(old.shape))  # it may have been squeezed in place


class FakeCuda(Cuda):
    """A GPU whose kernels are those of the CPU."""

    def __init__(self) -> None:
        super().__init__(0)
        self.records = 0
        self.capturing = False

    def synchronize(self) -> None:
        return

    def is_capturing(self) -> bool:  # type: ignore[override]
        return self.capturing

    def record(self, program: Any, inputs: Sequence[torch.Tensor]) -> Any:
        self.records += 1
        own = [torch.full_like(each, 7) for each in inputs]
        with Tape() as tape:
            outputs = program(*own)
        return tape.replay, own, outputs

    def turns(self) -> Callable[[], AbstractContextManager[None]]:
        lock = threading.Lock()

        @contextmanager
        def turn() -> Iterator[None]:
            with lock:
                yield

        return turn


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The CPU counts as a GPU, on which the last candidate is the fastest."""
    fake = FakeCuda()
    monkeypatch.setitem(POLICIES, "cpu", POLICIES["cuda"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(Cuda, "is_capturing", fake.is_capturing)
    monkeypatch.setattr(_times, "device_of", lambda tensors: fake)
    monkeypatch.setattr(_cuda_graph, "device_of", lambda tensors: fake)
    monkeypatch.setattr(Times, "race", lambda self, runs, *rest, **more: _last_wins(runs))
    return fake


def _last_wins(runs: Any) -> dict[str, float]:
    seconds = {name: 1.0 / place for place, name in enumerate(runs, 1)}
    return {"plan": 0.1, "portable": 1.0} if "plan" in runs else seconds


class Net(nn.Module):
    """Layers that become regions, and code around them that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x).relu()
        return {"image": y.permute(0, 2, 3, 1).sin(), "scores": self.head(y.mean((2, 3))) * scale}


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def inputs(seed: int = 0, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 9, 9, generator=generator), torch.rand(5, generator=generator)


def lowered(model: nn.Module, given: Any, **options: Any) -> LoweredModule:
    fast = optimizer.optimize(model, given, level=2, **options)
    assert isinstance(fast, LoweredModule)
    return fast


def runner(fast: LoweredModule) -> str:
    """What runs a whole call."""
    assert fast.report.choices[-1].region == "the whole call"
    return fast.report.choices[-1].chosen


def runs_a_plan(fast: LoweredModule, *given: torch.Tensor) -> bool:
    with torch.no_grad():
        return fast.plan_for(given, {}) is not None


def test_a_call_is_one_replay_with_the_models_answer(gpu: FakeCuda) -> None:
    model = net()
    fast = lowered(model, inputs())

    assert runner(fast) == "CUDA graph"
    for seed in range(3):
        given = inputs(seed)
        assert runs_a_plan(fast, *given)
        answer, expected = fast(*given), model(*given)
        torch.testing.assert_close(answer, expected)
        assert answer["image"].stride() == expected["image"].stride()
    assert gpu.records == 1


def test_who_holds_an_output_keeps_it(gpu: FakeCuda) -> None:
    fast = lowered(net(), inputs())
    first = fast(*inputs(1))
    kept = {name: value.clone() for name, value in first.items()}
    fast(*inputs(2))
    assert all(torch.equal(first[name], kept[name]) for name in kept)

    first["image"].zero_()
    torch.testing.assert_close(fast(*inputs(1)), kept)


def test_it_can_be_declined(gpu: FakeCuda) -> None:
    model = net()
    fast = lowered(model, inputs(), cuda_graph=False)
    other = pickle.loads(pickle.dumps(fast))
    fast.lower(inputs(batch=3))
    other.lower(inputs(batch=4))
    fast.refit(model.state_dict(), inputs())

    assert runs_a_plan(fast, *inputs())
    assert gpu.records == 0


def test_inputs_are_left_as_they_are(gpu: FakeCuda) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).relu_().mul_(2)

    x = inputs()[1]
    fast, kept = lowered(InPlace().eval(), x), x.clone()
    fast(x)

    assert torch.equal(x, kept)


def test_other_calls_run_without_it(gpu: FakeCuda) -> None:
    model = net()
    fast = lowered(model, inputs())
    x, scale = inputs()

    assert not runs_a_plan(fast, *inputs(batch=3))
    torch.testing.assert_close(fast(*inputs(batch=3)), model(*inputs(batch=3)))
    assert fast(x.requires_grad_(), scale)["scores"].requires_grad


def test_while_a_graph_of_the_callers_is_captured_the_model_is_launched_into_it(
    gpu: FakeCuda,
) -> None:
    model = net()
    fast = lowered(model, inputs())
    gpu.capturing = True

    assert not runs_a_plan(fast, *inputs())
    torch.testing.assert_close(fast(*inputs()), model(*inputs()))
    with pytest.raises(optimizer.InputError):
        fast.lower(inputs(batch=3))


def test_weights_that_were_written_are_recorded_again(gpu: FakeCuda) -> None:
    fast = lowered(net(), inputs())
    fast.load_state_dict({name: each * 2 for name, each in fast.state_dict().items()})
    expected = fast.run_portable(*inputs())

    for _ in range(3):
        torch.testing.assert_close(fast(*inputs()), expected)
    assert gpu.records == 2


def test_a_pickle_records_its_own(gpu: FakeCuda) -> None:
    model = net()
    fast = pickle.loads(pickle.dumps(lowered(model, inputs())))

    with torch.inference_mode():
        fast(*inputs())
    torch.testing.assert_close(fast(*inputs(1)), model(*inputs(1)))
    assert runs_a_plan(fast, *inputs())
    assert gpu.records == 2


def test_threads_take_turns(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(self: Tape) -> None:
        time.sleep(0.002)
        replay(self)
        time.sleep(0.002)

    replay = Tape.replay
    monkeypatch.setattr(Tape, "replay", slowly)
    model = net()
    fast = lowered(model, inputs())
    answers: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: answers.update({seed: fast(*inputs(seed))}))
        for seed in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for seed in range(8):
        torch.testing.assert_close(answers[seed], model(*inputs(seed)))


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
    model = net()
    fast = lowered(model, inputs())

    assert runner(fast) == AS_IT_IS
    assert reason in fast.report.choices[-1].rejected["CUDA graph"]
    assert runs_a_plan(fast, *inputs())
    torch.testing.assert_close(fast(*inputs(1)), model(*inputs(1)))


def test_without_timing_it_is_chosen(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Times, "race", None)

    assert runner(lowered(net(), inputs(), tune_seconds=0)) == "CUDA graph"


def test_without_timing_its_answer_is_compared_all_the_same(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: FakeCuda, program: Any, given: Any) -> Any:
        return (lambda: None), list(given), tuple(each * 1.5 for each in program(*given))

    fast = lowered(net(), inputs())
    monkeypatch.setattr(FakeCuda, "record", wrong)

    with pytest.raises(optimizer.InputError, match="its answer differs"):
        fast.lower(inputs(batch=3), tune_seconds=0)


def test_a_call_is_decided_apart_from_the_region_that_it_consists_of(gpu: FakeCuda) -> None:
    fast = lowered(nn.Conv2d(3, 8, 3).eval(), inputs()[0])

    assert [choice.chosen for choice in fast.report.choices] == ["channels_last", "CUDA graph"]
    assert len({choice.key for choice in fast.report.choices}) == 2


def test_on_a_device_without_graphs_there_is_none() -> None:
    with pytest.raises(TypeError, match="cpu has no CUDA graphs"):
        CANDIDATES["CUDA graph"](nn.Identity(), [torch.ones(1)])


class Stub:
    """Stands for torch.cuda, and writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def named(self, name: str) -> Any:
        def method(*args: Any) -> None:
            self.calls.append(f"{name}({', '.join(map(str, args))})")

        return method

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        self.calls.append(f"enter {name}")
        yield
        self.calls.append(f"leave {name}")

    def stream(self, name: str) -> Any:
        members = {each: self.named(f"{name}.{each}") for each in _OF_STREAMS}
        return type(name, (), {**{k: staticmethod(v) for k, v in members.items()}, "name": name})


_OF_STREAMS = ("wait_stream", "wait_event", "record_event")


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()
    graph = type("Graph", (), {"replay": staticmethod(made.named("replay"))})
    patches = {
        "Stream": lambda device: made.stream("side"),
        "current_stream": lambda device: made.stream("current"),
        "stream": lambda stream: made.within(stream.name),
        "Event": lambda: "done",
        "CUDAGraph": graph,
        "graph": lambda graph, stream, capture_error_mode: made.within(
            f"capture on {stream.name}, {capture_error_mode}"
        ),
    }
    for name, value in patches.items():
        monkeypatch.setattr(torch.cuda, name, value)
    clear = made.named("clear workspaces")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    return made


def test_a_graph_is_captured_after_a_warm_up_on_a_side_stream(stub: Stub) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor]:
        stub.calls.append("run")
        assert not _device._CAPTURE.acquire(blocking=False)  # no two captures at once
        return (x + 1,)

    x = torch.ones(2, 3).t()
    replay, [own], [output] = Cuda(0).record(program, [x])
    replay()

    side = stub.calls.index("enter side")
    assert stub.calls[side - 1].startswith("side.wait_stream(")
    assert stub.calls[side:] == [
        *("enter side", "run", "run", "run", "leave side", "clear workspaces()"),
        *("enter capture on side, thread_local", "run", "leave capture on side, thread_local"),
        *("clear workspaces()", "replay()"),
    ]
    assert own is not x
    assert own.stride() == x.stride()
    assert output.shape == x.shape


def test_a_turn_waits_for_the_one_before_it_on_any_stream(stub: Stub) -> None:
    turn = Cuda(0).turns()
    with turn():
        stub.calls.append("work")
    with pytest.raises(ZeroDivisionError), turn():
        stub.calls.append(str(1 // 0))
    with turn():
        stub.calls.append("work")

    waits, records = "current.wait_event(done)", "current.record_event(done)"
    assert stub.calls == [waits, "work", records, waits, records, waits, "work", records]
