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
from optimizer.core.inputs import Call
from optimizer.frontend.symbolic import capture_call
from optimizer.rewrite.pipeline import Pipeline

X = torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)
ANOTHER = torch.ones(2, 4, 4, 4)


class Net(nn.Module):
    """A foldable pair, something that the model holds, and what is done with both."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], held: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.pair = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        nn.init.normal_(self.pair[1].running_mean)
        self._function = forward
        if isinstance(held, Tensor) and not isinstance(held, nn.Parameter):
            self.register_buffer("held", held)
        else:
            self.held = held
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self._function(self, x)


class Opaque(nn.Module):
    """A submodule whose forward cannot be recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


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


def scripted(code: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(code)


def positive(x: Tensor) -> Tensor:
    """Needs a value, which a scripted function may ask for."""
    return x * 2 if bool(x.sum() > 0) else x


POSITIVE = scripted(positive)


def quietly(make: Callable[[], Tensor]) -> Tensor:
    """A tensor of a kind that torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.rand(4, 1, 1), 0.01, 0, torch.qint8)


def generated(self: Net, x: Tensor) -> Iterator[Tensor]:
    for scale in (1, 2, 3):
        yield self.pair(x) * scale


def locked(self: Net, x: Tensor) -> Tensor:
    with self.held:
        return self.pair(x)


def added(self: Net, x: Tensor) -> Tensor:
    y = self.pair(x)
    return y + 1 if y.sum() > 0 else y - 1


def multiplied(self: Net, x: Tensor) -> Tensor:
    return self.held @ self.pair(x).flatten(1)[:, :5].T


def in_linear(self: Net, x: Tensor) -> Tensor:
    return F.linear(self.pair(x), self.held)


def complex_parts(self: Net, x: Tensor) -> Tensor:
    return torch.view_as_real(self.pair(x).to(torch.complex64) @ self.held)


def after(held: Any) -> nn.Module:
    """A net that calls what it holds, layer or function, with what the pair gives."""
    return Net(lambda self, x: self.held(self.pair(x)), held)


EYE = torch.eye(5)
COMPLEX = torch.randn(4, 4, dtype=torch.complex64)
LEFT_AS_IT_IS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "is a generator": (lambda: Net(generated), "generator"),
    "holds a lock": (lambda: Net(locked, threading.Lock()), "cannot be copied"),
    "is scripted": (
        lambda: scripted(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()),
        "its forward cannot be recorded",
    ),
    "holds a sparse parameter": (
        lambda: Net(multiplied, nn.Parameter(EYE.to_sparse())),
        "torch.sparse_coo",
    ),
    "holds a sparse buffer": (lambda: Net(multiplied, EYE.to_sparse()), "torch.sparse_coo"),
    "holds a compressed buffer": (
        lambda: Net(multiplied, quietly(EYE.to_sparse_csr)),
        "sparse_csr",
    ),
    "holds a quantized buffer": (
        lambda: Net(lambda self, x: self.pair(x) * self.held.dequantize(), quietly(quantized)),
        "torch.qint8",
    ),
    "holds a parameter of another class": (
        lambda: Net(in_linear, nn.Parameter(torch.rand(5, 4).as_subclass(Doubling))),
        "class Doubling",
    ),
    "holds a buffer of another class": (
        lambda: Net(in_linear, torch.rand(5, 4).as_subclass(Doubling)),
        "class Doubling",
    ),
    "holds a conjugated view": (lambda: Net(complex_parts, COMPLEX.conj()), "torch.complex64"),
    "holds a negated view": (
        lambda: Net(lambda self, x: self.pair(x) @ self.held, COMPLEX.conj().imag),
        "cannot be copied",
    ),
}

FOLDED: dict[str, Callable[[], nn.Module]] = {
    "a submodule that branches on data": lambda: after(Opaque()),
    "a scripted submodule": lambda: after(scripted(nn.Sequential(nn.Conv2d(4, 4, 1)).eval())),
    "a complex parameter": lambda: Net(complex_parts, nn.Parameter(COMPLEX)),
    "a custom autograd function": lambda: after(Net(lambda self, x: Exponential.apply(x))),
    "a generator expression": lambda: Net(lambda self, x: sum(self.pair(x) * i for i in range(2))),
    "a tensor without data that gives a size": lambda: Net(
        lambda self, x: self.pair(x) * self.held[0].shape[0], [torch.empty(3, device="meta")]
    ),
    "a branch on data": lambda: Net(added),
    "a value as a number": lambda: Net(lambda self, x: self.pair(x) * float(x.max())),
    "numpy": lambda: Net(lambda self, x: torch.from_numpy(self.pair(x).detach().numpy())),
    "a scripted function": lambda: Net(lambda self, x: POSITIVE(self.pair(x))),
    "keyword arguments that nobody gives": lambda: Keywords(lambda self, x: self.pair(x)),
}


class Keywords(Net):
    """Takes any argument."""

    def forward(self, x: Tensor, *more: Tensor, **settings: float) -> Any:
        return sum(more, super().forward(x) * settings.get("scale", 1))


def answers(model: nn.Module) -> list[Tensor]:
    """What a model returns for four inputs, as dense tensors."""
    with torch.no_grad():
        results = [model(x) for x in (X, -X, X + 1, X[:1])]
    listed = [list(each) if isinstance(each, Iterator) else each for each in results]
    return [leaf.to_dense() for leaf in pytree.tree_leaves(listed)]


def state_of(model: nn.Module) -> list[object]:
    """Everything of a caller's model that could be seen to change."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, id(t), t.dtype, t.layout, t._version, t.requires_grad) for name, t in tensors],
        [(name, m.training, sorted(vars(m))) for name, m in model.named_modules()],
    ]


