"""What the facts must know for no rewrite to rest on a guess, one case for each way to be wrong."""

from __future__ import annotations

import copy
import operator
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import assert_equivalent
from tests.internals import MAY_COPY, Facts, LinearReLU, layer_like, opened, storages_in
from tests.single_pass import Forward, ForwardOfTwo, rows, texts

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
SINGLE, SEVERAL, IMAGE = torch.randn(1, 4, 4), torch.randn(3, 4, 4), torch.randn(2, 3, 5, 5)
LARGE = torch.randn(200, 200)
NOTES: list[int] = []
torch.fx.wrap("noted")
torch.fx.wrap("first_if_alone")


def noted(x):
    NOTES.append(1)
    return x * 2


def first_if_alone(x):
    return x[0] if x.shape[0] == 1 else x


def layers(function, kind: Any = Forward, **members) -> Any:
    """A model of two layers with their BatchNorms, and whatever else a case needs."""
    one, other = nn.BatchNorm1d(4, eps=0.125), nn.BatchNorm2d(4, eps=0.125)
    for norm in (one, other):
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    held: Any = {"linear": nn.Linear(4, 4), "norm": one, "kernel": torch.randn(4, 3, 3, 3)}
    held |= {"conv": nn.Conv2d(3, 4, 3), "image_norm": other}
    return kind(function, **held, **members).eval()


@dataclass
class Record:
    values: Tensor


class Opaque(nn.Module):
    """Runs a function where neither tracing nor meta tensors reach, for it reads a value."""

    def __init__(self, function: Any, *held: nn.Module) -> None:
        super().__init__()
        self.function, self.held = function, nn.ModuleList(held)
        self.register_forward_hook(lambda module, inputs, result: None)  # so it is called as it is

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x) if float(x.sum()) > -1e9 else x


