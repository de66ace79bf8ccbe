"""What becomes of a model that Dynamo recorded: its weights, later calls and what looks at them."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import optimizer
from optimizer import GuardedModule, InputError
from tests.conftest import address
from tests.internals import Times, Unchanged
from tests.level_2 import pickled
from tests.single_pass import Forward, ForwardOfTwo, function_of, rows
from tests.test_programs import ROWS, Asking, assert_equal

# Importing Dynamo and compiling warn of what torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

assert_same = partial(assert_equal, rtol=1e-4, atol=1e-5)
FAST = {"tune_seconds": 0, "engines": ()}
# The kernel of weight_norm asks for the memory of weights as if to write it.
NORMED = "x @ torch._weight_norm(m.linear.weight, m.scale[:, None])"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def plain(m, x):
    return x.relu()


def running(forward=plain, kind=Asking, **held):
    """A model that runs a function or a text, by default behind layers that fold."""
    function = function_of("m, x, *more", forward) if isinstance(forward, str) else forward
    return kind(SimpleNamespace(forward=function, held=held)).eval()


def guarded(forward=plain, level=1):
    fast = optimizer.optimize(running(forward), ROWS, level=level, **FAST)
    assert isinstance(fast, GuardedModule), fast.report
    return fast


def recordings(fast):
    """How many graphs the report tells of."""
    return sum(line.text.startswith("output") for line in fast.report.graph_after)


def cache():
    """Of a caller, which is no weight, though it is marked static, as transformers does."""
    torch._dynamo.mark_static_address(keys := torch.ones(4))
    return SimpleNamespace(keys=keys)


def test_calls_like_the_example_are_recorded_once_on_the_weights_of_the_model():
    """The error of the recording that failed held them too, so that all were copied at once."""
    model = running("m.norm(m.linear(x)) * len(x) + more[0].keys")
    fast = optimizer.optimize(model, (ROWS, cache()), level=1, **FAST)
    assert set(map(address, fast.parameters())) == set(map(address, model.parameters()))
    for x, graphs in ((ROWS, 1), (ROWS + 1, 1), (ROWS[:2], 2)):
        fast(x, cache())
        assert recordings(fast) == graphs


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_answer_that_graphs_change_is_seen():
    """Torch's fast path puts zeros at padded places; Dynamo records the other one."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.rand(2, 3, 4), torch.tensor([[False, False, True], [False] * 3])
    inputs = {"src": x, "src_key_padding_mask": padding}
    fast = optimizer.optimize(model, inputs, level=1, check=None)
    assert isinstance(fast, Unchanged), fast.report
    assert "by Dynamo: its graphs give another answer" in fast.report.remarks[-1]
    torch.testing.assert_close(fast(**inputs), model(**inputs))
    hurried = "x if not torch.compiler.is_compiling() and z.all() else m.layer(x)"
    model = ForwardOfTwo(hurried, layer=nn.Linear(4, 4)).eval()
    fast = optimizer.optimize(model, (x, ~padding), level=1)
    assert "by Dynamo: its graphs give another answer" in fast.report.remarks[-1]


def refitted(fast, other):
    fast.refit(other.state_dict())


def loaded(fast, other):
    fast.load_state_dict(nn.ModuleDict({"model": other}).state_dict())


COPIED = {
    "itself, refitted": (lambda fast: fast, refitted),
    "a copy, loaded": (copy.deepcopy, loaded),
    "a pickle, refitted": (pickled, refitted),
}


@rows("copied change", COPIED)
def test_other_weights_are_those_that_run(copied, change):
    fast, other = guarded(level=2), running()
    fast(ROWS)
    for parameter in other.parameters():
        parameter.add_(0.5)
    each = copied(fast)
    assert_same(running()(ROWS), each(ROWS))
    change(each, other)
    for x in (ROWS, ROWS[:2]):
        assert_same(other(x), each(x))
    if each is not fast:
        assert_same(running()(ROWS), fast(ROWS))


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("forward", [plain, NORMED])
def test_a_write_to_the_snapshot_is_seen(forward, held):
    """Also where something else holds the weights, so that no copy of them is made at a write."""
    fast, eager = guarded(forward).eval(), running(forward)  # it forgets graphs, which share them
    gc.collect()
    holder = [each.detach() for each in fast.model.parameters() if held]
    fast(ROWS)
    for module in (fast.model, eager):
        module.linear.weight.data.mul_(3)
        module.scale.mul_(2)
    assert_same(eager(ROWS), fast(ROWS))
    assert bool(holder) is held


