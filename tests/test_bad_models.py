"""Models that cannot be optimized run as they are, with a remark, or are a typed error.

Either way the caller's model is the same afterwards, and what can be optimized around a part
that cannot is.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import optimizer
from optimizer import EquivalenceError, InputError
from optimizer.rewrite.pipeline import Pipeline
from optimizer.testing import untouched
from tests.single_pass import ForwardOfTwo, every_other, function_of, rows

X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)
ANOTHER = torch.ones(2, 4, 4, 4)


class Net(nn.Module):
    """A foldable pair, something that the model holds, and what is done with both."""

    def __init__(self, forward: Callable[[Any, Tensor], Any] | str, held: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.pair = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        nn.init.normal_(self.pair[1].running_mean)
        self._function = function_of("m, x", forward) if isinstance(forward, str) else forward
        if isinstance(held, Tensor) and not isinstance(held, nn.Parameter):
            self.register_buffer("held", held)
        else:
            self.held = held
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self._function(self, x)


class Keywords(Net):
    """Takes any argument."""

    def forward(self, x: Tensor, *more: Tensor, **settings: float) -> Any:
        return sum(more, super().forward(x) * settings.get("scale", 1))


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


def quietly(make: Callable[..., Any], *given: Any) -> Any:
    """Make what torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*given)


def positive(x: Tensor) -> Tensor:
    """Needs a value, which a scripted function may ask for."""
    return x * 2 if bool(x.sum() > 0) else x


def generated(m: Net, x: Tensor) -> Iterator[Tensor]:
    for scale in (1, 2, 3):
        yield m.pair(x) * scale


def locked(m: Net, x: Tensor) -> Tensor:
    with m.held:
        return m.pair(x)


POSITIVE = quietly(torch.jit.script, positive)
SCRIPTED = quietly(torch.jit.script, nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()).eval())
CALLED, DATA = "m.held(m.pair(x))", "x + 1 if x.sum() > 0 else x - 1"
MULTIPLIED, IN_LINEAR = "m.held @ m.pair(x).flatten(1)[:, :5].T", "F.linear(m.pair(x), m.held)"
COMPLEX_PARTS = "torch.view_as_real(m.pair(x).to(torch.complex64) @ m.held)"
FIVE_ROWS, COMPLEX = torch.rand(5, 4).as_subclass(Doubling), torch.randn(4, 4, dtype=torch.cfloat)
EIGHT_BITS = quietly(torch.quantize_per_tensor, torch.rand(4, 1, 1), 0.01, 0, torch.qint8)
# How each is made, and words of the remark.
LEFT_AS_IT_IS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "is a generator": (lambda: Net(generated), "generator"),
    "holds a lock": (lambda: Net(locked, threading.Lock()), "cannot be copied"),
    "is scripted": (
        lambda: quietly(torch.jit.script, nn.Sequential(nn.Conv2d(3, 4, 3)).eval()),
        "its forward cannot be recorded",
    ),
    "holds a sparse parameter": (
        lambda: Net(MULTIPLIED, nn.Parameter(torch.eye(5).to_sparse())), "torch.sparse_coo"
    ),
    "holds a quantized buffer": (
        lambda: Net("m.pair(x) * m.held.dequantize()", EIGHT_BITS.clone()), "torch.qint8"
    ),
    "holds a buffer of another class": (lambda: Net(IN_LINEAR, FIVE_ROWS), "class Doubling"),
    "holds a conjugated view": (lambda: Net(COMPLEX_PARTS, COMPLEX.conj()), "torch.complex64"),
}  # fmt: skip
FOLDED: dict[str, Callable[[], nn.Module]] = {
    "a submodule that branches on data": lambda: Net(CALLED, Net(DATA)),
    "a scripted submodule": lambda: Net(CALLED, SCRIPTED),
    "a complex parameter": lambda: Net(COMPLEX_PARTS, nn.Parameter(COMPLEX)),
    "a custom autograd function": lambda: Net(CALLED, Net(lambda m, x: Exponential.apply(x))),
    "a tensor without data that gives a size": lambda: Net(
        "m.pair(x) * m.held[0].shape[0]", [torch.empty(3, device="meta")]
    ),
    "numpy": lambda: Net("torch.from_numpy(m.pair(x).detach().numpy())"),
    "a scripted function": lambda: Net(lambda m, x: POSITIVE(m.pair(x))),
    "keyword arguments that nobody gives": lambda: Keywords("m.pair(x)"),
}


