"""What becomes of a model that Dynamo recorded: its weights, later calls and what looks at them.

Which programs it records, and that they do what they do in eager, is in test_programs.py.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import optimizer
from optimizer import InputError
from optimizer.frontend.dynamo import GuardedModule
from optimizer.frontend.module import Unchanged
from optimizer.lowering.choose import Times
from tests.single_pass import Forward, function_of

# Importing Dynamo and compiling warn of what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
CALLS = [0]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    CALLS[0] = 0
    yield
    torch._dynamo.reset()


class Program(nn.Module):
    """Runs one function behind layers that fold, with a parameter, a buffer and plain state."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("count", torch.zeros(4))
        self.plain, self.calls, self.seen, self.kept = torch.zeros(4), 0, [], {}
        self.function = function
        nn.init.normal_(self.norm.running_mean)
        self.eval()

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Any:
        if x.shape[-1] != 4:  # our own recording takes no branch on a size
            raise ValueError("four columns")
        return self.function(self, self.norm(self.linear(x)), *more, **named)


def plain(m: Any, x: Tensor) -> Tensor:
    return x.relu()


def masked(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = 0.5
    return y


def on_a_device(m: Any, x: Tensor) -> Tensor:
    return (x.to(torch.device("cpu")) + torch.ones(4, device=x.device)).to("cpu")


class Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(min=0.1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def assert_same(expected: Any, actual: Any) -> None:
    old, spec = pytree.tree_flatten(expected)
    new, new_spec = pytree.tree_flatten(actual)
    assert spec == new_spec
    for one, other in zip(old, new, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, equal_nan=True)


def guarded(function: Callable[..., Any] = plain, level: int = 1, **options: Any) -> GuardedModule:
    model = Program(function)
    fast = optimizer.optimize(model, ROWS, level=level, tune_seconds=0, engines=(), **options)
    assert isinstance(fast, GuardedModule), fast.report
    return fast


def recordings(fast: GuardedModule) -> int:
    """How many graphs the report tells of."""
    return sum(line.text.startswith("output") for line in fast.report.graph_after)


@torch.no_grad()
def test_nothing_is_recorded_twice_for_calls_like_the_example() -> None:
    fast = guarded()
    before = recordings(fast)

    for x in (ROWS, ROWS + 1):
        fast(x)

    assert (before, recordings(fast)) == (1, 1)
    fast(ROWS[:2])
    assert recordings(fast) == 2


@pytest.mark.parametrize("check", ["final", "each", None])
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_answer_that_graphs_change_is_seen(check: Any) -> None:
    """Torch's fast path puts zeros at padded places; Dynamo records the other one."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.rand(2, 3, 4), torch.tensor([[False, False, True], [False] * 3])
    inputs = {"src": x, "src_key_padding_mask": padding}

    fast = optimizer.optimize(model, inputs, level=1, check=check)

    assert isinstance(fast, Unchanged), fast.report
    assert "by Dynamo: its graphs give another answer" in fast.report.remarks[-1]
    torch.testing.assert_close(fast(**inputs), model(**inputs))


COPIES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda fast: fast,
    "a copy": copy.deepcopy,
    "a pickle": lambda fast: pickle.loads(pickle.dumps(fast)),
}
CHANGES: dict[str, Callable[[Any, nn.Module], object]] = {
    "refit": lambda fast, other: fast.refit(other.state_dict()),
    "load_state_dict": lambda fast, other: fast.load_state_dict(
        {f"model.{name}": value for name, value in other.state_dict().items()}
    ),
    "of the snapshot": lambda fast, other: setattr(fast, "model", copy.deepcopy(other)),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("level", [1, 2])
@torch.no_grad()
def test_other_weights_are_those_that_run(change: str, name: str, level: int) -> None:
    fast = guarded(level=level)
    fast(ROWS)
    other = Program(plain)
    for parameter in other.parameters():
        parameter.add_(0.5)

    copied = COPIES[name](fast)
    first = copied(ROWS)
    CHANGES[change](copied, other)

    assert_same(Program(plain)(ROWS), first)
    assert_same(other(ROWS), copied(ROWS))
    assert_same(other(ROWS[:2]), copied(ROWS[:2]))
    if name != "itself":
        assert_same(Program(plain)(ROWS), fast(ROWS))


def normed(m: Any, x: Tensor) -> Tensor:
    """The kernel of weight_norm asks for the memory of weights as if to write it."""
    return x @ torch._weight_norm(m.linear.weight, m.scale[:, None])


@pytest.mark.parametrize("function", [plain, normed])
@torch.no_grad()
def test_a_write_to_the_snapshot_is_seen(function: Callable[..., Any]) -> None:
    fast, eager = guarded(function), Program(function)
    fast(ROWS)

    for module in (fast.model, eager):
        module.linear.weight.data.mul_(3)
        module.scale.mul_(2)

    assert_same(eager(ROWS), fast(ROWS))


@torch.no_grad()
def test_a_write_to_weights_that_something_else_holds_is_seen() -> None:
    fast, eager = guarded().eval(), Program(plain)  # it forgets its graphs, which share weights
    gc.collect()
    held = [each.detach() for each in fast.model.parameters()]
    fast(ROWS)

    for module in (fast.model, eager):
        module.linear.weight.mul_(3)

    assert_same(eager(ROWS), fast(ROWS))
    assert held


def test_a_checkpoint_of_another_model_is_refused() -> None:
    fast = guarded()

    with pytest.raises(InputError, match="checkpoint"):
        fast.refit({"nothing": ROWS})
    with pytest.raises(InputError, match="constants"):
        fast.requires_grad_(True)
    with torch.no_grad():
        assert_same(Program(plain)(ROWS), fast(ROWS))


@torch.no_grad()
def test_the_result_may_be_cast_and_put_into_training_mode() -> None:
    fast, eager = guarded(), Program(plain)

    assert_same(eager.double()(ROWS.double()), fast.double()(ROWS.double()))
    assert_same(eager.train()(ROWS.double()), fast.train()(ROWS.double()))
    assert_same(eager.eval()(ROWS.double()), fast.eval()(ROWS.double()))


def test_the_callers_model_and_the_result_share_nothing() -> None:
    model = Program(plain)
    fast: Any = optimizer.optimize(model, ROWS, level=1)
    with torch.no_grad():
        before = fast(ROWS)
        for parameter in model.parameters():
            parameter.zero_()

        assert torch.equal(fast(ROWS), before)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_gradients_of_an_input_are_the_models() -> None:
    fast, eager = guarded(), Program(plain)
    one, other = (ROWS.clone().requires_grad_() for _ in range(2))

    fast(one).sum().backward()
    eager(other).sum().backward()

    torch.testing.assert_close(one.grad, other.grad)
    assert not fast(ROWS).requires_grad
    with pytest.raises(InputError, match="constants"):
        fast.requires_grad_()


@torch.no_grad()
def test_the_same_bits_are_those_of_weights_that_require_gradients() -> None:
    """Torch multiplies images in another way where the weights require gradients."""
    torch.manual_seed(0)
    text = "y = m.linear(x) * (1 if x.sum().isnan() else 2); return (y + 1).tanh(), y + 1"
    model = Forward(text, linear=nn.Linear(4, 4, dtype=torch.float64)).eval()
    rows = torch.randn(4, 4, 4, dtype=torch.float64)

    fast = optimizer.optimize(model, rows, level=0)

    assert isinstance(fast, GuardedModule), fast.report
    for x in (rows, rows.transpose(0, 2), rows.mT, rows[:, :1]):
        for actual, expected in zip(fast(x), model(x), strict=True):
            assert torch.equal(actual, expected)


WATCHED: dict[str, Callable[[Any], Any]] = {
    "autocast": lambda module: torch.autocast("cpu", torch.bfloat16)(module)(ROWS),
    "vmap": lambda module: torch.vmap(module)(ROWS[:, None]),
    "jvp": lambda module: torch.func.jvp(module, (ROWS,), (torch.ones_like(ROWS),)),
    "jit.trace": lambda module: torch.jit.trace(module, ROWS)(ROWS),
    "export": lambda module: torch.export.export(module, (ROWS,)).module()(ROWS),
    "compile": lambda module: torch.compile(module, backend="eager", fullgraph=True)(ROWS),
    "inference mode": lambda module: torch.inference_mode()(module)(ROWS),
}


@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.filterwarnings("ignore:.*TracerWarning", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor:torch.jit.TracerWarning")
@torch.no_grad()
def test_what_looks_at_a_call_sees_the_model(name: str) -> None:
    fast, eager = guarded(), Program(plain)

    assert_same(WATCHED[name](eager), WATCHED[name](fast))


def test_fx_traces_through_it() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = guarded()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x) + 1

    class Leaves(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return isinstance(m, GuardedModule)

    outer = Outer().eval()
    traced = fx.GraphModule(outer, Leaves().trace(outer))

    with torch.no_grad():
        assert_same(outer(ROWS), traced(ROWS))
        assert_same(outer(ROWS), optimizer.optimize(outer, ROWS, level=1)(ROWS))


@torch.no_grad()
def counts_more(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    m.seen.append(m.calls)
    return x + m.count.add_(1) * m.calls


def test_calls_of_other_sizes_are_prepared_and_leave_no_trace() -> None:
    model = Blocks(Forward(ASKS))
    fast: Any = optimizer.optimize(model, torch.rand(2, 3, 8, 8), tune_seconds=0, engines=())
    graphs = len(fast.report.choices)

    choices = fast.lower({"x": torch.rand(1, 3, 9, 9)})

    assert choices
    assert fast.report.choices[graphs:] == choices
    x = torch.rand(1, 3, 9, 9)
    assert_same(model(x), fast(x))

    counting, eager = guarded(counts_more), Program(counts_more)
    counting.lower(ROWS[:2])
    for x in (ROWS, ROWS[:2], ROWS[:2]):
        assert_same(eager(x), counting(x))
    assert counting.model.calls == 3
    with pytest.raises(InputError):
        counting.lower(3)


def test_threads_may_call_one_result_at_once() -> None:
    fast, eager = guarded(), Program(plain)
    inputs = [ROWS[: 1 + i % 3] + i for i in range(24)]
    expected = [eager(x) for x in inputs]

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            return fast(x)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(4) as threads:
        assert_same(expected, list(threads.map(call, inputs)))


@torch.no_grad()
def test_beyond_so_many_recordings_calls_are_still_right() -> None:
    fast, eager = guarded(lambda m, x: x * len(m.seen)), Program(lambda m, x: x * len(m.seen))

    for count in range(12):
        fast.model.seen[:] = eager.seen[:] = range(count)
        assert_same(eager(ROWS), fast(ROWS))
    assert recordings(fast) <= 8


@torch.no_grad()
def test_two_models_of_one_class_do_not_meet() -> None:
    one, two = Program(plain), Program(plain)
    for parameter in two.parameters():
        parameter.mul_(2)

    fast = [optimizer.optimize(each, ROWS, level=1) for each in (one, two)]

    for each, model in zip(fast, (one, two), strict=True):
        assert_same(model(ROWS), each(ROWS))
        assert_same(model(ROWS[:2]), each(ROWS[:2]))


class Dropping(Program):
    """Its rate is another in other models that run the same code."""

    def __init__(self, rate: float) -> None:
        super().__init__(plain)
        self.drop = nn.Dropout(rate).eval()

    def forward(self, x: Tensor) -> Any:
        return self.drop(super().forward(x))


def test_a_number_that_is_another_in_another_model_is_no_input() -> None:
    for rate in (0.1, 0.2, 0.3):
        fast = optimizer.optimize(Dropping(rate), (ROWS,), level=2, tune_seconds=0)

        assert isinstance(fast, GuardedModule)
        assert fast.report.choices
        assert not any("not lowered" in remark for remark in fast.report.remarks)


@pytest.mark.parametrize(("share", "kind"), [(1.0, Unchanged), (0.5, GuardedModule)])
def test_a_model_is_not_made_slower_by_its_graphs(
    share: float, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"portable": 1.0, "plan": share}
    monkeypatch.setattr("optimizer._optimize.Times", Times)
    monkeypatch.setattr(Times, "race", lambda *args, **options: seconds)

    fast = optimizer.optimize(Program(masked), ROWS, level=1)

    told = [each for each in fast.report.remarks if "it is not faster in graphs: 1.00" in each]
    assert isinstance(fast, kind)
    assert bool(told) is (kind is Unchanged)
    untimed = optimizer.optimize(Program(masked), ROWS, level=1, tune_seconds=0)
    assert isinstance(untimed, GuardedModule)


def test_a_race_with_what_touches_weights_makes_no_graph_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def race(self: Times, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
        for name in ("plan", "portable") * 3:
            runs[name](*self.inputs)
        return {"portable": 1.0, "plan": 0.5}

    monkeypatch.setattr("optimizer._optimize.Times", Times)
    monkeypatch.setattr(Times, "race", race)

    fast = optimizer.optimize(Program(normed), ROWS, level=1)

    assert isinstance(fast, GuardedModule)
    assert recordings(fast) == 1


@torch.no_grad()
def test_nothing_keeps_the_weights_of_a_result_that_is_gone() -> None:
    """Dynamo keeps what a backend returns as long as the process lives: weights are not in it."""
    before = weights_held()
    fast = guarded()
    fast(ROWS[:2])
    alive = [weakref.ref(parameter) for parameter in fast.parameters()]
    assert weights_held() > before

    del fast

    assert weights_held() == before
    assert [each() for each in alive] == [None] * len(alive)


def weights_held() -> int:
    """How many parameters there are in the process, but for those that hold no memory."""
    gc.collect()
    return sum(type(each) is nn.Parameter for each in gc.get_objects())


def test_it_is_checked_measured_and_reported_like_any_result() -> None:
    model, fast = Program(plain), guarded()

    optimizer.check(model, fast, ROWS)
    assert optimizer.compare(model, fast, ROWS, rounds=6).fast.latency.median > 0
    assert "fold_affine" in fast.report.to_html()
    assert len(str(fast.report).splitlines()) <= 20


@torch.no_grad()
def test_hooks_of_all_modules_see_its_calls() -> None:
    fast, seen = guarded(), list[str]()
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(type(module).__name__)
    )
    try:
        fast(ROWS)
    finally:
        handle.remove()

    assert {"Linear", "BatchNorm1d", "Program"} <= set(seen)


WRITTEN = "raw = {b}.tanh(); {b} = {b}.clamp(-1, 1); return m.norm(m.linear(raw + {b}.tanh()))"
CONTAINERS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "a dict that is written": (WRITTEN.format(b="x['x']"), lambda x: {"x": x}),
    "a list that is written": (WRITTEN.format(b="x[0]"), lambda x: [x]),
    "a dict that grows": (
        "x['f'] = m.norm(m.linear(x['x'])).relu(); return x['f'] * 2", lambda x: {"x": x}
    ),
    "a list that grows": (
        "x.append(m.norm(m.linear(x[0]))); return x[-1] * len(x)", lambda x: [x]
    ),
    "a dict that is updated": (
        "x.update(x=m.norm(m.linear(x['x']))); return x.pop('x')", lambda x: {"x": x}
    ),
}  # fmt: skip


class Given(Program):
    def forward(self, given: Any) -> Any:
        return self.function(self, given)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("name", CONTAINERS)
@torch.no_grad()
def test_a_container_that_is_given_is_changed_as_in_eager(name: str, level: int) -> None:
    function, container = CONTAINERS[name]
    eager, model = (Given(function_of("m, x", function)) for _ in range(2))
    example = container(ROWS / 4)

    fast = optimizer.optimize(model, (example,), level=level, tune_seconds=0, engines=())

    assert_same(container(ROWS / 4), example)
    for x in (ROWS, ROWS * 5, ROWS[:2]):
        one, other = container(x), container(x)
        assert_same(eager(one), fast(other))
        assert_same(one, other)


def counted(m: Any, x: Tensor) -> Tensor:
    CALLS[0] += 1
    return x * random.random() * CALLS[0]


@torch.no_grad()
def test_what_is_prepared_draws_no_numbers_of_the_callers_and_changes_no_input() -> None:
    def draws(m: Any, x: Tensor, *lists: Any) -> Tensor:
        for each in lists:
            each.append(torch.rand_like(x))
        return x + 1

    fast, before, given = guarded(draws), torch.get_rng_state(), [0]

    fast.lower((ROWS[:2], given))

    assert torch.equal(torch.get_rng_state(), before)
    assert given == [0]


def steps_a_parameter(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale.add_(1)
    return x * m.scale if x.shape[0] < 9 else x


def writes_unseen(m: Any, x: Tensor) -> Tensor:
    m.count.data.add_(1)
    return x * m.count if x.shape[0] < 9 else x


def writes_a_plain_tensor(m: Any, x: Tensor) -> Tensor:
    m.plain.add_(1)
    return x * m.plain if x.shape[0] < 9 else x


@pytest.mark.parametrize("write", [steps_a_parameter, writes_unseen, writes_a_plain_tensor])
@torch.no_grad()
def test_what_a_call_that_is_prepared_writes_is_put_back(write: Callable[..., Any]) -> None:
    fast: Any = optimizer.optimize(Program(write), ROWS, level=1)
    before = copy.deepcopy(fast.model.state_dict())

    fast.lower(ROWS[:2])

    assert all(torch.equal(before[name], each) for name, each in fast.model.state_dict().items())
    assert_same(Program(write)(ROWS[:2]), fast(ROWS[:2]))


def rejects_many(m: Any, x: Tensor) -> Tensor:
    m.count.add_(1)
    if x.shape[0] > 5:
        raise RuntimeError("too many rows")
    return x * m.count


@torch.no_grad()
def test_what_a_call_that_fails_wrote_is_put_back() -> None:
    fast: Any = optimizer.optimize(Program(rejects_many), ROWS, level=1)
    before = fast.model.count.clone()

    with pytest.raises(RuntimeError, match="too many rows"):
        fast.lower(torch.cat([ROWS, ROWS]))

    assert torch.equal(fast.model.count, before)


@pytest.mark.parametrize("level", [1, 2])
@torch.no_grad()
def test_what_it_is_tried_with_leaves_no_trace(level: int) -> None:
    random.seed(3)
    model, before = Program(counted), random.getstate()

    fast = optimizer.optimize(model, ROWS, level=level)

    assert random.getstate() == before
    assert CALLS == [0]
    first = fast(ROWS)
    CALLS[0] = 0
    random.setstate(before)
    assert_same(model(ROWS), first)


def test_a_device_that_is_named_hides_no_fact_from_level_2() -> None:
    assert "nothing is known of" not in str(guarded(on_a_device, level=2).report)


class Blocks(nn.Module):
    """Two convolution blocks around a part that our own recording calls as it is."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.between = between
        self.two = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.two(self.between(self.one(x)))


ASKS = "x * 2 if x.shape[0] > 1 else x"


@pytest.mark.parametrize("between", [ASKS, lambda m, x: Recorded.apply(x)])
@torch.no_grad()
def test_a_part_that_is_called_as_it_is_stops_nothing_at_level_2(between: Any) -> None:
    model, x = Blocks(Forward(between)), torch.rand(2, 3, 8, 8)

    portable = optimizer.optimize(model, x, level=1)
    fast = optimizer.optimize(model, x, level=2, tune_seconds=0, engines=())

    assert "recorded by Dynamo" in portable.report.remarks[0]
    assert isinstance(fast, GuardedModule), fast.report
    assert fast.report.choices
    for each in (x, x[:1], torch.rand(3, 3, 9, 9)):
        assert_same(model(each), fast(each))
