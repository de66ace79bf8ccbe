"""A Linear with its ReLU, and what is written over an operand that nobody else needs."""

from __future__ import annotations

import pickle
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
    callees,
    function_of,
    layers_of,
    optimized_by,
    spelled,
    texts,
    tried,
)

LINEAR, ACTIVATION, OPERAND = "fuse_linear_relu", "reuse_activations", "reuse_operands"
X = inputs_like([(3, 4)], "random", 0)
LARGE = torch.randn(64, 3, 4, dtype=torch.float64)
HALVES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def small_tensors_are_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "WORTHWHILE", 1)


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


def model_of(forward: str, activation: nn.Module | None = None) -> nn.Module:
    """A model of a few layers, two parameters, and an activation of its own."""
    held = {"linear": nn.Linear(4, 4), "other": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    held |= {"relu": nn.ReLU(), "inplace": nn.ReLU(inplace=True)}
    own = {"w": nn.Parameter(torch.empty(3, 4)), "b": nn.Parameter(torch.empty(3))}
    return randomize(Forward(forward, activation=activation, **held, **own).double().eval())


PLAIN = "m.relu(m.linear(x))"
FUSED = f"""
    {PLAIN}; m.inplace(m.linear(x)); m.relu(input=m.linear(input=x));
    F.relu(m.linear(x)); F.relu(m.linear(x), inplace=True);
    F.relu(inplace=False, input=m.linear(x)); F.relu_(m.linear(x)); torch.relu(m.linear(x));
    torch.relu(input=m.linear(x)); torch.relu_(m.linear(x)); m.linear(x).relu();
    m.linear(x).relu_(); F.linear(x, m.w, m.b).relu(); F.linear(x, m.w).relu();
    F.relu(F.linear(input=x, bias=m.b, weight=m.w))
"""


@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 5, 4)])
@spelled({(LinearReLU,): FUSED})
def test_fuses_every_spelling_at_every_rank(forward: str, outcome: Any, shape: Any) -> None:
    tried(LINEAR, model_of(forward), inputs_like([shape], "random", 0), outcome)


@pytest.mark.parametrize("dtype", HALVES)
def test_keeps_the_bits_in_every_dtype(dtype: torch.dtype) -> None:
    tried(LINEAR, model_of(PLAIN).to(dtype), (X[0].to(dtype),), [LinearReLU])


def test_shares_the_weight_of_the_layer_and_its_gradients_and_needs_no_example_inputs() -> None:
    model = model_of(PLAIN)

    fast = optimized_by(LINEAR, model)

    (fused,) = layers_of(fast)
    assert address(fused.weight) == address(model.linear.weight)
    assert address(fused.bias) == address(model.linear.bias)
    assert_same_gradients(model, fast, *X)
    tried(LINEAR, model, (), [LinearReLU], X)


def test_repeats_the_fusion_after_a_batchnorm_was_folded() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, eps=0.125), nn.ReLU())
    randomize(model.double().eval())

    fast = optimizer.optimize(model, X, check=None, level=1)

    assert callees(fast)[-1:] == [LinearReLU]
    assert nn.BatchNorm1d not in callees(fast)
    assert_equivalent(model, fast, X)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
        return super().forward(input) * 2


class Negated(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return -weight


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, given, result: result - given[0])
    return layer


def overridden(linear: Any) -> nn.Module:
    linear.forward = lambda x: F.linear(x, linear.weight) - 1
    return linear  # type: ignore[no-any-return]


def with_a_plain_tensor(linear: Any) -> nn.Module:
    weight = linear.double().weight.detach().clone()
    del linear.weight
    linear.weight = weight
    return linear  # type: ignore[no-any-return]


NO_PLAIN_LINEAR = {
    0: """
    Doubled(4, 4); hooked(nn.Linear(4, 4)); overridden(nn.Linear(4, 4));
    nn.utils.parametrize.register_parametrization(nn.Linear(4, 4), "weight", Negated())
    """,
    "the layer has tensors that no cast of it reaches": "with_a_plain_tensor(nn.Linear(4, 4))",
}


@spelled(NO_PLAIN_LINEAR, cells="layer outcome")
def test_a_layer_that_is_no_plain_linear_is_left_alone(layer: str, outcome: Any) -> None:
    tried(LINEAR, randomize(nn.Sequential(eval(layer), nn.ReLU()).double().eval()), X, outcome)