def answers(model: nn.Module) -> list[Tensor]:
    """What a model returns for four inputs, as dense tensors."""
    with torch.no_grad():
        results = [model(x) for x in (X, -X, X + 1, X[:1])]
    listed = [list(each) if isinstance(each, Iterator) else each for each in results]
    return [leaf.to_dense() for leaf in pytree.tree_leaves(listed)]


def state_of(model: nn.Module) -> list[object]:
    """What could be seen to change of tensors of any layout, whose bits nobody may read."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, id(t), t.dtype, t.layout, t._version, t.requires_grad) for name, t in tensors],
        [(name, m.training, sorted(vars(m))) for name, m in model.named_modules()],
    ]


NOT_COPIED = ("holds a lock", "holds a conjugated view")
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "another dtype": lambda fast: fast.bfloat16(),
    "another mode": lambda fast: fast.train(),
    "no gradients": lambda fast: fast.requires_grad_(False),
}


@pytest.mark.parametrize(("what", "change"), every_other(LEFT_AS_IT_IS, CHANGES))
def test_a_model_runs_unchanged_with_a_remark_if_it(what: str, change: str) -> None:
    make, words = LEFT_AS_IT_IS[what]
    model = make()
    before, expected = state_of(model), answers(model)
    locked = what in NOT_COPIED and "another" in change

    fast = optimizer.optimize(model, X, check="final" if "mode" in change else None, level=1)
    assert all(map(torch.equal, answers(fast), expected))
    with pytest.raises(InputError, match="change that one") if locked else nullcontext():
        CHANGES[change](fast)

    assert state_of(model) == before
    assert fast.report.fired == ()
    [remark] = fast.report.remarks
    assert re.fullmatch(f"left as it is: .*{words}.*", remark)
    assert all(map(torch.equal, answers(model), expected))


@pytest.mark.parametrize(("what", "check"), every_other(FOLDED, ("final", "each", None)))
def test_the_rest_is_optimized_around(what: str, check: Any) -> None:
    model = FOLDED[what]()

    with untouched(model):
        fast = optimizer.optimize(model, X, check=check, level=1)

    assert "fold_affine" in fast.report.counts()
    for actual, expected in zip(answers(fast), answers(model), strict=True):
        torch.testing.assert_close(actual, expected)


@dataclass(frozen=True)
class Record:
    """Knows its fields, which pytree does not."""

    value: Any
    count: int = 1


class Box:
    """Nobody knows what it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value


@fx.wrap
def boxed(value: Tensor) -> Box:
    return Box(value)


@fx.wrap
def recorded(m: Net, x: Tensor) -> Any:
    return {"all": [Record(Record(m.pair(x)), 2)]}


@pytest.mark.parametrize("check", ["final", "each"])
def test_a_dataclass_that_is_returned_is_compared_field_by_field(check: Any) -> None:
    model, other = Net(recorded), Net(lambda m, x: {"all": [Record(Record(x), 2)]})

    fast = optimizer.optimize(model, X, check=check, level=1)

    assert "fold_affine" in fast.report.counts()
    [record] = fast(X)["all"]
    assert record.count == 2
    torch.testing.assert_close(record.value.value, model(X)["all"][0].value.value)
    with pytest.raises(EquivalenceError, match="Record"):
        optimizer.check(model, other, X)


