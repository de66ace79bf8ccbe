"""Models that cannot be optimized run as they are, with a remark, or are a typed error."""

from __future__ import annotations

import re
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import EquivalenceError, InputError
from optimizer.testing import untouched
from tests.single_pass import Forward, ForwardOfTwo, function_of, rows

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.(script|freeze). is deprecated")
X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)
ANOTHER = torch.ones(2, 4, 4, 4)


def net(forward, held=None, kind=Forward):
    """A foldable pair, something that the model holds, and what is done with both."""
    torch.manual_seed(3)
    pair = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    nn.init.normal_(pair[1].running_mean)
    if isinstance(forward, str):
        forward = function_of("m, x", forward, **NAMES)
    model: nn.Module = kind(forward, pair=pair, held=held).eval()
    return model


class Doubling(Tensor):
    """A tensor whose class changes what a linear layer computes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is F.linear else result


class Exponential(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@dataclass(frozen=True)
class Record:
    """Knows its fields, which pytree does not."""

    value: Any
    count: int = 1


class Box:
    """It is not known what it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value


@fx.wrap
def boxed(value):
    return Box(value)


@fx.wrap
def recorded(value):
    return {"all": [Record(Record(value), 2)]}


def positive(x):
    """Needs a value, which a scripted function may ask for."""
    return x * 2 if bool(x.sum() > 0) else x


NAMES = {"own": Exponential.apply, "boxed": boxed, "recorded": recorded}
DATA = "x + 1 if x.sum() > 0 else x - 1"
MULTIPLIED, IN_LINEAR = "m.held @ m.pair(x).flatten(1)[:, :5].T", "F.linear(m.pair(x), m.held)"
FIVE_ROWS = torch.rand(5, 4).as_subclass(Doubling)
# How each is made, and words of the remark.
LEFT_AS_IT_IS = {
    "holds a lock": (
        lambda: net("_ = m.held.locked(); return m.pair(x)", threading.Lock()), "cannot be copied"
    ),
    "is scripted": (lambda: torch.jit.script(nn.Conv2d(3, 4, 3).eval()), "it is TorchScript"),
    "is frozen":
        (lambda: torch.jit.freeze(torch.jit.script(nn.ReLU().eval())), "it is TorchScript"),
    "holds a sparse parameter":
        (lambda: net(MULTIPLIED, nn.Parameter(torch.eye(5).to_sparse())), "torch.sparse_coo"),
    "holds a buffer of another class": (lambda: net(IN_LINEAR, FIVE_ROWS), "class Doubling"),
}  # fmt: skip
FOLDED = {
    "a custom autograd function": lambda: net("own(m.pair(x))"),
    "numpy": lambda: net("torch.from_numpy(m.pair(x).detach().numpy())"),
    "a scripted function": lambda: net(
        function_of("m, x", "scripted(m.pair(x))", scripted=torch.jit.script(positive))
    ),
}


def answers(model):
    """What a model returns for four inputs, as dense tensors."""
    with torch.no_grad():
        return [model(x).to_dense() for x in (X, -X, X + 1, X[:1])]


