"""What Dynamo records where calling the forward with stand-ins cannot: the same as eager, always.

Each program is optimized and called beside a copy in eager: outputs, what is left in inputs and
buffers, and random states agree, call by call, at other sizes too.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import optimizer
from optimizer import InputError
from optimizer.frontend.dynamo import GuardedModule
from optimizer.frontend.module import Unchanged
from optimizer.lowering.choose import Times

# Importing Dynamo and compiling warn of what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
Pair = namedtuple("Pair", "first second")
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


PROGRAMS: dict[str, Callable[..., Any]] = {}


def program(function: Callable[..., Any]) -> Callable[..., Any]:
    PROGRAMS[function.__name__] = function
    return function


@program
def plain(m: Any, x: Tensor) -> Tensor:
    return x.relu()


@program
def branch_on_data(m: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


@program
def asks_for_three(m: Any, x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 2 else x


@program
def over_rows(m: Any, x: Tensor) -> Tensor:
    return sum(m.linear(row) for row in x)


@program
def counting(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return x * m.count + m.plain


@program
def replacing(m: Any, x: Tensor) -> Tensor:
    m.count = m.count + 1
    return x * m.count


@program
def masked(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = 0.5
    return y


@program
def returning_all(m: Any, x: Tensor) -> Any:
    return {"x": x, "list": [m.linear(x), None, 3], "ordered": OrderedDict(a=x.t())}


@program
def keeps_count(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x * m.calls


@program
def keeps_a_tensor(m: Any, x: Tensor) -> Tensor:
    m.plain = x
    return x + m.plain


@program
def keeps_a_list(m: Any, x: Tensor) -> Tensor:
    m.seen.append(len(m.seen))
    return x * len(m.seen)


@program
def keeps_a_cache(m: Any, x: Tensor) -> Tensor:
    if x.shape[0] not in m.kept:
        m.kept[x.shape[0]] = torch.arange(x.shape[0]).float()[:, None]
    return x + m.kept[x.shape[0]]


@program
def assigns_a_parameter(m: Any, x: Tensor) -> Tensor:
    m.scale = nn.Parameter(m.scale + 1)
    return x * m.scale


@program
def swallows_an_error(m: Any, x: Tensor) -> Tensor:
    factor = 1
    with contextlib.suppress(Exception):
        factor = int(x.sum()) + 7
    return x * factor


@program
def rolls_dice(m: Any, x: Tensor) -> Tensor:
    return x * random.random()


@program
def drops(m: Any, x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) + torch.rand(4)


@program
def writes_a_parameter(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale.add_(1)
    return x * m.scale


@program
def writes_a_plain_tensor(m: Any, x: Tensor) -> Tensor:
    return x + m.plain.add_(2)


@program
def records_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x * 2


@program
@torch.inference_mode()
def in_inference_mode(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.linear(x)).relu()  # type: ignore[no-any-return]


@program
def without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


@program
def without_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.linear(x.float())


@program
def with_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.linear(x).float()


@program
def on_a_device(m: Any, x: Tensor) -> Tensor:
    return (x.to(torch.device("cpu")) + torch.ones(4, device=x.device)).to("cpu")


@program
def returns_a_pair(m: Any, x: Tensor) -> Any:
    return Pair(x, x * 2)


@program
def returns_a_defaultdict(m: Any, x: Tensor) -> Any:
    return defaultdict(list, twice=x * 2)


@program
def checks_the_data(m: Any, x: Tensor) -> Any:
    number = (x > -100).sum().item()
    torch._check(number > 0)
    return x * number


@program
def counts_elsewhere(m: Any, x: Tensor) -> Tensor:
    return x * len(CALLS)


class Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(min=0.1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@program
def calls_an_autograd_function(m: Any, x: Tensor) -> Tensor:
    return Recorded.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@program
def extends_a_list(m: Any, x: Tensor) -> Tensor:
    parts = list(x.chunk(2, 1))
    parts.extend(part.relu() for part in parts[-1:])
    return torch.cat(parts, 1)


@program
def calls_itself(m: Any, x: Tensor, depth: int = 3) -> Tensor:
    return x if depth == 0 else calls_itself(m, m.linear(x), depth - 1)


@program
def makes_a_layer(m: Any, x: Tensor) -> Tensor:
    return nn.Softmax(dim=-1)(x)


def observed(module: nn.Module, x: Tensor, seed: int) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    given = x.clone()
    with torch.no_grad():
        output = module(given)
    held = getattr(module, "model", module)
    return output, given, held.count, held.scale.detach(), torch.rand(1), random.random()


def assert_same(expected: Any, actual: Any) -> None:
    old, spec = pytree.tree_flatten(expected)
    new, new_spec = pytree.tree_flatten(actual)
    assert spec == new_spec
    for one, other in zip(old, new, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_does_what_it_does_in_eager(name: str) -> None:
    model, eager = Program(PROGRAMS[name]), Program(PROGRAMS[name])
    before = copy.deepcopy(vars(model)["calls"]), copy.deepcopy(model.state_dict())

    level = sorted(PROGRAMS).index(name) % 3  # with each level on one of three
    fast = optimizer.optimize(model, ROWS, level=level, tune_seconds=0, engines=())

    assert_same(before, (model.calls, model.state_dict()))
    assert not model.seen
    assert not model.kept
    for step, x in enumerate((ROWS, ROWS + 1, ROWS[:2], ROWS[:1], ROWS - 5)):
        assert_same(observed(eager, x, step), observed(fast, x, step))


RECORDED = sorted(PROGRAMS.keys() - {
    # Left as they are: they draw random numbers, or a graph enters a mode.
    "rolls_dice", "drops", "records_gradients", "with_autocast",
})  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_all_but_few_are_recorded(name: str) -> None:
    fast = optimizer.optimize(Program(PROGRAMS[name]), ROWS, level=1)

    assert isinstance(fast, GuardedModule), fast.report
    assert fast.report.counts()["fold_affine"] >= 1
    assert "recorded by Dynamo: " in fast.report.remarks[0]
    assert "captured by dynamo" in str(fast.report)


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - set(RECORDED)))
def test_what_draws_or_enters_a_mode_is_left_as_it_is(name: str) -> None:
    fast = optimizer.optimize(Program(PROGRAMS[name]), ROWS, level=1)

    assert isinstance(fast, Unchanged)
    assert "left as it is" in fast.report.remarks[-1]


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


@torch.no_grad()
def test_a_write_to_the_snapshot_is_seen() -> None:
    fast, eager = guarded(), Program(plain)
    fast(ROWS)

    for module in (fast.model, eager):
        module.linear.weight.data.mul_(3)

    assert_same(eager(ROWS), fast(ROWS))


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


class Scaled(nn.Module):
    """torch multiplies rows of images in another way where the weights require gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x) * (1 if x.sum().isnan() else 2)
        return (y + 1).tanh(), y + 1