ACTIVATIONS = texts(
    """
    nn.ReLU(); nn.ReLU6(); nn.Hardtanh(-0.25, 0.5); nn.LeakyReLU(0.25); nn.SiLU(); nn.Mish();
    nn.Hardswish(); nn.Hardsigmoid(); nn.GELU(); nn.GELU("tanh")
    """
)
FUNCTIONS = """
    torch.relu(m.linear(x)); m.linear(x).relu(); F.relu6(m.linear(x));
    F.hardtanh(m.linear(x), -0.5, max_val=0.25); F.leaky_relu(m.linear(x), negative_slope=0.25);
    F.leaky_relu(m.linear(x), 0.25, False); F.silu(m.linear(x));
    F.mish(m.linear(x), inplace=False); F.hardswish(m.linear(x)); F.hardsigmoid(m.linear(x));
    F.gelu(m.linear(x)); F.gelu(m.linear(x), approximate='tanh')
"""


def holds_its_input(fast: Any, x: Tensor) -> bool:
    """Whether one call allocates no more than one tensor of the size of its output."""
    with torch.no_grad():
        measured = optimizer.measure(fast, x, repeats=1, warmup=1)
        return measured.peak_memory <= fast(x).untyped_storage().nbytes()


# Without example inputs nobody knows whether the result of a leaky_relu is written later.
@pytest.mark.parametrize(
    ("layer", "examples"),
    [
        (each, known)
        for each in ACTIVATIONS
        for known in (True, False)
        if known or "Leaky" not in each
    ],
)
def test_every_module_writes_over_its_input(layer: str, examples: bool) -> None:
    model = model_of("m.activation(m.linear(x))", function_of("", layer)())

    fast = tried(ACTIVATION, model, (LARGE,) if examples else (), 1, (LARGE,))

    assert holds_its_input(fast, LARGE)
    assert not getattr(model.activation, "inplace", False)


@spelled({1: FUNCTIONS})
def test_every_function_writes_over_its_input(forward: str, outcome: int) -> None:
    model, (x,) = model_of(forward), X

    fast = tried(ACTIVATION, model, (LARGE,), outcome, (x[:2],))

    assert holds_its_input(fast, LARGE)
    assert_same_gradients(model, fast, x)
    for dtype in HALVES:
        assert_equivalent(model.to(dtype), fast.to(dtype), (x.to(dtype),), exact=True)


WRITTEN_OVER = {
    (0, nn.SiLU(inplace=True)): """
    m.activation(m.linear(x)); F.silu(m.linear(x), True); m.linear(x).relu_()
    """,
    (1, nn.SiLU()): "m.activation(m.linear(m.activation(x)))",
    (0, hooked(nn.SiLU())): "m.activation(m.linear(x))",
    ("a gradient needs the signs, which would not be kept", nn.LeakyReLU(-0.5)): """
    m.activation(m.linear(x))
    F.leaky_relu(m.linear(x), -0.5)
    F.leaky_relu(m.linear(x), negative_slope=-0.5)
    F.leaky_relu(m.linear(x), 1 - x.shape[0])
    result = F.leaky_relu(m.linear(x), 0.5); result[result > 0] = 0.0; return result
    """,
}


@spelled(WRITTEN_OVER, cells="forward case")
def test_activations(forward: str, case: Any) -> None:
    outcome, activation = case

    fast = tried(ACTIVATION, model_of(forward, activation), X, outcome)

    fast(*X).sum().backward()  # raised an error


def test_a_module_of_a_module_stays_for_its_other_calls() -> None:
    inner = nn.Sequential(nn.LeakyReLU(0.5), nn.Hardtanh())
    model = Forward("(first := m.inner(x + 1), m.inner(first))", inner=inner).eval()
    x = torch.linspace(-4, 4, 6, dtype=torch.float64)

    assert_equivalent(model, Optimize(only=("reuse_activations",))(model, (x,)), (x,))


def overwritten(fast: Any) -> list[Any]:
    """For each combination in place: the function, and which operand it overwrites."""
    made = [node for node in fast.graph.nodes if node.target in (add_over, mul_over)]
    return [(callee(node), node.args[2]) for node in made]


SUMS = {
    ((add_over, 1),): "x + m.linear(x); torch.add(x, m.linear(x))",
    ((add_over, 0),): """
    m.linear(x) + x; m.linear(x) + m.other(x); (y := m.linear(x)) + y
    """,
    ((mul_over, 1),): "x.sigmoid() * m.linear(x)",
    ((mul_over, 0),): "torch.mul(m.linear(x), x)",
    ((mul_over, 0), (add_over, 1)): "x + m.linear(x) * m.norm(x)",
}


