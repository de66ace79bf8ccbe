"""What the tests of level 2 share: models, a fake engine and a fake GPU, what was chosen."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

import optimizer
from tests.internals import Call, Cuda, Times, candidates, choose, engines, module, straight_line
from tests.single_pass import Forward, function_of

PACKED = "packed weights, channels_last"


def line_of(run, held, *inputs):
    return straight_line(run, list(held), Call(inputs, {}))


class Then(Forward):
    """A layer, and a function, or its text, of what it gives."""

    def __init__(self, function: Callable[..., Any] | str, layer: nn.Module | None = None) -> None:
        torch.manual_seed(2)
        of = function_of("y", function) if isinstance(function, str) else function
        super().__init__(lambda m, x: of(m.layer(x)), layer=layer or nn.Conv2d(3, 4, 3, padding=1))


class Running(nn.Module):
    """A program that runs a function."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *given: torch.Tensor) -> Any:
        return self.run(*given)


def net(seed=1):
    """Convolutions with a residual sum, and a Linear."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(16)
    norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    return Forward(
        "y = m.norm(m.first(x)).relu_(); y = F.relu(m.second(y) + y);return m.head(y.mean((2, 3)))",
        first=nn.Conv2d(3, 16, 3, padding=1),
        norm=norm,
        second=nn.Conv2d(16, 16, 3, padding=1),
        head=nn.Linear(16, 5),
    ).eval()


def attending(seed=1):
    """What else images meet: a norm, and attention."""
    torch.manual_seed(seed)
    return Forward(
        "y = F.relu(m.first(x)); y = F.relu(m.second(y) + y);"
        "t = m.norm(y.flatten(2).transpose(1, 2)).unsqueeze(1);"
        "return F.softmax(m.head(F.scaled_dot_product_attention(t, t, t).mean((1, 2))), -1)",
        first=nn.Conv2d(3, 8, 3, padding=1),
        second=nn.Conv2d(8, 8, 3, padding=1),
        norm=nn.LayerNorm(8),
        head=nn.Linear(8, 5),
    ).eval()


class StubEngine:
    """Runs a region by torch; like the kernels of engines, it loses what is not finite."""

    title, module, devices = "Stub", "torch", {"cpu"}

    def compile(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor], threads: int) -> Any:
        return lambda given: [each.nan_to_num(0, 0, 0) for each in graph(*given)]


def offer(monkeypatch, *names):
    """Let "auto" be these engines, of which "stub" is one."""
    monkeypatch.setitem(engines.ENGINES, "stub", StubEngine())
    monkeypatch.setattr(engines, "AUTOMATIC", names)


def pretend(monkeypatch, kind):
    """Let tensors on the CPU count as being on another kind of device."""
    monkeypatch.setitem(candidates.POLICIES, "cpu", candidates.POLICIES[kind])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class FakeCuda(Cuda):
    """A GPU whose graphs run by torch on the same memory each time, and hold no weights."""

    records = 0

    def synchronize(self) -> None:
        return

    def record(self, program: Any, inputs: Any) -> Any:
        self.records += 1
        own = [torch.full_like(each, 7) for each in inputs]
        outputs, held = program(*own), weakref.ref(program)
        return (lambda: self.replay(held, own, outputs)), own, outputs

    def replay(self, held: Any, own: Any, outputs: Any) -> None:
        for old, new in zip(outputs, held()(*own), strict=True):  # or its memory was freed
            old.copy_(new)

    def turns(self) -> Any:
        lock = threading.Lock()
        return lambda: lock


def fake_gpu(monkeypatch):
    pretend(monkeypatch, "cuda")
    fake = FakeCuda(0)
    for each in (choose, candidates):
        monkeypatch.setattr(each, "device_of", lambda tensors: fake)
    return fake


def racing(monkeypatch, seconds):
    """Nothing is timed: a function says what each takes. Return what was raced."""
    raced: list[list[str]] = []

    def race(self, runs, *rest, **more):
        raced.append(list(runs))
        return seconds(list(runs))

    monkeypatch.setattr(Times, "race", race)
    return raced


def all_alike(names):
    return dict.fromkeys(names, 1.0)


def last_wins(names):
    """The plan is faster than anything, then an engine, then what is offered last."""
    order = sorted(names, key=lambda name: name in engines.engines_here(engines.ENGINES))
    seconds = {name: 1.0 / place for place, name in enumerate(order, 1)}
    return {"plan": 0.1, "portable": 1.0} if "plan" in names else seconds


def image(*shape, seed=3):
    return torch.randn(*(shape or (2, 3, 8, 8)), generator=torch.Generator().manual_seed(seed))


def lowered(model, *inputs, train=False, **options):
    """The model for calls like this one, at level 2 if nothing else is said."""
    options = {"level": 2} | options
    fast = optimizer.optimize(model.train(train), inputs or None, **options)
    assert isinstance(fast, module.LoweredModule)
    return fast


def plan_of(fast, *args, **kwargs):
    """What runs instead of the portable code for a call, or None."""
    with torch.no_grad():
        return fast.plan_for(args, kwargs)


def chosen(fast):
    return [choice.chosen for choice in fast.report.choices]


def pickled(module):
    with torch.no_grad():
        return pickle.loads(pickle.dumps(module))
