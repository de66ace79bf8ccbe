"""What the facts must know for no rewrite to rest on a guess, one case for each way to be wrong."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import optimizer
from optimizer.core.inputs import opened, storages_in
from optimizer.core.ops import MAY_COPY
from optimizer.facts.facts import Facts
from optimizer.testing import assert_equivalent
from tests.single_pass import Forward, ForwardOfTwo, rows

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


def doubled(layer, *_):
    layer.weight.mul_(2.0)


def written_by_a_hook():
    model = layers("return m.child(x) + m.image_norm(m.conv(x))").requires_grad_(False)
    model.child = hooked(nn.Conv2d(3, 4, 3), doubled)
    model.child.weight = model.conv.weight
    return model


def alone(m, given, y):
    return y[0] if y.shape[0] == 1 else y


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
        (lambda: layers(NORMED.format("x.squeeze(0) + z"), ForwardOfTwo),
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
    "a layer whose weight a hook of another writes":
        (written_by_a_hook, [(IMAGE,), (IMAGE,)], ""),
}  # fmt: skip


def optimized(model, *inputs) -> Any:
    return optimizer.optimize(model, inputs or None, check=None, level=1)


@pytest.mark.parametrize("draw", ["torch.dropout(x, 0.5, {})", "F.dropout(x, training={})"])
def test_what_draws_nothing_in_the_example_may_be_told_to_draw_later(draw):
    text = draw.format("x.size(0) > 1")
    fast = optimized(Forward(f"{text} - {text}").eval(), ROWS[:1])

    assert fast(torch.ones(9, 99)).any()


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


def parametrized():
    linear = nn.Linear(4, 4)
    parametrize.register_parametrization(linear, "weight", Log())
    return linear


DEAD = {
    "a function": (lambda m, x: noted(x), None),
    "a parametrization": (lambda m, x: m.child(x), parametrized()),
    "a child that keeps a list": (lambda m, x: m.child(x), Log()),
}


@rows("function child", DEAD)
def test_python_code_of_unknown_effect_runs_though_nobody_reads_its_value(function, child):
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


def test_facts_tell_a_tensor_from_a_later_one_in_its_place():
    facts = Facts()

    for size in range(20):
        assert facts.to_meta(torch.empty(size)).shape == (size,)


def test_facts_tell_a_tensor_from_a_later_one_in_the_storage_that_it_left():
    facts = Facts()

    for size in range(1, 20):
        moved = torch.empty(size)
        known = facts.to_meta(moved)
        moved.data = torch.empty(size)
        assert storages_in(facts.to_meta(torch.empty(size))).isdisjoint(storages_in(known))


def reshaped(m, x):
    return x.reshape(-1)


@rows("flat", {"a layer": (nn.Flatten(0),), "a child": (Opaque(reshaped),)})
def test_what_is_copied_in_the_example_may_be_a_view_in_another_call(flat):
    text = """
        before, flat = torch.relu(x), m.inner(x); flat.add_(1.0)
        return before.reshape(-1) * torch.relu(x).reshape(-1)"""
    model = Forward(text, inner=flat).eval()
    viewed = torch.linspace(-1, 1, 48)[::2].view(6, 4)

    fast = optimized(model, torch.linspace(-1, 1, 24).reshape(4, 6).t())

    one, other = (torch.empty_strided((6, 4), (8, 2)).copy_(viewed) for _ in range(2))
    assert torch.equal(fast(one), model(other))
    assert torch.equal(one, other)


def test_rows_that_are_copied_by_number_may_be_one_that_is_viewed_in_another_call():
    x, model = torch.linspace(-1, 1, 6).view(3, 2), ForwardOfTwo("torch.relu(x), torch.relu(x)[z]")

    fast = optimized(model.eval(), x, torch.tensor([2, 0]))

    assert_equivalent(model, fast, (x, torch.tensor(1)))


ATTENTION = "F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)"


@pytest.mark.parametrize("draw", ["m.{}(x)", "F.dropout(x, 0.5, True)", ATTENTION])
def test_what_draws_nothing_of_an_empty_example_may_draw_later(draw):
    model = Forward(f"{draw} - {draw}".format("first", "second")).eval()
    model.first, model.second = nn.Dropout(), nn.Dropout()  # which train
    fast = optimized(model, torch.ones(0, 2, 8, 8))

    torch.manual_seed(0)
    assert fast.report.counts().get("eliminate_common_subexpressions", 0) == 0
    assert fast(torch.ones(1, 2, 8, 8)).any()


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
