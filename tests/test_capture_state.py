"""State outside a module is neither baked in nor left changed, whatever holds it."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import datetime
import functools
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import optimizer

X = torch.linspace(-1, 1, 12).reshape(3, 4)
Function = Callable[[Any, Tensor], Any]


def import_numpy() -> Any:
    """Where it is missing, the cases that are about it are not tried."""
    with contextlib.suppress(ImportError):
        import numpy

        return numpy
    return None


np = import_numpy()
count = 0
listed = [0]
of_names = {"calls": 0}
bytes_of_calls = bytearray(1)
numbers: Any = np.zeros(1) if np else [0]
outside = nn.Module()
outside.calls = 0  # type: ignore[assignment]


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def step(self) -> int:
        self.calls += 1
        return self.calls


class Secretive(Slots):
    """Does not say what it holds."""

    def __getstate__(self) -> None:
        return None


secretive = Secretive()


dice = random.Random(0)


class Drawing(nn.Module):
    """Draws in the code of its class, which runs inside a call that hooks surround."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, inputs, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        return x * dice.random()


class Counted(nn.Module):
    """Scales by what a function gives, which may keep state anywhere."""

    calls = 0

    def __init__(self, function: Function, **held: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * self.function(self, x)


def by_a_global(self: Any, x: Tensor) -> int:
    global count
    count += 1
    return count


def by_a_list(self: Any, x: Tensor) -> int:
    listed[0] += 1
    return listed[0]


def by_a_dict(self: Any, x: Tensor) -> int:
    of_names["calls"] += 1
    return of_names["calls"]


def by_a_bytearray(self: Any, x: Tensor) -> int:
    bytes_of_calls[0] += 1
    return bytes_of_calls[0]


def by_an_array(self: Any, x: Tensor) -> float:
    numbers[0] += 1
    return float(numbers[0])


def by_a_class(self: Any, x: Tensor) -> int:
    Counted.calls += 1
    return self.calls  # type: ignore[no-any-return]


def by_the_type(self: Any, x: Tensor) -> int:
    type(self).calls = self.calls + 1
    return self.calls  # type: ignore[no-any-return]


def by_a_function(self: Any, x: Tensor) -> int:
    by_a_function.calls = getattr(by_a_function, "calls", 0) + 1  # type: ignore[attr-defined]
    return by_a_function.calls  # type: ignore[attr-defined, no-any-return]


def by_a_default(self: Any, x: Tensor, calls: list[int] = [0]) -> int:  # noqa: B006
    calls[0] += 1
    return calls[0]


def by_another_module(self: Any, x: Tensor) -> int:
    outside.calls += 1  # type: ignore[operator]
    return outside.calls  # type: ignore[return-value]


def now_and_then(self: Any, x: Tensor) -> int:
    listed[0] += 1
    return 2 if listed[0] % 3 == 0 else 1


def number_of_steps(self: Any, x: Tensor) -> int:
    return secretive.step()


def tensor_of_steps(self: Any, x: Tensor) -> Tensor:
    return torch.tensor([float(secretive.step())])


def nan_and_steps(self: Any, x: Tensor) -> Tensor:
    return torch.tensor([float("nan"), float(secretive.step())]).nan_to_num().sum()


def more_each_time(self: Any, x: Tensor) -> Tensor:
    for _ in range(1 + secretive.step() % 4):
        x = x + 1.0
    return x


def less_each_time(self: Any, x: Tensor) -> Tensor:
    for _ in range(4 - secretive.step() % 4):
        x = x + 1.0
    return x


def in_a_helper(self: Any, x: Tensor) -> int:
    return by_a_list(self, x)


def by_a_table(self: Any, x: Tensor) -> int:
    return FUNCTIONS["list"](self, x)


def imported(self: Any, x: Tensor) -> float:
    import random as drawing

    return drawing.random()


FUNCTIONS = {"list": by_a_list}


def closure() -> Function:
    calls = 0

    def forward(self: Any, x: Tensor) -> int:
        nonlocal calls
        calls += 1
        return calls

    return forward


def holding(make: Callable[[], Any], function: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """A model that has it as an attribute."""
    return lambda: Counted(lambda self, x: function(self.kept), kept=make())


def enclosing(make: Callable[[], Any], function: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """A model in whose function it is enclosed."""

    def build() -> nn.Module:
        kept = make()
        return Counted(lambda self, x: function(kept))

    return build


def step_of_array(array: Any) -> float:
    array += 1
    return float(array[0])


def list_of_itself() -> list[Any]:
    kept: list[Any] = [0]
    return [kept, kept.append(kept)]


def step_of_list(kept: Any) -> int:
    kept[0][0] += 1
    return int(kept[0][0])


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list that holds itself": (list_of_itself, step_of_list),
    "nested dict": (lambda: {"a": [0]}, lambda kept: kept["a"].append(1) or len(kept["a"])),
    "numpy generator": (lambda: np.random.default_rng(0), lambda kept: float(kept.random())),
    "numpy RandomState": (lambda: np.random.RandomState(0), lambda kept: float(kept.rand())),
    "Python generator": (lambda: random.Random(0), lambda kept: kept.random()),
    "array": (lambda: np.zeros(1), step_of_array),
    "deque": (lambda: collections.deque([1, 2, 3]), lambda kept: kept.rotate() or kept[0]),
    "slots": (Slots, lambda kept: kept.step()),
    "namespace": (
        lambda: SimpleNamespace(n=0),
        lambda kept: vars(kept).update(n=kept.n + 1) or kept.n,
    ),
}
ITERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "itertools": (lambda: itertools.count(1), next),
    "cycle": (lambda: itertools.cycle([1, 2, 3]), next),
    "iterator": (lambda: iter([1, 2, 3, 4, 5, 6, 7, 8]), next),
}
CASES: dict[str, Callable[[], nn.Module]] = {
    **{
        function.__name__: functools.partial(Counted, function)
        for function in (
            by_a_global, by_a_list, by_a_dict, by_a_bytearray, by_an_array, by_a_class, by_the_type,
            by_a_function, by_a_default, by_another_module, now_and_then, in_a_helper, by_a_table,
            imported,
        )
    },
    "drawn within a hook": Drawing,
    "nonlocal": lambda: Counted(closure()),
    "partial": lambda: Counted(functools.partial(by_a_list)),
    "random.random": lambda: Counted(lambda self, x: random.random()),
    "random.uniform": lambda: Counted(lambda self, x: random.uniform(1, 2)),
    "numpy.random": lambda: Counted(lambda self, x: float(np.random.rand())),
    **{f"held {name}": holding(*case) for name, case in (HELD | ITERATORS).items()},
    **{f"enclosed {name}": enclosing(*case) for name, case in HELD.items()},
}  # fmt: skip

if np is None:
    for name in [each for each in CASES if "numpy" in each or each.endswith(" array")]:
        del CASES[name]


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    """The same state before each test, and before each model in it."""
    start()
    yield
    start()


def start() -> None:
    global count
    count = listed[0] = of_names["calls"] = bytes_of_calls[0] = 0
    numbers[0] = outside.calls = Counted.calls = 0  # type: ignore[assignment]
    vars(by_a_function).clear()
    by_a_default.__defaults__[0][0] = 0  # type: ignore[index]
    random.seed(0)
    dice.seed(0)
    if np:
        np.random.seed(0)
    torch.manual_seed(0)


def sequence(model: Any) -> list[Tensor]:
    with torch.no_grad():
        return [model(X).clone() for _ in range(7)]


def built(name: str, *, child: bool) -> nn.Module:
    start()
    model = CASES[name]()
    return (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), model) if child else model).eval()