@torch.no_grad()
def test_the_same_bits_are_those_of_weights_that_require_gradients() -> None:
    model = Scaled()
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
    model = Blocks(Asks())
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


def written_dict(m: Any, b: Any) -> Tensor:
    raw = b["x"].tanh()
    b["x"] = b["x"].clamp(-1, 1)
    return m.norm(m.linear(raw + b["x"].tanh()))


def written_list(m: Any, b: Any) -> Tensor:
    raw = b[0].tanh()
    b[0] = b[0].clamp(-1, 1)
    return m.norm(m.linear(raw + b[0].tanh()))


def growing_dict(m: Any, b: Any) -> Tensor:
    b["feat"] = m.norm(m.linear(b["x"])).relu()
    return b["feat"] * 2


def growing_list(m: Any, b: Any) -> Tensor:
    b.append(m.norm(m.linear(b[0])))
    return b[-1] * len(b)


def updated_dict(m: Any, b: Any) -> Tensor:
    b.update(x=m.norm(m.linear(b["x"])))
    return b.pop("x")


CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Any]]] = {
    "a dict that is written": (written_dict, lambda x: {"x": x}),
    "a list that is written": (written_list, lambda x: [x]),
    "a dict that grows": (growing_dict, lambda x: {"x": x}),
    "a list that grows": (growing_list, lambda x: [x]),
    "a dict that is updated": (updated_dict, lambda x: {"x": x}),
}


class Given(Program):
    def forward(self, given: Any) -> Any:
        return self.function(self, given)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("name", CONTAINERS)
@torch.no_grad()
def test_a_container_that_is_given_is_changed_as_in_eager(name: str, level: int) -> None:
    function, container = CONTAINERS[name]
    eager, example = Given(function), container(ROWS / 4)

    inputs = (example,)
    fast = optimizer.optimize(Given(function), inputs, level=level, tune_seconds=0, engines=())

    assert_same(container(ROWS / 4), example)
    for x in (ROWS, ROWS * 5, ROWS[:2]):
        one, other = container(x), container(x)
        assert_same(eager(one), fast(other))
        assert_same(one, other)


GENERATORS: dict[str, Callable[[], Any]] = {
    "in a list": lambda: (lambda g: lambda m, x: x * g[0].random())([random.Random(1)]),
    "of a closure": lambda: (lambda g: lambda m, x: x * g.random())(random.Random(1)),
    "of numpy": lambda: (lambda g: lambda m, x: x * float(g.random()))(np.random.default_rng(1)),
    "numpy's own": lambda: lambda m, x: x * float(np.random.rand()),
}


@pytest.mark.parametrize("name", GENERATORS)
@torch.no_grad()
def test_a_generator_of_random_numbers_goes_on(name: str) -> None:
    """Dynamo takes the number that a `random.Random` gives for a constant."""
    eager, model = (Program(GENERATORS[name]()) for _ in range(2))

    fast = optimizer.optimize(model, ROWS, level=1)

    for each in (eager, fast):
        np.random.seed(3)
        each.expected = [each(ROWS) for _ in range(4)]
    assert_same(eager.expected, fast.expected)


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


@pytest.mark.parametrize("write", [steps_a_parameter, writes_unseen])
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


class Clamps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Recorded.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 1 else x


@pytest.mark.parametrize("between", [Clamps, Asks])
@torch.no_grad()
def test_a_part_that_is_called_as_it_is_stops_nothing_at_level_2(between: Any) -> None:
    model, x = Blocks(between()), torch.rand(2, 3, 8, 8)

    portable = optimizer.optimize(model, x, level=1)
    fast = optimizer.optimize(model, x, level=2, tune_seconds=0, engines=())

    assert "recorded by Dynamo" in portable.report.remarks[0]
    assert isinstance(fast, GuardedModule), fast.report
    assert fast.report.choices
    for each in (x, x[:1], torch.rand(3, 3, 9, 9)):
        assert_same(model(each), fast(each))
