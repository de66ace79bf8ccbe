"""A Linear with its ReLU, and what is written over an operand that nobody else needs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.core.node import callee
from optimizer.core.ops import add_over, mul_over
from optimizer.passes import fuse
from optimizer.passes.fuse import LinearReLU
from optimizer.testing import Optimize, assert_equivalent, inputs_like, randomize
from tests.conftest import address
from tests.single_pass import (
    Forward,
    ForwardOfTwo,
    alike,
    callees,
    layers_of,
    optimized_by,
    rows,
    texts,
    tried,
)

LINEAR, ACTIVATION, OPERAND = "fuse_linear_relu", "reuse_activations", "reuse_operands"
ROWS = inputs_like([(4, 3)], "random", 0)


@pytest.fixture(autouse=True)
def small_tensors_are_worthwhile() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse, "WORTHWHILE", 1)
        yield


def assert_same_gradients(model: nn.Module, fast: Any, x: Tensor) -> None:
    fast = deepcopy(fast)
    model(x).sum().backward()
    fast(x).sum().backward()
    expected, found = (
        [each.grad for each in module.parameters() if each.grad is not None]
        for module in (model, fast)
    )
    assert expected
    assert all(map(torch.equal, expected, found))


def layers(forward: Callable[..., Any]) -> nn.Module:
    """A model of a Linear, two ReLUs and two parameters of its own."""
    held = {"linear": nn.Linear(3, 4), "relu": nn.ReLU(), "inplace": nn.ReLU(inplace=True)}
    own = {"w": nn.Parameter(torch.empty(4, 3)), "b": nn.Parameter(torch.empty(4))}
    return randomize(Forward(forward, **held, **own).double().eval())


FUSED = texts(
    """
    m.relu(m.linear(x)); m.inplace(m.linear(x)); m.relu(input=m.linear(input=x));
    F.relu(m.linear(x)); F.relu(m.linear(x), inplace=True);
    F.relu(inplace=False, input=m.linear(x)); F.relu_(m.linear(x)); torch.relu(m.linear(x));
    torch.relu(input=m.linear(x)); torch.relu_(m.linear(x)); m.linear(x).relu();
    m.linear(x).relu_(); F.linear(x, m.w, m.b).relu(); F.linear(x, m.w).relu();
    F.relu(F.linear(input=x, bias=m.b, weight=m.w))
    """
)

PLAIN = "m.relu(m.linear(x))"


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3)])
@rows("forward outcome", alike([LinearReLU], FUSED))
def test_fuses_every_spelling_at_every_rank(forward: Any, outcome: Any, shape: Any) -> None:
    tried(LINEAR, layers(forward), inputs_like([shape], "random", 0), outcome)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_keeps_the_bits_in_every_dtype(dtype: torch.dtype) -> None:
    tried(LINEAR, layers(PLAIN).to(dtype), (ROWS[0].to(dtype),), [LinearReLU])


def test_needs_no_example_inputs() -> None:
    tried(LINEAR, layers(PLAIN), (), [LinearReLU], ROWS)


def test_shares_the_weight_of_the_layer_and_its_gradients() -> None:
    model = layers(PLAIN)

    fast = optimized_by(LINEAR, model, *ROWS)

    (fused,) = layers_of(fast)
    assert address(fused.weight) == address(model.linear.weight)
    assert address(fused.bias) == address(model.linear.bias)
    assert_same_gradients(model, fast, *ROWS)


def test_repeats_the_fusion_after_a_batchnorm_was_folded() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, eps=0.125), nn.ReLU())
    randomize(model.double().eval())

    fast = optimizer.optimize(model, ROWS, check=None, level=1)

    assert callees(fast)[-1:] == [LinearReLU]
    assert nn.BatchNorm1d not in callees(fast)
    assert_equivalent(model, fast, ROWS)


READ_ELSEWHERE = "the layer's output is read elsewhere"
LINEARS: dict[str, tuple[Callable[[Any, Tensor], Any], Any]] = {
    "a layer called twice": (lambda m, x: (m.linear(x).relu(), m.relu(m.linear(-x))), 2),
    "two relus": (lambda m, x: m.linear(x).relu().relu(), [LinearReLU, F.relu]),
    "a second reader": (lambda m, x: (y := m.linear(x), F.relu(y)), READ_ELSEWHERE),
    "a residual": (lambda m, x: (y := m.linear(x)) - m.relu(y), READ_ELSEWHERE),
    "a reader of what an in-place relu left": (
        lambda m, x: (y := m.linear(x), m.inplace(y))[0] + y, READ_ELSEWHERE,
    ),
    "a view of the output": (
        lambda m, x: (y := m.linear(x), z := y.t(), m.relu(y))[1] + z, READ_ELSEWHERE,
    ),
}  # fmt: skip


@rows("forward outcome", LINEARS)
def test_linears_and_relus(forward: Any, outcome: Any) -> None:
    tried(LINEAR, layers(forward), ROWS, outcome)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
        return super().forward(input) * 2


def hooked() -> nn.Module:
    linear = nn.Linear(3, 4)
    linear.register_forward_hook(lambda module, given, result: result - 1)
    return linear


class Negated(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight


def parametrized() -> nn.Module:
    return nn.utils.parametrize.register_parametrization(nn.Linear(3, 4), "weight", Negated())


def overridden() -> nn.Module:
    linear = nn.Linear(3, 4)
    linear.forward = lambda x: F.linear(x, linear.weight) - 1  # type: ignore[method-assign]
    return linear


def with_a_plain_tensor() -> nn.Module:
    linear = nn.Linear(3, 4).double()
    weight = linear.weight.detach().clone()
    del linear.weight
    linear.weight = weight
    return linear


@pytest.mark.parametrize(
    ("build", "outcome"),
    [
        *((build, 0) for build in (lambda: Doubled(3, 4), hooked, overridden, parametrized)),
        (with_a_plain_tensor, "the layer has tensors that no cast of it reaches"),
    ],
)
def test_a_layer_that_is_no_plain_linear_is_left_alone(build: Any, outcome: Any) -> None:
    model = randomize(nn.Sequential(build(), nn.ReLU()).double().eval())

    tried(LINEAR, model, ROWS, outcome)


X = inputs_like([(3, 4)], "random", 0)


def activated(forward: Callable[..., Any], activation: nn.Module | None = None) -> nn.Module:
    """A model of a few layers, a parameter, and an activation of its own."""
    held = {"linear": nn.Linear(4, 4), "other": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    weight = nn.Parameter(torch.empty(3, 4))
    return randomize(Forward(forward, weight=weight, activation=activation, **held).double().eval())


ACTIVATIONS = {
    "ReLU": nn.ReLU,
    "ReLU6": nn.ReLU6,
    "Hardtanh": lambda: nn.Hardtanh(-0.25, 0.5),
    "LeakyReLU": lambda: nn.LeakyReLU(0.25),
    "SiLU": nn.SiLU,
    "Mish": nn.Mish,
    "Hardswish": nn.Hardswish,
    "Hardsigmoid": nn.Hardsigmoid,
    "GELU": nn.GELU,
    "GELU by tanh": lambda: nn.GELU("tanh"),
}
FUNCTIONS = texts(
    """
    torch.relu(m.linear(x)); m.linear(x).relu(); F.relu6(m.linear(x));
    F.hardtanh(m.linear(x), -0.5, max_val=0.25); F.leaky_relu(m.linear(x), negative_slope=0.25);
    F.leaky_relu(m.linear(x), 0.25, False); F.silu(m.linear(x));
    F.mish(m.linear(x), inplace=False); F.hardswish(m.linear(x)); F.hardsigmoid(m.linear(x));
    F.gelu(m.linear(x)); F.gelu(m.linear(x), approximate='tanh')
    """
)


def holds_its_input(fast: Any, x: Tensor) -> bool:
    """Whether one call allocates no more than one tensor of the size of its output."""
    with torch.no_grad():
        measured = optimizer.measure(fast, x, repeats=1, warmup=1)
        return measured.peak_memory <= fast(x).untyped_storage().nbytes()


# Without example inputs nobody knows whether the result of a leaky_relu is written later.
@pytest.mark.parametrize(
    ("case", "examples"),
    [(c, known) for c in ACTIVATIONS for known in (True, False) if known or c != "LeakyReLU"],
)
def test_every_module_writes_over_its_input(case: str, examples: bool) -> None:
    model = activated(lambda m, x: m.activation(m.linear(x)), ACTIVATIONS[case]())
    inputs = (torch.randn(64, 3, 4, dtype=torch.float64),)

    fast = tried(ACTIVATION, model, inputs if examples else (), 1, inputs)

    assert holds_its_input(fast, *inputs)
    assert not getattr(model.activation, "inplace", False)


@rows("forward outcome", alike(1, FUNCTIONS))
def test_every_function_writes_over_its_input(forward: Any, outcome: int) -> None:
    model, (x,) = activated(forward), X
    large = torch.randn(64, 3, 4, dtype=torch.float64)

    fast = tried(ACTIVATION, model, (large,), outcome, (x[:2],))

    assert holds_its_input(fast, large)
    assert_same_gradients(model, fast, x)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert_equivalent(model.to(dtype), fast.to(dtype), (x.to(dtype),), exact=True)


NEEDED = "its input is needed elsewhere"


SIGNS = "a gradient needs the signs, which would not be kept"
LEAKY, SILU = nn.LeakyReLU(-0.5), nn.SiLU()
WRITTEN_OVER: dict[str, tuple[Callable[[Any, Tensor], Any], nn.Module | None, Any]] = {
    "twice, of which once an input": (
        lambda m, x: m.activation(m.linear(m.activation(x))), SILU, 1,
    ),
    "a module in place": (lambda m, x: m.activation(m.linear(x)), nn.SiLU(inplace=True), 0),
    "a function in place": (lambda m, x: F.silu(m.linear(x), True), None, 0),
    "a method in place": (lambda m, x: m.linear(x).relu_(), None, 0),
    "a negative slope": (lambda m, x: m.activation(m.linear(x)), LEAKY, SIGNS),
    "a negative slope of a function": (lambda m, x: F.leaky_relu(m.linear(x), -0.5), None, SIGNS),
    "a negative slope by name": (
        lambda m, x: F.leaky_relu(m.linear(x), negative_slope=-0.5), None, SIGNS,
    ),
    "a result that is written later": (
        "result = F.leaky_relu(m.linear(x), 0.5); result[result > 0] = 0.0; return result", None,
        SIGNS,
    ),
    "a computed slope": (lambda m, x: F.leaky_relu(m.linear(x), 1 - x.shape[0]), None, SIGNS),
}  # fmt: skip
INPUTS = texts(
    """
    F.silu(x); F.silu(m.weight) + x; F.silu(x.t()); F.silu(m.linear(x).contiguous());
    F.silu(F.dropout(x, 0.5, False)); ((y := m.linear(x)), F.silu(y));
    (y := m.linear(x)) + F.silu(y); ((y := m.linear(x)), (z := y.t()), F.silu(y))[1] + z;
    F.silu(torch.add(x, 1.0, out=x.clone())); F.silu(torch.sigmoid(x))
    """
)


@rows("forward activation outcome", WRITTEN_OVER)
def test_activations(forward: Any, activation: Any, outcome: Any) -> None:
    fast = tried(ACTIVATION, activated(forward, activation), X, outcome)

    fast(*X).sum().backward()  # raised an error


@rows("forward outcome", alike(NEEDED, INPUTS))
def test_activations_of_what_is_needed(forward: Any, outcome: str) -> None:
    tried(ACTIVATION, activated(forward), X, outcome)


def test_a_hooked_activation_is_left_alone() -> None:
    activation = nn.SiLU()
    activation.register_forward_hook(lambda module, given, result: result + given[0])

    tried(ACTIVATION, activated(lambda m, x: m.activation(m.linear(x)), activation), X, 0)


def test_a_module_of_a_module_stays_for_its_other_calls() -> None:
    inner = nn.Sequential(nn.LeakyReLU(0.5), nn.Hardtanh())
    model = Forward(lambda m, x: (first := m.inner(x + 1), m.inner(first)), inner=inner).eval()
    x = torch.linspace(-4, 4, 6, dtype=torch.float64)

    assert_equivalent(model, Optimize(only=("reuse_activations",))(model, (x,)), (x,))


def overwritten(fast: Any) -> list[Any]:
    """For each combination in place: the function, and which operand it overwrites."""
    made = [node for node in fast.graph.nodes if node.target in (add_over, mul_over)]
    return [(callee(node), node.args[2]) for node in made]


SUMS = {
    "a residual": (lambda m, x: x + m.linear(x), [(add_over, 1)]),
    "a residual, the other way": (lambda m, x: m.linear(x) + x, [(add_over, 0)]),
    "torch.add": (lambda m, x: torch.add(x, m.linear(x)), [(add_over, 1)]),
    "a gate": (lambda m, x: x.sigmoid() * m.linear(x), [(mul_over, 1)]),
    "torch.mul": (lambda m, x: torch.mul(m.linear(x), x), [(mul_over, 0)]),
    "both may be": (lambda m, x: m.linear(x) + m.other(x), [(add_over, 0)]),
    "itself": (lambda m, x: (y := m.linear(x)) + y, [(add_over, 0)]),
    "one after another": (lambda m, x: x + m.linear(x) * m.norm(x), [(mul_over, 0), (add_over, 1)]),
}  # fmt: skip


@rows("forward expected", SUMS)
def test_overwrites_the_operand_that_is_not_needed(forward: Any, expected: list[Any]) -> None:
    model = activated(forward)

    fast = tried(OPERAND, model, X, len(expected), *[inputs_like([(2, 5, 4)], "random", 0)])

    assert overwritten(fast) == expected
    assert_equivalent(model, pickle.loads(pickle.dumps(fast)), X, exact=True)
    assert_same_gradients(model, fast, *X)


LATER = {
    "alike": lambda: torch.randn(3, 4),
    "a larger batch, broadcast": lambda: torch.randn(2, 3, 4),
    "smaller, broadcast": lambda: torch.randn(4),
    "another dtype": lambda: torch.randn(3, 4, dtype=torch.float64),
    "another layout": lambda: torch.randn(4, 3).t(),
    "a number of it": lambda: torch.tensor(2.0),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
}


@pytest.mark.parametrize("case", LATER)
def test_a_later_call_may_pass_anything(case: str) -> None:
    model = ForwardOfTwo(lambda m, x, y: m.linear(x) + y, linear=nn.Linear(4, 4)).eval()
    x = torch.randn(3, 4)

    fast = tried(OPERAND, randomize(model), (x, torch.randn(3, 4)), 1, (x, LATER[case]()))

    assert overwritten(fast) == [(add_over, 0)]


def test_autocast_may_give_the_operands_two_dtypes() -> None:
    model, x = activated(lambda m, x: m.linear(x) + m.norm(x)).float(), X[0].float()
    fast = optimized_by(OPERAND, model, x)

    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(x), fast(x)

    assert overwritten(fast) == [(add_over, 0)]
    assert expected.dtype == actual.dtype
    assert torch.equal(expected, actual)


OPERANDS_NEEDED = "its operands are needed elsewhere"
UNLIKE = "the operands differ in dtype, shape or layout"
SQUARE = "a gradient of a square needs its root"
SMALL = "its operands are too small for it to pay"
REFUSALS = {
    "inputs": (lambda m, x: x + x, OPERANDS_NEEDED),
    "a parameter": (lambda m, x: x * m.weight, OPERANDS_NEEDED),
    "a view": (lambda m, x: x + m.linear(x).view(3, 4), OPERANDS_NEEDED),
    "a second reader": (lambda m, x: (y := m.linear(x), x + y), OPERANDS_NEEDED),
    "a view that is read later": (
        lambda m, x: (y := m.linear(x), z := y[0], x + y, z), OPERANDS_NEEDED,
    ),
    "a result given by the caller": (
        lambda m, x: x * torch.add(x, 1.0, out=x.clone()), OPERANDS_NEEDED,
    ),
    "a square": (lambda m, x: (y := m.linear(x)) * y, SQUARE),
    "a broadcast": (lambda m, x: m.linear(x) + m.norm(x)[:1], UNLIKE),
    "another dtype": (lambda m, x: m.linear(x) + x.float(), UNLIKE),
    "another layout": (lambda m, x: m.linear(x) + x.t().contiguous().t(), UNLIKE),
}  # fmt: skip
NO_MATTER = texts(
    """
    x.reshape(x.shape[0] * x.shape[1] + 0); m.linear(x) * 2.0 + 1;
    torch.add(m.linear(x), m.other(x), alpha=2)
    """
)


@rows("forward outcome", REFUSALS, alike(0, NO_MATTER))
def test_operands(forward: Any, outcome: Any) -> None:
    tried(OPERAND, activated(forward), X, outcome)


def test_refuses_small_tensors() -> None:
    model = activated(lambda m, x: x + m.linear(x)).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse, "WORTHWHILE", 1 << 17)
        tried(OPERAND, model, (torch.randn(8191, 4),), SMALL)
        tried(OPERAND, model, (torch.randn(8192, 4),), 1)