def state_of(model):
    """What could be seen to change of tensors of any layout, whose bits are not to be read."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, id(t), t.dtype, t.layout, t._version, t.requires_grad) for name, t in tensors],
        [(name, vars(m).get("training"), sorted(vars(m))) for name, m in model.named_modules()],
    ]


@rows("make words", LEFT_AS_IT_IS)
def test_a_model_runs_unchanged_with_a_remark_if_it(make, words):
    model = make()
    expected, before = answers(model), state_of(model)
    fast = optimizer.optimize(model, X, check="final" if "TorchScript" in words else None, level=1)
    assert all(map(torch.equal, answers(fast), expected))
    is_itself = words == "cannot be copied"
    with pytest.raises(InputError, match="change that one") if is_itself else nullcontext():
        fast.train().requires_grad_(False)
    assert state_of(model) == before
    assert fast.report.fired == ()
    [remark] = fast.report.remarks
    assert re.fullmatch(f"left as it is: .*{words}.*", remark)
    assert all(map(torch.equal, answers(model), expected))


@pytest.mark.parametrize("what", FOLDED)
def test_the_rest_is_optimized_around(what):
    model = FOLDED[what]()

    with untouched(model):
        fast = optimizer.optimize(model, X, check="each", level=1)

    assert "fold_affine" in fast.report.counts()
    torch.testing.assert_close(answers(fast), answers(model))


def test_a_dataclass_that_is_returned_is_compared_field_by_field():
    model = net("recorded(m.pair(x))")

    fast = optimizer.optimize(model, X, check="each", level=1)

    assert "fold_affine" in fast.report.counts()
    [record] = fast(X)["all"]
    assert record.count == 2
    torch.testing.assert_close(record.value.value, model(X)["all"][0].value.value)
    with pytest.raises(EquivalenceError, match="Record"):
        optimizer.check(model, net("recorded(x)"), X)


def test_what_is_given_or_returned_in_an_object_is_not_taken_for_unseen():
    given = Box(X.clone()), threading.Lock()  # which cannot be copied

    fast = optimizer.optimize(net("m.pair(x[0].value.neg_())"), (given,), level=1)
    outer, y = optimizer.optimize(net("boxed((y := x.tanh()).clone()), y"), X, check=None)(X)

    assert "fold_affine" in fast.report.counts()
    assert torch.equal(given[0].value, X)
    assert outer.value.data_ptr() != y.data_ptr()


def test_an_iterator_is_an_input_error_and_not_read():
    given = iter([X])

    with pytest.raises(InputError, match="read once only"):
        optimizer.optimize(net("m.pair(next(x))"), ([given],), level=1)
    assert next(given) is X


HOOKED = nn.ReLU()
HOOKED.register_forward_hook(lambda module, inputs, result: result * 2)
IS_CALLED = r"'held' \(.*\) is called as it is: "
WHY = {
    "a branch on data":
        (lambda: net(DATA), r"recorded by Dynamo: its control .* at \S+:\d+; Dynamo found 3 .*"),
    "a hook": (lambda: HOOKED, f"{IS_CALLED}.* hooks, .*"),
    "a script": (lambda: torch.jit.script(nn.ReLU()), f"{IS_CALLED}it is scripted, .*"),
}  # fmt: skip


@rows("make words", WHY)
def test_the_remark_says_why_a_part_is_not_recorded(make, words):
    once = optimizer.optimize(net("m.held(m.held(m.pair(x)))", make()), X, level=1)

    for fast in (once, optimizer.optimize(once, X, level=1)):
        assert re.fullmatch(words, "; ".join(fast.report.remarks))


class Keywords(Forward):
    """Takes any argument."""

    def forward(self, x: Tensor, *more: Tensor, **settings: float) -> Any:
        return sum(more, super().forward(x) * settings.get("scale", 1))


@pytest.mark.parametrize("example", [X, {"x": X, "scale": 2.0}])
def test_arguments_are_those_of_each_call(example):
    model = net("m.pair(x)", kind=Keywords)

    fast = optimizer.optimize(model, example, level=1)
    assert "fold_affine" in fast.report.counts()
    torch.testing.assert_close(fast(X, ANOTHER, ANOTHER), model(X, ANOTHER, ANOTHER))
    torch.testing.assert_close(fast(x=X, scale=3.0), model(x=X, scale=3.0))
    torch.testing.assert_close(fast(X), model(X))


@pytest.mark.parametrize("factor", ["1", "(1 if x.sum() < 1e9 else 2)"])  # recorded; by Dynamo
def test_a_model_may_raise_where_it_is_called_again_with_what_it_wrote(factor, monkeypatch):
    monkeypatch.setattr("optimizer.lowering.plan._WORTH_NO_RACE", 1e9)  # it is timed on such
    text = f"x[x > 0] = z; return m.linear(x).relu() * {factor}"
    model, x = ForwardOfTwo(text, linear=nn.Linear(64, 64)).eval(), torch.randn(64, 64)
    z = torch.randn(int((x > 0).sum()))
    fast = optimizer.optimize(model, (x.clone(), z))
    assert any("called again with the same inputs" in each for each in fast.report.remarks)
    torch.testing.assert_close(fast(x.clone(), z), model(x, z))