@pytest.mark.parametrize("check", ["final", "each", None])
@pytest.mark.parametrize("what", LEFT_AS_IT_IS)
def test_a_model_runs_unchanged_with_a_remark_if_it(what: str, check: Any) -> None:
    make, words = LEFT_AS_IT_IS[what]
    model = make()
    before = state_of(model)

    fast = optimizer.optimize(model, X, check=check, level=1)

    assert state_of(model) == before
    assert all(map(torch.equal, answers(fast), answers(model)))
    assert fast.report.fired == ()
    [remark] = fast.report.remarks
    assert remark.startswith("left as it is: ")
    assert words in remark
    assert "\n" not in remark


NOT_COPIED = ("holds a lock", "holds a conjugated view", "holds a negated view")
CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "another dtype": lambda fast: fast.bfloat16(),
    "another mode": lambda fast: fast.train(),
    "the mode that it has": lambda fast: fast.eval(),
    "no gradients": lambda fast: fast.requires_grad_(False),
    "another storage": lambda fast: fast._apply(torch.clone),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("what", LEFT_AS_IT_IS)
def test_a_change_of_the_result_does_not_reach_the_model(what: str, change: str) -> None:
    model = LEFT_AS_IT_IS[what][0]()
    before, expected = state_of(model), answers(model)
    fast = optimizer.optimize(model, X, check=None, level=1)

    locked = what in NOT_COPIED and change.startswith("another")
    with pytest.raises(InputError, match="change that one") if locked else nullcontext():
        CHANGES[change](fast)

    assert state_of(model) == before
    assert all(map(torch.equal, answers(model), expected))


@pytest.mark.parametrize("check", ["final", "each", None])
@pytest.mark.parametrize("what", FOLDED)
def test_the_rest_is_optimized_around(what: str, check: Any) -> None:
    model = FOLDED[what]()
    before = state_of(model)

    fast = optimizer.optimize(model, X, check=check, level=1)

    assert state_of(model) == before
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
def recorded(self: Net, x: Tensor) -> Any:
    return {"all": [Record(Record(self.pair(x)), 2)]}


@pytest.mark.parametrize("check", ["final", "each"])
def test_a_dataclass_that_is_returned_is_compared_field_by_field(check: Any) -> None:
    model, other = Net(recorded), Net(lambda self, x: {"all": [Record(Record(x), 2)]})

    fast = optimizer.optimize(model, X, check=check, level=1)

    assert "fold_affine" in fast.report.counts()
    [record] = fast(X)["all"]
    assert record.count == 2
    torch.testing.assert_close(record.value.value, model(X)["all"][0].value.value)
    with pytest.raises(EquivalenceError, match="Record"):
        optimizer.check(model, other, X)


@pytest.mark.parametrize("held", [Record, boxed])
def test_what_an_object_holds_is_not_taken_for_unseen(held: Callable[[Tensor], Any]) -> None:
    def copies(self: Net, x: Tensor) -> Any:
        y = torch.tanh(x)
        return held(y.clone()), y

    outer, y = optimizer.optimize(Net(copies), X, check=None, level=1)(X)

    assert outer.value.data_ptr() != y.data_ptr()


@pytest.mark.parametrize(("within", "out"), [
    (Record, lambda given: given.value),
    (lambda value: [Box(value)], lambda given: given[0].value),
], ids=["a dataclass", "an object"])  # fmt: skip
def test_what_is_given_in_an_object_is_not_written(within: Any, out: Any) -> None:
    given = within(X.clone())

    optimizer.optimize(Net(lambda self, xs: self.pair(out(xs).neg_())), (given,), level=1)

    assert torch.equal(out(given), X)


