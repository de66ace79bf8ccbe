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


def quietly(make: Callable[..., Any], *given: Any) -> Any:
    """Make what torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*given)


def scripted(code: Any) -> Any:
    return quietly(torch.jit.script, code)


def positive(x: Tensor) -> Tensor:
    """Needs a value, which a scripted function may ask for."""
    return x * 2 if bool(x.sum() > 0) else x


POSITIVE = scripted(positive)


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.rand(4, 1, 1), 0.01, 0, torch.qint8)


def generated(m: Net, x: Tensor) -> Iterator[Tensor]:
    for scale in (1, 2, 3):
        yield m.pair(x) * scale


def locked(m: Net, x: Tensor) -> Tensor:
    with m.held:
        return m.pair(x)


def added(m: Net, x: Tensor) -> Tensor:
    y = m.pair(x)
    return y + 1 if y.sum() > 0 else y - 1


def after(held: Any) -> nn.Module:
    """A net that calls what it holds, layer or function, with what the pair gives."""
    return Net("m.held(m.pair(x))", held)


MULTIPLIED, IN_LINEAR = "m.held @ m.pair(x).flatten(1)[:, :5].T", "F.linear(m.pair(x), m.held)"
COMPLEX_PARTS = "torch.view_as_real(m.pair(x).to(torch.complex64) @ m.held)"
EYE, FIVE_ROWS = torch.eye(5), torch.rand(5, 4).as_subclass(Doubling)
COMPLEX = torch.randn(4, 4, dtype=torch.complex64)
# How each is made, and words of the remark.
LEFT_AS_IT_IS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "is a generator": (lambda: Net(generated), "generator"),
    "holds a lock": (lambda: Net(locked, threading.Lock()), "cannot be copied"),
    "is scripted": (
        lambda: scripted(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()),
        "its forward cannot be recorded",
    ),
    "holds a sparse parameter": (
        lambda: Net(MULTIPLIED, nn.Parameter(EYE.to_sparse())), "torch.sparse_coo"
    ),
    "holds a sparse buffer": (lambda: Net(MULTIPLIED, EYE.to_sparse()), "torch.sparse_coo"),
    "holds a compressed buffer": (
        lambda: Net(MULTIPLIED, quietly(EYE.to_sparse_csr)), "sparse_csr"
    ),
    "holds a quantized buffer": (
        lambda: Net("m.pair(x) * m.held.dequantize()", quietly(quantized)), "torch.qint8"
    ),
    "holds a parameter of another class": (
        lambda: Net(IN_LINEAR, nn.Parameter(FIVE_ROWS)), "class Doubling"
    ),
    "holds a buffer of another class": (lambda: Net(IN_LINEAR, FIVE_ROWS), "class Doubling"),
    "holds a conjugated view": (lambda: Net(COMPLEX_PARTS, COMPLEX.conj()), "torch.complex64"),
    "holds a negated view": (
        lambda: Net("m.pair(x) @ m.held", COMPLEX.conj().imag), "cannot be copied"
    ),
}  # fmt: skip
FOLDED: dict[str, Callable[[], nn.Module]] = {
    "a submodule that branches on data": lambda: after(Opaque()),
    "a scripted submodule": lambda: after(scripted(nn.Sequential(nn.Conv2d(4, 4, 1)).eval())),
    "a complex parameter": lambda: Net(COMPLEX_PARTS, nn.Parameter(COMPLEX)),
    "a custom autograd function": lambda: after(Net(lambda m, x: Exponential.apply(x))),
    "a generator expression": lambda: Net("sum(m.pair(x) * i for i in range(2))"),
    "a tensor without data that gives a size": lambda: Net(
        "m.pair(x) * m.held[0].shape[0]", [torch.empty(3, device="meta")]
    ),
    "a branch on data": lambda: Net(added),
    "a value as a number": lambda: Net("m.pair(x) * float(x.max())"),
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
    """Everything of a caller's model that could be seen to change."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, id(t), t.dtype, t.layout, t._version, t.requires_grad) for name, t in tensors],
        [(name, m.training, sorted(vars(m))) for name, m in model.named_modules()],
    ]