class Log(nn.Module):
    """Keeps a list, so that it is called as it is, and runs on meta tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return noted(x)


def hooked(layer, hook):
    layer.register_forward_hook(hook)
    return layer


def written_by_a_child():
    model = layers("m.child(x); return m.image_norm(m.conv(x))").requires_grad_(False)
    model.child = Opaque(lambda m, x: m.held[0].weight.mul_(2.0), model.conv)
    return model


def written_by_a_hook():
    model = layers("return m.child(x) + m.image_norm(m.conv(x))").requires_grad_(False)
    model.child = hooked(nn.Conv2d(3, 4, 3), lambda layer, *_: (layer.weight.mul_(2.0), None)[1])
    model.child.weight = model.conv.weight
    return model


def weighted_plainly():
    model = layers("m.conv.weight.mul_(2); return m.image_norm(m.conv(x))")
    vars(model.conv)["weight"] = model.conv._parameters.pop("weight").detach()
    return model


def alone(m, given, y):
    return first_if_alone(y)


NORMED = "m.norm(m.linear({}))"
VIEWED = "y = x * 2; view = m.child(y).t(); y[y < 0] = 0.0; return view"
COPIED = "y, mask = x.clone(), x > 0; m.child(x); y[mask] = 0.0; return y"
WRITTEN_BEFORE = "m.kernel.mul_(2); return m.image_norm(F.conv2d(x, m.kernel))"
# How a model is made, the arguments of its example and later calls, and words of a refusal.
CASES = {
    "a view of a view that only an opaque child knows of":
        (lambda: layers(VIEWED, child=Opaque(lambda m, y: y[:2])), [(ROWS,), (ROWS * 2,)],
         "would see the write"),
    "a copy whose source an opaque child writes":
        (lambda: layers(COPIED, child=Opaque(lambda m, x: x.add_(1.0))), [(ROWS,), (ROWS * 2,)],
         ""),
    "a rank that a wrapped function may change":
        (lambda: layers(lambda m, x: m.norm(m.linear(first_if_alone(x)))),
         [(SINGLE,), (SEVERAL,)], "its rank depends on sizes"),
    "a rank that one operand may change":
        (lambda: layers(NORMED.format("z + x.squeeze(0) + z"), ForwardOfTwo),
         [(SINGLE, ROWS[:1]), (SEVERAL, ROWS[:1])], "its rank depends on sizes"),
    "a rank that a hook may change":
        (lambda: layers(NORMED.format("m.child(x)"), child=hooked(nn.Linear(4, 4), alone)),
         [(SINGLE,), (SEVERAL,)], "has no known shape"),
    "a rank inside a list":
        (lambda: layers(NORMED.format("x[0]") + " + x[1]"),
         [([ROWS, ROWS],), ([SEVERAL, SEVERAL],)], "its rank rests on the input 'x'"),
    "a rank inside a record":
        (lambda: layers(NORMED.format("x.values")),
         [(Record(ROWS),), (Record(SEVERAL),)], "its rank rests on the input 'x'"),
    "a rank by a number":
        (lambda: layers("m.norm(m.linear(x.flatten(z)))", ForwardOfTwo),
         [(ROWS[:, None], 1), (SEVERAL, 2)], "its rank rests on the input 'z'"),
    "a dtype by a number":
        (lambda: ForwardOfTwo("y = x * z; y[x > 1] = 0.5; return y").eval(),
         [(torch.arange(4), 2), (torch.arange(4), 2.5)], "its dtype rests on the input 'z'"),
    "a number in the place of a tensor":
        (lambda: ForwardOfTwo("x * x + z").eval(), [(LARGE, LARGE), (LARGE, 2.0)], ""),
    "a rank inside a mapping of another class":
        (lambda: layers(NORMED.format("x['y']")),
         [(UserDict(y=ROWS),), (UserDict(y=SEVERAL),)], ""),
    "a mapping of another class, written":
        (lambda: layers("y = x['y']; y[y > 0] = 0.0; x['z'] = m.linear(y); return y"),
         [(UserDict(y=ROWS),), (UserDict(y=SEVERAL),)], ""),
    "a rank that another layer was not made for":
        (lambda: layers("F.batch_norm(x, *m.free), F.batch_norm(z, *m.free)", ForwardOfTwo,
                        free=nn.ParameterList([torch.zeros(4), torch.ones(4)])),
         [(torch.ones(2, 4, 1, 1, 1, 1), SEVERAL), (torch.ones(2, 4, 1, 1, 1, 1, 1), SEVERAL)], ""),
    "a buffer for a weight, written before": (lambda: layers(WRITTEN_BEFORE), [(IMAGE,)], ""),
    "a rank that only a refused rewrite asked for":
        (lambda: layers("m.norm(m.linear(x)) + m.linear(-x).relu()"), [(SEVERAL,), (ROWS,)], ""),
    "a layer that an opaque child writes":
        (written_by_a_child, [(IMAGE,), (IMAGE,)], "the forward writes their tensors"),
    "a weight that is no parameter, written before":
        (weighted_plainly, [(IMAGE,), (IMAGE,)], "the forward writes their tensors"),
    "a factor that is written": (lambda: layers("m.c.add_(1); return m.linear(x) * m.c",
        c=torch.ones(())), [(ROWS,), (ROWS,)], "the forward writes their tensors"),
    "a layer whose weight a hook of another writes":
        (written_by_a_hook, [(IMAGE,), (IMAGE,)], ""),
}  # fmt: skip


def optimized(model, *inputs) -> Any:
    return optimizer.optimize(model, inputs or None, check=None, level=1)


@rows("build calls refusal", CASES)
@pytest.mark.parametrize("example", [True, False])
@torch.no_grad()
def test_the_answer_is_right_at_later_calls_too(build, calls, refusal, example):
    torch.manual_seed(0)
    model = build()
    eager = copy.deepcopy(model)

    fast = optimized(model, *copy.deepcopy(calls[0] if example else ()))

    reasons = [each.reason for each in fast.report.refused]
    assert not example or not refusal or any(refusal in each for each in reasons)
    for call in calls:
        one, other = copy.deepcopy(call), copy.deepcopy(call)
        torch.testing.assert_close((fast(*one), opened(one)), (eager(*other), opened(other)))


@pytest.mark.parametrize("example", [(), (IMAGE,)])
def test_a_layer_whose_weight_is_written_by_a_view_stays(example):
    model = layers("m.view.mul_(2.0); return m.image_norm(m.conv(x))")
    model.register_buffer("view", model.conv.weight.data)  # whose copy by deepcopy is no view

    [refused] = optimized(model, *example).report.refused
    assert refused.reason == "the forward writes their tensors"


DEAD = {
    "a function": (lambda m, x: noted(x), None),
    "a child that keeps a list": (lambda m, x: m.child(x), Log()),
}


@rows("function child", DEAD)
def test_python_code_of_unknown_effect_runs_though_its_value_is_not_read(function, child):
    fast = optimized(Forward(lambda m, x: (function(m, x), x.exp())[1], child=child).eval(), ROWS)
    NOTES.clear()

    fast(ROWS)

    assert NOTES == [1]


def test_a_hook_inside_a_layer_of_torch_meets_data_and_is_not_dead():
    seen: list[str] = []
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    hooked(layer.linear1, lambda *called: seen.append(called[2].device.type))

    fast = optimized(Forward("m.child(x); return x.exp()", child=layer).eval(), ROWS)
    assert "meta" not in seen

    seen.clear()
    fast(ROWS)
    assert seen == ["cpu"]


def test_facts_tell_a_tensor_from_a_later_one_in_its_place_or_in_the_storage_that_it_left():
    facts = Facts()

    for size in range(1, 20):
        moved = torch.empty(size)
        known = facts.to_meta(moved)
        assert known.shape == (size,)
        moved.data = torch.empty(size)
        assert storages_in(facts.to_meta(torch.empty(size))).isdisjoint(storages_in(known))


@rows("flat", {"a layer": (nn.Flatten(0),), "a child": (Opaque(lambda m, x: x.reshape(-1)),)})
def test_what_is_copied_in_the_example_may_be_a_view_in_another_call(flat):
    text = """
        before, flat = torch.relu(x), m.inner(x); flat.add_(1.0)
        return before.reshape(-1) * torch.relu(x).reshape(-1)"""
    model, viewed = Forward(text, inner=flat).eval(), torch.linspace(-1, 1, 48)[::2].view(6, 4)

    fast = optimized(model, torch.linspace(-1, 1, 24).reshape(4, 6).t())

    one, other = (torch.empty_strided((6, 4), (8, 2)).copy_(viewed) for _ in range(2))
    assert torch.equal(fast(one), model(other))
    assert torch.equal(one, other)


def test_rows_that_are_copied_by_number_may_be_one_that_is_viewed_in_another_call():
    x, model = torch.linspace(-1, 1, 6).view(3, 2), ForwardOfTwo("torch.relu(x), torch.relu(x)[z]")

    fast = optimized(model.eval(), x, torch.tensor([2, 0]))

    assert_equivalent(model, fast, (x, torch.tensor(1)))


EMPTY, FULL = (torch.ones(size, 2, 8, 8) for size in (0, 3))
# What draws, and an example of which it draws nothing.
DRAWS = {
    "a layer that trains": ("m.drop(x)", EMPTY),
    "a function": ("F.dropout(x, 0.5, True)", EMPTY),
    "attention": ("F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)", EMPTY),
    "as it is told": ("F.dropout(x, training=x.size(0) > 1)", FULL[:1]),
    "as it is told by place": ("torch.dropout(x, 0.5, x.size(0) > 1)", FULL[:1]),
}


@rows("draw example", DRAWS)
def test_what_draws_nothing_in_the_example_may_draw_later(draw, example):
    model = Forward(f"{draw} - {draw}", drop=nn.Dropout()).eval()
    model.drop.train()

    fast = optimized(model, example)

    assert fast(FULL).any()


def shares(function, x):
    """Whether a function of a tensor returns memory of it; None if it is of no such function."""
    try:
        result = function(x)
        return result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    except Exception:
        return None


@pytest.mark.filterwarnings("ignore")
def test_what_returns_its_input_for_some_tensors_and_a_copy_of_others_is_listed():
    dtypes = "uint8 int8 int16 int32 int64 bool half bfloat16 float double cfloat cdouble"
    tensors = [torch.ones(2, 3, dtype=getattr(torch, each)) for each in dtypes.split()]
    tensors += [torch.ones(2, 3).t(), *(each.conj() for each in tensors[-2:])]
    names = (name for name in vars(torch._C.TensorBase) if name.strip("_") == name)
    found = {name: {shares(getattr(Tensor, name), x) for x in tensors} for name in names}

    mixed = {name for name, told in found.items() if {True, False} <= told}
    assert len(mixed) > 15
    assert mixed <= MAY_COPY


@pytest.mark.parametrize("text", ["x.byte()", "x.conj_physical()", "torch.as_tensor(x).byte()"])
def test_a_copy_of_what_may_be_the_input_stays(text):
    model = Forward(f"y = ({text}).clone(); x.add_(1); return y * 2").eval()
    complex_one = torch.ones(3, dtype=torch.cfloat) if "conj" in text else torch.ones(3)
    fast = optimizer.optimize(model, complex_one, level=0)

    for later in (torch.ones(3), torch.ones(3, dtype=torch.uint8)):
        assert torch.equal(fast(later.clone()), model(later.clone()))


# What is remembered of a run on meta tensors is what such a run gives, for any layer of a form.
LAYERS = """
    nn.ReLU(); nn.ReLU(inplace=True); nn.GELU(); nn.Hardsigmoid(); nn.Tanh(); nn.Identity();
    nn.LayerNorm(4); nn.LayerNorm((3, 4)); nn.LayerNorm(4).double(); nn.Dropout(); nn.Flatten(0);
    nn.Linear(4, 5); nn.Linear(4, 5).double(); nn.Conv1d(3, 5, 2);
    WITH_RELU; nn.Conv2d(3, 6, (3, 1), stride=2, padding=(1, 0), groups=3);
    nn.Conv2d(3, 6, 3); nn.Conv2d(3, 6, 3, stride=2); nn.Conv2d(3, 6, 3, dilation=(1, 2));
    nn.Conv2d(3, 6, 3, groups=3); nn.Conv2d(3, 6, 3, padding="same"); nn.Conv2d(3, 6, 3).double();
    nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last); nn.Conv2d(3, 6, 5, bias=False);
    nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"); nn.Conv2d(1, 1, 1);
    holding(nn.Conv2d(3, 6, 3), bias=torch.ones(6).double());
    holding(nn.Conv2d(3, 6, 3), bias=torch.ones(7)); holding(nn.Conv2d(3, 6, 3), dilation=(0, 1));
    holding(nn.Conv2d(9, 6, 3), weight=torch.ones(6, 3, 1, 1)); nn.Conv3d(3, 5, 2, padding=1);
    reflecting(1); reflecting(2); with_plain_weight(5); with_plain_weight(7); Rows(1); Rows(2);
    nn.BatchNorm1d(3).eval(); nn.BatchNorm2d(3).eval(); nn.BatchNorm2d(1).eval(); nn.BatchNorm1d(3);
    nn.BatchNorm2d(3); nn.BatchNorm1d(3, track_running_stats=False).eval();
    holding(nn.BatchNorm2d(3).eval(), running_mean=torch.zeros(3).double())"""
INPUTS = """
    torch.randn(2, 4); torch.randn(2, 3, 4); torch.randn(2, 3, 5, 4); torch.tensor(1.0);
    torch.randn(0, 3, 4); torch.randn(4, 3, 2).transpose(0, 2); torch.randn(2, 3, 1, 1);
    torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last); torch.randn(2, 1, 5, 4);
    torch.randn(2, 3, 5, 4).double(); torch.ones(2, 3, 5, 4).long(); torch.randn(2, 3, 5, 4, 3);
    torch.randn(1, 3, 4).expand(2, 3, 4); torch.randn(2, 3, 4).bfloat16()"""
FUNCTIONS: Any = [
    (operator.truediv, 2), (operator.truediv, 2.0), (torch.add, 2.0), (torch.add, True), (F.gelu,),
    (F.layer_norm, (4,)), (F.layer_norm, (3, 4)), (F.group_norm, 1), (F.linear, torch.ones(5, 4)),
    *((torch.conv2d, torch.ones(6, 3, 2, 2), None, stride) for stride in (1, 2)),
]  # fmt: skip
WITH_RELU = layer_like(nn.Linear(4, 5), LinearReLU)


def holding(layer: nn.Module, **changed: Any) -> nn.Module:
    """A layer that somebody gave another weight, bias or number than its constructor would."""
    for name, value in changed.items():
        setattr(layer, name, nn.Parameter(value) if name in layer._parameters else value)
    return layer


def with_plain_weight(size: int) -> nn.Module:
    layer = nn.Linear(4, 5, bias=False)
    del layer.weight
    return holding(layer, weight=torch.ones(size, 4))


def reflecting(by: int) -> nn.Module:
    layer = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")
    return holding(layer, _reversed_padding_repeated_twice=(by, by, 1, 1))


class Rows(nn.ReLU):
    """A layer of a user's, which does as one of torch's and more."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[: self.rows] * 1