@pytest.mark.parametrize("held", [Record, boxed])
def test_what_an_object_holds_is_not_taken_for_unseen(held: Callable[[Tensor], Any]) -> None:
    model = Net(lambda m, x: (held((y := torch.tanh(x)).clone()), y))

    outer, y = optimizer.optimize(model, X, check=None, level=1)(X)

    assert outer.value.data_ptr() != y.data_ptr()


@pytest.mark.parametrize("within", [Record, Box])
def test_what_is_given_in_an_object_is_not_written(within: Any) -> None:
    given = within(X.clone()), threading.Lock()  # which cannot be copied

    fast = optimizer.optimize(Net("m.pair(x[0].value.neg_())"), (given,), level=1)

    assert "fold_affine" in fast.report.counts()
    assert torch.equal(given[0].value, X)


def test_an_iterator_is_an_input_error_and_not_read() -> None:
    given = iter([X])

    with pytest.raises(InputError, match="read once only"):
        optimizer.optimize(Net("m.pair(next(x))"), ([given],), level=1)
    assert next(given) is X


def hooked() -> nn.Module:
    layer = nn.ReLU()
    layer.register_forward_hook(lambda module, inputs, result: result * 2)
    return layer


IS_CALLED = r"'held' \(.*\) is called as it is: "


@rows(
    "held words",
    {
        "a branch on data": (
            Net(DATA), r"recorded by Dynamo: its control .* at \S+:\d+; Dynamo found 3 graphs"
        ),
        "a hook": (hooked(), f"{IS_CALLED}.* hooks, .*"),
        "a script": (SCRIPTED, f"{IS_CALLED}it is scripted, .*"),
        "an ordinary layer": (nn.Tanh(), ""),
    },
)  # fmt: skip
def test_the_remark_says_why_a_part_is_not_recorded(held: nn.Module, words: str) -> None:
    once = optimizer.optimize(Net("m.held(m.held(m.pair(x)))", held), X, level=1)

    for fast in (once, optimizer.optimize(once, X, level=1)):
        assert re.fullmatch(words, "; ".join(fast.report.remarks))


@pytest.mark.parametrize(("example", "others"), [
    (X, [((X,), {}), ((X,), {"scale": 2.0}), ((X, ANOTHER, ANOTHER), {})]),
    ({"x": X, "scale": 2.0}, [((), {"x": X, "scale": 3.0}), ((X,), {"scale": 3.0})]),
])  # fmt: skip
def test_arguments_are_those_of_each_call(example: Any, others: Any) -> None:
    model = Keywords("m.pair(x)")

    fast = optimizer.optimize(model, example, level=1)

    for args, kwargs in others:
        torch.testing.assert_close(fast(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.parametrize("model", [nn.Module().eval(), Net("m.absent(x)")])
def test_a_model_that_does_not_run_is_an_input_error(model: nn.Module) -> None:
    with pytest.raises(InputError, match="the model itself rejects these example inputs"):
        optimizer.optimize(model, X, level=1)


@pytest.mark.parametrize("factor", ["1", "(1 if x.sum() < 1e9 else 2)"])  # recorded; by Dynamo
def test_a_model_may_raise_where_it_is_called_again_with_what_it_wrote(factor: str) -> None:
    """Programs are timed on such inputs."""
    text = f"x[x > 0] = z; return m.linear(x).relu() * {factor}"
    model = ForwardOfTwo(text, linear=nn.Linear(64, 64)).eval()
    x = torch.randn(64, 64)
    z = torch.randn(int((x > 0).sum()))
    fast = optimizer.optimize(model, (x.clone(), z))

    assert any("called again with the same inputs" in each for each in fast.report.remarks)
    torch.testing.assert_close(fast(x.clone(), z), model(x, z))


def test_what_lives_on_two_devices_is_not_combined() -> None:
    """The meta device stands in for another."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    pipeline = Pipeline(optimizer.capture(model, X))
    pipeline.module.get_submodule("1").to("meta")

    pipeline.run(optimizer.all_passes())

    assert pipeline.fired == []
    assert [each.reason for each in pipeline.refused] == ["dtype or device differ"]