CHECKS = ("final", "each", None)


@pytest.mark.parametrize(("what", "check"), every_other(LEFT_AS_IT_IS, CHECKS))
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


@pytest.mark.parametrize(("what", "change"), every_other(LEFT_AS_IT_IS, CHANGES))
def test_a_change_of_the_result_does_not_reach_the_model(what: str, change: str) -> None:
    model = LEFT_AS_IT_IS[what][0]()
    before, expected = state_of(model), answers(model)
    fast = optimizer.optimize(model, X, check=None, level=1)

    locked = what in NOT_COPIED and change.startswith("another")
    with pytest.raises(InputError, match="change that one") if locked else nullcontext():
        CHANGES[change](fast)

    assert state_of(model) == before
    assert all(map(torch.equal, answers(model), expected))


@pytest.mark.parametrize(("what", "check"), every_other(FOLDED, CHECKS))
def test_the_rest_is_optimized_around(what: str, check: Any) -> None:
    model = FOLDED[what]()
    before = state_of(model)

    fast = optimizer.optimize(model, X, check=check, level=1)

    assert state_of(model) == before
    assert "fold_affine" in (counts := fast.report.counts())
    assert "branch" not in what or counts == {"fold_affine": 1}
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


@rows(
    "within out",
    {
        "a dataclass": (Record, lambda given: given.value),
        "an object": (lambda value: [Box(value)], lambda given: given[0].value),
    },
)
def test_what_is_given_in_an_object_is_not_written(within: Any, out: Any) -> None:
    given = within(X.clone())

    optimizer.optimize(Net(lambda m, xs: m.pair(out(xs).neg_())), (given,), level=1)

    assert torch.equal(out(given), X)


def test_an_object_that_cannot_be_copied_is_given_as_it_is() -> None:
    fast = optimizer.optimize(Net("m.pair(x[0])"), ([X, Box(threading.Lock())],), level=1)

    assert "fold_affine" in fast.report.counts()


def test_an_iterator_is_an_input_error_and_not_read() -> None:
    given = iter([X])

    with pytest.raises(InputError, match="read once only"):
        optimizer.optimize(Net("m.pair(next(x))"), ([given],), level=1)
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


@rows(
    "make words",
    {
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
    },
)
def test_the_remark_says_why_a_model_is_recorded_by_dynamo(
    make: Callable[[], nn.Module], words: str
) -> None:
    once = optimizer.optimize(Net("m.held(m.held(m.pair(x)))", make()), X, level=1)

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


REJECTS = "the model itself rejects these example inputs"


@rows(
    "model words",
    {
        "a parameter on the meta device": (
            Net(MULTIPLIED, nn.Parameter(EYE.to("meta"))),
            "'held' is on the meta device and holds no data: load",
        ),
        "a buffer on the meta device": (
            Net(MULTIPLIED, EYE.to("meta")), "'held' is on the meta device"
        ),
        "no forward": (nn.Module().eval(), REJECTS),
        "a forward that raises": (Net("m.absent(x)"), f"{REJECTS} (AttributeError"),
    },
)  # fmt: skip
def test_a_model_that_does_not_run_is_an_input_error(model: nn.Module, words: str) -> None:
    before = state_of(model)

    with pytest.raises(InputError, match=re.escape(words)):
        optimizer.optimize(model, X, level=1)

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
    module = capture_call(TwoDevices(), Call((X,), {}))
    pipeline = Pipeline(module)

    pipeline.run(optimizer.all_passes())

    reasons = {(refusal.name, refusal.reason) for refusal in pipeline.refused}
    assert pipeline.fired == []
    assert ("fold_affine", "dtype or device differ") in reasons
    assert any(node.target == "to" for node in module.graph.nodes)