@pytest.mark.parametrize("call", [lambda f, x: f(x), lambda f, x: f(x=x)])
@torch.enable_grad()
def test_gradients_of_an_input_are_the_models(call):
    fast, eager = guarded(), running()
    one, other = (ROWS.clone().requires_grad_() for _ in range(2))
    call(fast, one).sum().backward()
    eager(other).sum().backward()
    torch.testing.assert_close(one.grad, other.grad)
    assert not fast(ROWS).requires_grad
    with pytest.raises(InputError, match="constants"):
        fast.requires_grad_()


def test_the_same_bits_are_those_of_weights_that_require_gradients():
    """Torch multiplies images in another way where the weights require gradients."""
    torch.manual_seed(0)
    text = "y = m.linear(x) * (1 if x.sum().isnan() else 2); return (y + 1).tanh(), y + 1"
    model = Forward(text, linear=nn.Linear(4, 4, dtype=torch.float64)).eval()
    images = torch.randn(4, 4, 4, dtype=torch.float64)
    fast = optimizer.optimize(model, images, level=0)
    assert isinstance(fast, GuardedModule), fast.report
    for x in (images, images.transpose(0, 2), images.mT, images[:, :1]):
        assert all(map(torch.equal, fast(x), model(x)))


WATCHED = {
    "a cast": lambda module: module.double().train()(ROWS.double()),
    "autocast": lambda module: torch.autocast("cpu", torch.bfloat16)(module)(ROWS),
    "meta": lambda module: module.to("meta")(ROWS.to("meta")).shape,
    "vmap": lambda module: torch.vmap(module)(ROWS[:, None]),
    "jit.trace": lambda module: torch.jit.trace(module, ROWS)(ROWS),
    "export": lambda module: torch.export.export(module, (ROWS,)).module()(ROWS),
    "compile": lambda module: torch.compile(module, backend="eager", fullgraph=True)(ROWS),
    "optimize": lambda module: optimizer.optimize(Forward("m.a(x) + 1", a=module), ROWS)(ROWS),
}


@pytest.mark.parametrize("name", WATCHED)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:the model is in training")
@pytest.mark.filterwarnings("ignore:Converting a tensor:torch.jit.TracerWarning")
def test_what_looks_at_a_call_sees_the_model(name):
    assert_same(WATCHED[name](running()), WATCHED[name](guarded()))