@pytest.mark.parametrize(("check", "child"), [("final", True), (None, False)])
@pytest.mark.parametrize("name", CASES)
def test_every_call_answers_as_the_original(name: str, check: Any, child: bool) -> None:
    expected = sequence(built(name, child=child))
    model = built(name, child=child)

    fast = optimizer.optimize(model, X, level=1, check=check)

    torch.testing.assert_close(sequence(fast), expected)


def scaled_by_a_list(x: Tensor) -> Tensor:
    return x * by_a_list(None, x)


def test_the_code_of_a_graph_may_keep_state() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(scaled_by_a_list, (graph.placeholder("x"),)))
    model = nn.Sequential(nn.Linear(4, 4), fx.GraphModule(nn.Module(), graph)).eval()
    expected = sequence(model)
    start()

    fast = optimizer.optimize(model, X, level=1)

    torch.testing.assert_close(sequence(fast), expected)


@functools.lru_cache
def kept(number: int) -> Tensor:
    return torch.rand(number)


local = threading.local()
variable: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
generated = (float(n) for n in itertools.count(1))
guard = threading.Lock()

UNKNOWN: dict[str, tuple[Function, str]] = {
    "time": (lambda self, x: time.time() * 0 + 1, "time.time"),
    "perf_counter": (lambda self, x: 1 + 0 * time.perf_counter(), "time.perf_counter"),
    "date": (lambda self, x: datetime.datetime.now().year, "datetime.datetime"),
    "environment": (lambda self, x: float(os.environ.get("SCALE", "1")), "_Environ"),
    "getenv": (lambda self, x: float(os.getenv("SCALE", "1")), "environ"),
    "a thread": (lambda self, x: getattr(local, "scale", 1), "local"),
    "a context": (lambda self, x: variable.get(), "ContextVar"),
    "a generator": (lambda self, x: next(generated), "generator"),
    "a default dtype": (
        lambda self, x: 1 + (torch.get_default_dtype() == torch.float64),
        "get_def",
    ),
    "the threads": (lambda self, x: torch.get_num_threads(), "get_num_threads"),
    "a gradient mode": (lambda self, x: 1 + torch.is_grad_enabled(), "is_grad_enabled"),
    "inference": (lambda self, x: 1 + torch.is_inference_mode_enabled(), "is_inference_mode"),
    "a backend": (lambda self, x: 1 + torch.backends.cudnn.benchmark, "torch.backends"),
    "written code": (lambda self, x: eval("1 + 1"), "eval"),
    "a cached function": (lambda self, x: kept(4), "kept, a _lru_cache_wrapper"),
    "a clock of another name": (lambda self, x: 1 + 0 * getattr(time, "ti" + "me")(), "time"),
    "the current thread": (lambda self, x: len(threading.current_thread().name), "a try statement"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_answer_otherwise_is_not_recorded_with_stand_ins(name: str) -> None:
    function, told = UNKNOWN[name]
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Counted(function)).eval()

    with pytest.raises(optimizer.CaptureError, match=told):
        optimizer.capture(model, X)


ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh}