class Counting(Facts):
    runs = 0

    def run(self, *call: Any) -> Any:
        self.runs += 1
        return super().run(*call)


def told(called: Any, *values: Any) -> tuple[tuple[Any, ...], int]:
    """All that the facts tell of a call, and how often it was run for that."""
    facts, root = Counting(), nn.Module()
    graph = fx.Graph(owning_module=root)  # type: ignore[arg-type]
    given = tuple(graph.placeholder("x") if isinstance(v, Tensor) else v for v in values)
    nodes = [each for each in given if isinstance(each, fx.Node)]
    for each in nodes:
        facts.input(each, values[given.index(each)])
    is_layer = isinstance(called, nn.Module)
    root.layer = called if is_layer else None
    node = graph.call_module("layer", given) if is_layer else graph.call_function(called, given)
    facts.evaluate(node)
    fact = node.meta["fact"]
    layout = None if fact.error else (fact.value.shape, fact.value.stride(), fact.value.dtype)
    shared = [fact.storages >= each.meta["fact"].storages for each in nodes]
    return (layout, shared, bool(fact.writes), fact.random), facts.runs


def test_what_is_remembered_is_what_a_run_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [eval(text) for text in texts(INPUTS)]
    calls = [(eval(text), each) for text in texts(LAYERS) for each in inputs]
    calls += [(torch.add, one, other) for one in inputs for other in inputs]
    calls += [(called, each, *rest) for called, *rest in FUNCTIONS for each in inputs]
    memory, alone = dict[Any, Any](), []
    for called in calls:
        monkeypatch.setattr("optimizer.facts.facts._layouts", single := dict[Any, Any]())
        alone.append(told(*called)[0])
        memory = single | memory

    monkeypatch.setattr("optimizer.facts.facts._layouts", memory)
    together = [told(*called) for called in calls]

    assert [each for each, _ in together] == alone
    assert sum(not runs for _, runs in together) > 300
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    assert all(told(called, each, *rest)[1] for called, *rest in FUNCTIONS for each in inputs[:1])


FEATURES = torch.rand(2, 4, 5, 6)
LAST = FEATURES.contiguous(memory_format=torch.channels_last)
LAID = {
    "relu": (nn.ReLU(), FEATURES),
    "relu, channels last": (nn.ReLU(), LAST),
    "a norm, channels last": (nn.BatchNorm2d(4).eval(), LAST),
    "a norm of one channel, channels last": (nn.BatchNorm2d(1).eval(), LAST[:, :1].clone()),
}


@rows("layer image", LAID)
def test_a_result_lies_as_the_layer_lays_it(layer: nn.Module, image: Tensor) -> None:
    for _ in range(2):
        (layout, *_), _ = told(layer, image)
        assert layout[1] == layer(image).stride()