def test_a_part_that_is_called_as_it_is_stops_nothing_at_level_2():
    torch.manual_seed(0)
    convs = (nn.Sequential(nn.Conv2d(c, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for c in (3, 4))
    between = Forward("x * 2 if x.shape[0] > 1 else x")
    model, x = nn.Sequential(next(convs), between, *convs).eval(), torch.rand(2, 3, 8, 8)

    fast = optimizer.optimize(model, x, level=2, **FAST)

    assert isinstance(fast, GuardedModule), fast.report
    graphs = len(fast.report.choices)
    assert graphs
    other = torch.rand(1, 3, 9, 9)
    choices = fast.lower({"input": other})
    assert fast.report.choices[graphs:] == choices != ()
    for each in (x, x[:1], other):
        assert_same(model(each), fast(each))


PREPARED = [
    "m.scale.add_(1); return x * m.scale if x.shape[0] < 9 else x",
    "m.plain.add_(1); m.flag.data.add_(1); return x * m.plain * m.flag if x.shape[0] < 9 else x",
    "m.calls += 1; m.seen.append(m.calls); return x + m.flag.add_(1) * m.calls",
    "[each.append(torch.rand_like(x)) for each in more]; return x + 1",
]


@pytest.mark.parametrize("text", PREPARED)
def test_what_a_call_that_is_prepared_changes_is_put_back(text):
    fast, eager = guarded(text), running(text)
    weights, numbers, given = copy.deepcopy(fast.model.state_dict()), torch.get_rng_state(), [0]
    fast.lower((ROWS[:2], given))
    now = (fast.model.state_dict(), torch.get_rng_state(), given)
    assert_equal((weights, numbers, [0]), now)
    for x in (ROWS[:2], ROWS, ROWS[:2]):
        assert_same(eager(x), fast(x))


def test_what_a_call_that_fails_wrote_is_put_back():
    fast = guarded("m.flag.add_(1); return x[x.isnan().any(1) * 9] if len(x) < 6 else x.view(7)")
    with pytest.raises(InputError, match="cannot be called so: RuntimeError: shape"):
        fast.lower(torch.cat([ROWS, ROWS]))
    with pytest.raises(InputError):
        fast.lower(3)
    assert torch.equal(fast.model.flag, torch.ones(4))
    fast(ROWS)
    with pytest.raises(IndexError):
        fast(ROWS * torch.nan)
    assert "Dynamo failed" not in str(fast.report)  # the model did


@pytest.mark.parametrize("split", ["", "torch._dynamo.graph_break(); "])
def test_a_call_that_dynamo_fails_at_is_the_last_that_it_records(split):
    model = running(f"{split}return x * float(m.half * len(x))", half=Fraction(3, 2))
    fast = optimizer.optimize(model, ROWS, level=1, **FAST)
    assert_same(model(ROWS), fast(ROWS))
    with pytest.raises(RuntimeError, match="fake") if split else nullcontext():
        fast(ROWS[:2])  # of which a part was made, if it is split
    assert_same(model(ROWS[:2]), fast(ROWS[:2]))
    assert "Dynamo failed" in str(fast.report)


@pytest.mark.parametrize(("channels", "graphs"), [(3, 8), (4, 2)])
def test_each_size_of_an_image_is_recorded_for_itself(channels, graphs):
    """With symbols, Dynamo takes minutes for a Swin. A ninth is left unmarked."""
    forward = "x * more[0].mean() + more[0].shape[-1]"
    images = [torch.ones(1, channels, size, size) for size in range(8, 18)]
    fast = optimizer.optimize(running(forward), (ROWS, images[0]), level=1, **FAST)
    for image in images:
        assert_same(running(forward)(ROWS, image), fast(ROWS, image))
    assert (recordings(fast), vars(image)) == (graphs, {})


def test_threads_may_call_one_result_at_once():
    fast, inputs = guarded(), [ROWS[: 1 + i % 3] + i for i in range(24)]
    with ThreadPoolExecutor(4) as threads:
        assert_same([*map(running(), inputs)], [*threads.map(torch.no_grad()(fast), inputs)])


def test_beyond_so_many_recordings_calls_are_still_right():
    fast, eager = guarded("x * len(m.seen)"), running("x * len(m.seen)")
    for count in range(12):
        fast.model.seen[:] = eager.seen[:] = range(count)
        assert_same(eager(ROWS), fast(ROWS))
    assert recordings(fast) <= 8


@pytest.mark.parametrize(("share", "kind"), [(1.0, Unchanged), (0.5, GuardedModule)])
def test_a_model_is_not_made_slower_by_its_graphs_nor_changed_by_the_race(share, kind, monkeypatch):
    count = [0]

    def counting(m, x, cache):
        count[0] += 1
        cache.append(1)
        return torch.cat([x.relu()] * len(cache))

    def race(self, runs, *rest, **more):
        for name in ("plan", "portable") * 3:  # a cache that grew would be recorded anew
            assert len(runs[name](*self.inputs)) == len(ROWS)
        return {"portable": 1.0, "plan": share}

    monkeypatch.setattr("optimizer._optimize.Times", Times)
    monkeypatch.setattr(Times, "race", race)
    fast = optimizer.optimize(running(counting), (ROWS, []), level=1)
    assert isinstance(fast, kind)
    assert ("not faster in graphs: 1.00" in str(fast.report)) is (kind is Unchanged)
    assert count == [0]


def test_nothing_keeps_the_weights_of_a_result_that_is_gone():
    """Dynamo keeps what a backend returns as long as the process lives: weights are not in it."""
    before = weights_held()
    fast = guarded()
    fast(ROWS[:2])
    alive = [weakref.ref(parameter) for parameter in fast.parameters()]
    assert weights_held() > before
    del fast
    assert weights_held() == before
    assert [each() for each in alive] == [None] * len(alive)


def weights_held():
    """How many parameters there are in the process, but for those that hold no memory."""
    gc.collect()
    return sum(type(each) is nn.Parameter for each in gc.get_objects())


@pytest.mark.parametrize(("forward", "more", "graphs"), [
    ("more[0].mul_(2); return x + more[0]", lambda: [ROWS + 1], 1),
    ("more[0][0].mul_(2); return x + more[0][0]", lambda: [[ROWS + 1]], 2),  # of which is no alias
    ("more[0].y.mul_(2); return x + more[0].y", lambda: [SimpleNamespace(y=ROWS + 1)], 2),
    ("x * 2 if more[0] is more[1] else x", lambda: [ROWS + 1] * 2, 2),  # its copies differ
])  # fmt: skip
def test_a_call_in_inference_mode_is_recorded_no_more(forward, more, graphs):
    fast = optimizer.optimize(running(forward), (ROWS, *more()), level=1, **FAST)
    with torch.inference_mode():
        one, other = more(), more()
        assert_same(running(forward)(ROWS, *one), fast(ROWS, *other))
    assert (str(one), recordings(fast)) == (str(other), graphs)