CONSTANT: dict[str, Function] = {
    "a table of functions": lambda self, x: ACTIVATIONS["tanh"](x),
    "a table": lambda self, x: TABLE["a"][1],
    "numpy": lambda self, x: float(np.sqrt(4.0) * np.array([1.0, 2.0]).sum()),
    "scripting": lambda self, x: 2 if not torch.jit.is_scripting() else 3,
    "arithmetic": lambda self, x: functools.reduce(
        lambda a, b: a * b, itertools.chain([1, 2], [3])
    ),
}
TABLE = {"a": [1.0, 2.0], "b": None}

if np is None:
    del CONSTANT["numpy"]


@pytest.mark.parametrize("name", CONSTANT)
def test_what_no_call_changes_is_recorded(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counted(CONSTANT[name])).eval()

    fast: Any = optimizer.optimize(model, X, level=1)

    assert fast.report.remarks == ()
    assert "2" not in {str(node.target) for node in fast.graph.nodes}
    torch.testing.assert_close(sequence(fast), sequence(model))


def test_what_lay_in_memory_is_no_constant() -> None:
    model = Counted(lambda self, x: x * torch.empty(4).nan_to_num(1.0).clamp(1.0, 1.0)).eval()

    graph = optimizer.capture(model, X).graph

    assert torch.empty in {node.target for node in graph.nodes}


HIDDEN = (number_of_steps, tensor_of_steps, nan_and_steps, more_each_time, less_each_time)


@pytest.mark.parametrize("child", [True, False], ids=["child", "model"])
@pytest.mark.parametrize("function", HIDDEN)
def test_state_that_does_not_show_is_not_recorded(function: Function, child: bool) -> None:
    model: nn.Module = Counted(function)
    model = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), model) if child else model).eval()

    fast = optimizer.optimize(model, X, level=1, check=None)

    assert "it reaches secretive, a Secretive" in fast.report.remarks[0]
    first, second = sequence(fast)[:2]
    assert not torch.equal(first, second)


def test_no_traced_value_stays_in_the_cache_of_a_function() -> None:
    kept.cache_clear()
    model = Counted(lambda self, x: kept(4)).eval()

    optimizer.optimize(model, X, level=1, check=None)

    assert isinstance(model(X), Tensor)


GLOBAL = torch.ones(4)


def scaled_twice(self: nn.Module, x: Tensor) -> Tensor:
    return self.get_submodule("linear")(x) * GLOBAL + x.relu() * GLOBAL


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_tensor_outside_the_module_is_part_of_the_snapshot(level: int) -> None:
    model = Counted(scaled_twice)
    model.linear = nn.Linear(4, 4)
    fast = optimizer.optimize(model.eval(), X, level=level)
    before = model(X).detach()

    GLOBAL.mul_(3)
    after = fast(X)
    GLOBAL.div_(3)

    torch.testing.assert_close(after.detach(), before)


SYSTEM = random.SystemRandom()


class Unwilling:
    """What raises when it is asked for its state."""

    scale = 2.0

    @property
    def __dict__(self) -> dict[str, Any]:
        raise RuntimeError("no")


@dataclass(frozen=True, slots=True)
class Frozen:
    """What may not be put back, and need not be."""

    scale: float = 2.0


UNWILLING, FROZEN, STEPS = Unwilling(), Frozen(), [0]


def of_the_frozen(self: nn.Module, x: Tensor) -> float:
    STEPS[0] += 1
    return FROZEN.scale


UNTOLD: dict[str, Function] = {
    "system": lambda self, x: 1 + 0 * SYSTEM.random(),
    "unwilling": lambda self, x: UNWILLING.scale,
    "frozen": of_the_frozen,
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_does_not_tell_or_take_its_state_raises_nothing(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Counted(UNTOLD[name])).eval()
    STEPS[0] = 0

    fast = optimizer.optimize(model, X, level=1)

    assert STEPS == [0]
    torch.testing.assert_close(fast(X), model(X))


class Tally:
    """An object that a hook writes to."""

    count = 0


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_a_hook_writes_is_put_back(level: int) -> None:
    calls, seen, tally = 0, list[Tensor](), Tally()

    def counting(module: nn.Module, given: Any, result: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        tally.count += 1
        seen.append(result)
        return result * calls

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    model[0].register_forward_hook(counting)

    optimizer.optimize(model, torch.ones(2, 4), level=level, tune_seconds=0.0)

    assert (calls, seen, vars(tally)) == (0, [], {})