@spelled(SUMS)
def test_overwrites_the_operand_that_is_not_needed(forward: str, outcome: Any) -> None:
    model = model_of(forward)

    fast = tried(OPERAND, model, X, len(outcome), *[inputs_like([(2, 5, 4)], "random", 0)])

    assert overwritten(fast) == list(outcome)
    assert_equivalent(model, pickle.loads(pickle.dumps(fast)), X, exact=True)
    assert_same_gradients(model, fast, *X)


# Alike, of a larger or a smaller batch, another dtype or layout, one number, expanded.
LATER = """
    torch.randn(3, 4); torch.randn(2, 3, 4); torch.randn(4); torch.randn(3, 4).double();
    torch.randn(4, 3).t(); torch.tensor(2.0); torch.randn(3, 1).expand(3, 4)
"""


@pytest.mark.parametrize("later", texts(LATER))
def test_a_later_call_may_pass_anything(later: str) -> None:
    model = ForwardOfTwo("m.linear(x) + z", linear=nn.Linear(4, 4)).eval()
    x = torch.randn(3, 4)

    fast = tried(OPERAND, randomize(model), (x, torch.randn(3, 4)), 1, (x, eval(later)))

    assert overwritten(fast) == [(add_over, 0)]


def test_autocast_may_give_the_operands_two_dtypes() -> None:
    model, x = model_of("m.linear(x) + m.norm(x)").float(), X[0].float()
    fast = optimized_by(OPERAND, model, x)

    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(x), fast(x)

    assert overwritten(fast) == [(add_over, 0)]
    assert expected.dtype == actual.dtype
    assert torch.equal(expected, actual)


SMALL = "its operands are too small for it to pay"
ALONE = {
    (LINEAR, 2): "(m.linear(x).relu(), m.relu(m.linear(-x)))",
    (LINEAR, (LinearReLU, F.relu)): "m.linear(x).relu().relu()",
    (LINEAR, "the layer's output is read elsewhere"): """
    (y := m.linear(x), F.relu(y)); (y := m.linear(x)) - m.relu(y);
    (y := m.linear(x), m.inplace(y))[0] + y; (y := m.linear(x), z := y.t(), m.relu(y))[1] + z
    """,
    (ACTIVATION, "its input is needed elsewhere"): """
    F.silu(x); F.silu(m.w) + x; F.silu(x.t()); F.silu(m.linear(x).contiguous());
    F.silu(F.dropout(x, 0.5, False)); ((y := m.linear(x)), F.silu(y));
    (y := m.linear(x)) + F.silu(y); ((y := m.linear(x)), (z := y.t()), F.silu(y))[1] + z;
    F.silu(torch.add(x, 1.0, out=x.clone())); F.silu(torch.sigmoid(x))
    """,
    (ACTIVATION, "its result may be laid out otherwise"): "F.silu(x[..., None, None] + 1)",
    (OPERAND, "its operands are needed elsewhere"): """
    x + x; x * m.w; x + m.linear(x).view(3, 4); (y := m.linear(x), x + y);
    (y := m.linear(x), z := y[0], x + y, z); x * torch.add(x, 1.0, out=x.clone())
    """,
    (OPERAND, "a gradient of a square needs its root"): "(y := m.linear(x)) * y",
    (OPERAND, "the operands differ in dtype, shape or layout"): """
    m.linear(x) + m.norm(x)[:1]; m.linear(x) + x.float(); m.linear(x) + x.t().contiguous().t()
    """,
    (OPERAND, 0): """
    x.reshape(x.shape[0] * x.shape[1] + 0); m.linear(x) * 2.0 + 1;
    torch.add(m.linear(x), m.other(x), alpha=2)
    """,
}


@spelled(ALONE, cells="forward case")
def test_one_pass_alone(forward: str, case: Any) -> None:
    name, outcome = case
    tried(name, model_of(forward), X, outcome)


def test_one_place_is_laid_out_as_the_models_is() -> None:
    """A convolution keeps the strides that a pool gives one place; a new tensor does not."""
    layers = {"conv": nn.Conv2d(4, 4, 1), "pool": nn.AdaptiveAvgPool2d(1)}
    model = randomize(
        Forward("y = F.relu(m.pool(m.conv(x))); return torch.cat([y, y], -1)", **layers)
    )
    x = torch.randn(2, 4, 4, 4).contiguous(memory_format=torch.channels_last)
    fast = optimizer.optimize(model.eval(), x, level=1)

    assert fast.report.counts() == {"sink_convolutions": 1}
    assert fast(x).stride() == model(x).stride()


def test_refuses_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "WORTHWHILE", 1 << 17)
    model = model_of("x + m.linear(x)").float()

    tried(OPERAND, model, (torch.randn(8191, 4),), SMALL)
    tried(OPERAND, model, (torch.randn(8192, 4),), 1)