def test_an_object_that_cannot_be_copied_is_given_as_it_is() -> None:
    given = Box(threading.Lock())

    fast = optimizer.optimize(Net(lambda self, xs: self.pair(xs[0])), ([X, given],), level=1)

    assert "fold_affine" in fast.report.counts()


def test_an_iterator_is_an_input_error_and_not_read() -> None:
    given = iter([X])

    with pytest.raises(InputError, match="read once only"):
        optimizer.optimize(Net(lambda self, xs: self.pair(next(xs))), ([given],), level=1)
    assert next(given) is X


def hooked() -> nn.Module:
    layer = nn.ReLU()
    layer.register_forward_hook(lambda module, inputs, result: result * 2)
    return layer


class Counting(nn.Module):
    """Keeps a count."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


CALLED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a branch on data": (
        Opaque,
        r"recorded by Dynamo: its control flow depends on a traced value, at"
        r" test_bad_models\.py:\d+; Dynamo found 3 graphs",
    ),
    "a hook": (hooked, r"'held' \(ReLU\) is called as it is: .* hooks, .*"),
    "a count": (Counting, r"recorded by Dynamo: it sets the attribute 'calls' .*"),
    "a script": (
        lambda: scripted(nn.Sequential(nn.Conv2d(4, 4, 1)).eval()),
        r"'held' \(RecursiveScriptModule\) is called as it is: it is scripted, .*",
    ),
    "an ordinary layer": (nn.Tanh, ""),
}


@pytest.mark.parametrize("what", CALLED)
def test_the_remark_says_why_a_model_is_recorded_by_dynamo(what: str) -> None:
    make, words = CALLED[what]
    model = Net(lambda self, x: self.held(self.held(self.pair(x))), make())

    once = optimizer.optimize(model, X, level=1)
    twice = optimizer.optimize(once, X, level=1)

    for fast in (once, twice):
        assert re.fullmatch(words, "; ".join(fast.report.remarks))


def test_a_line_that_cannot_be_recorded_stops_nothing() -> None:
    inline, apart = (
        optimizer.optimize(model, X, level=1) for model in (Net(added), after(Opaque()))
    )

    for each in (inline, apart):
        assert each.report.counts() == {"fold_affine": 1}
    for actual, expected in zip(answers(apart), answers(inline), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("example", "others"), [
    (X, [((X,), {}), ((X,), {"scale": 2.0}), ((X, ANOTHER, ANOTHER), {})]),
    ({"x": X, "scale": 2.0}, [((), {"x": X, "scale": 3.0}), ((X,), {"scale": 3.0})]),
])  # fmt: skip
def test_arguments_are_those_of_each_call(example: Any, others: Any) -> None:
    model = Keywords(lambda self, x: self.pair(x)).eval()

    fast = optimizer.optimize(model, example, level=1)

    for args, kwargs in others:
        torch.testing.assert_close(fast(*args, **kwargs), model(*args, **kwargs))


REJECTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a parameter on the meta device": (
        lambda: Net(multiplied, nn.Parameter(EYE.to("meta"))),
        "'held' is on the meta device and holds no data: load",
    ),
    "a buffer on the meta device": (
        lambda: Net(multiplied, EYE.to("meta")),
        "'held' is on the meta device",
    ),
    "no forward": (lambda: nn.Module().eval(), "the model itself rejects these example inputs"),
    "a forward that raises": (
        lambda: Net(lambda self, x: self.absent(x)),
        "the model itself rejects these example inputs (AttributeError",
    ),
}


@pytest.mark.parametrize("what", REJECTED)
def test_a_model_that_does_not_run_is_an_input_error(what: str) -> None:
    make, words = REJECTED[what]
    model = make()
    before = state_of(model)

    with pytest.raises(InputError) as caught:
        optimizer.optimize(model, X, level=1)

    assert words in str(caught.value)
    assert state_of(model) == before


class TwoDevices(nn.Module):
    """Layers and a constant on the CPU and on the meta device, which stands in for another."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3, device="meta")
        self.norm = nn.BatchNorm2d(4, device="meta")
        self.register_buffer("scale", torch.rand(4, 1, 1, device="meta"))
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, z = x.sin(), x.cos()
        return self.norm(self.here(y)), self.here(z) * self.scale, self.there(x), x.to("meta")


def test_what_lives_on_two_devices_is_not_combined() -> None:
    module = capture_call(TwoDevices(), Call((X,), {}))
    pipeline = Pipeline(module)

    pipeline.run(optimizer.all_passes())

    reasons = {(refusal.name, refusal.reason) for refusal in pipeline.refused}
    assert pipeline.fired == []
    assert ("fold_affine", "dtype or device differ") in reasons
    assert any(node.target == "to" for node in module.graph.nodes)
