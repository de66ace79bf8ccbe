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
from optimizer.core.ops import add_over, mul_over
from optimizer.passes import fuse
from optimizer.passes.fuse import LinearReLU
from optimizer.testing import Optimize, assert_equivalent, inputs_like, randomize
from tests.conftest import address
from tests.single_pass import (
    Forward,
    ForwardOfTwo,
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


@pytest.fixture(autouse=True)
def small_tensors_are_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "WORTHWHILE", 1)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear has it
        return super().forward(input) * 2


class Negated(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return -weight


def model_of(forward: str, change: str = "pass") -> nn.Module:
    """A model of layers and two parameters, after a statement that changes it."""
    held: dict[str, Any] = {"linear": nn.Linear(4, 4), "other": nn.Linear(4, 4)}
    held |= {"norm": nn.LayerNorm(4), "relu": nn.ReLU(), "inplace": nn.ReLU(inplace=True)}
    held |= {"gelu": nn.GELU("tanh"), "leaky": nn.LeakyReLU(0.25), "negative": nn.LeakyReLU(-0.5)}
    held |= {"hardtanh": nn.Hardtanh(-0.25, 0.5), "relu6": nn.ReLU6(), "mish": nn.Mish()}
    held |= {"hardswish": nn.Hardswish(), "hardsigmoid": nn.Hardsigmoid(), "exact": nn.GELU()}
    held |= {"silu": nn.SiLU(), "silu_": nn.SiLU(inplace=True)}
    own = {"w": nn.Parameter(torch.empty(3, 4)), "b": nn.Parameter(torch.empty(3))}
    model: nn.Module = randomize(Forward(forward, **held, **own).double().eval())
    function_of("m", f"{change}; return m", Doubled=Doubled, Negated=Negated)(model)
    return model.double()


def assert_same_gradients(model: nn.Module, fast: Any, x: Tensor) -> None:
    found = []
    for each in (model, deepcopy(fast)):
        each(x).sum().backward()
        found.append([p.grad for p in each.parameters() if p.grad is not None])
    assert found[0]
    assert all(map(torch.equal, *found))


ALONE = {
    (LINEAR, (LinearReLU,)): """
    m.relu(m.linear(x)); m.inplace(m.linear(x)); m.relu(input=m.linear(input=x));
    F.relu(m.linear(x), inplace=True); F.relu(inplace=False, input=m.linear(x));
    F.relu_(m.linear(x)); torch.relu(input=m.linear(x)); torch.relu_(m.linear(x));
    m.linear(x).relu(); m.linear(x).relu_(); F.linear(x, m.w, m.b).relu(); F.linear(x, m.w).relu();
    F.relu(F.linear(input=x, bias=m.b, weight=m.w))
    """,
    (LINEAR, 2): "(m.linear(x).relu(), m.relu(m.linear(-x)))",
    (LINEAR, (LinearReLU, F.relu)): "m.linear(x).relu().relu()",
    (LINEAR, 0): "F.relu6(m.linear(x)); F.leaky_relu(m.linear(x)); m.negative(m.linear(x)).relu()",
    (LINEAR, "the layer's output is read elsewhere"): """
    (y := m.linear(x), F.relu(y)); (y := m.linear(x), m.inplace(y))[0] + y;
    (y := m.linear(x), z := y.t(), m.relu(y))[1] + z
    """,
    (ACTIVATION, 0): "m.silu_(m.linear(x)); F.silu(m.linear(x), True); m.linear(x).relu_()",
    (ACTIVATION, 1): "m.silu(m.linear(m.silu(x)))",
    (ACTIVATION, "a gradient needs the signs, which would not be kept"): """
    m.negative(m.linear(x))
    F.leaky_relu(m.linear(x), negative_slope=-0.5)
    F.leaky_relu(m.linear(x), 1 - x.shape[0])
    result = F.leaky_relu(m.linear(x), 0.5); result[result > 0] = 0.0; return result
    """,
    (ACTIVATION, "its input is needed elsewhere"): """
    F.silu(x); F.silu(m.w) + x; F.silu(m.linear(x).contiguous());
    F.silu(F.dropout(x, 0.5, False)); (y := m.linear(x)) + F.silu(y);
    ((y := m.linear(x)), (z := y.t()), F.silu(y))[1] + z; F.silu(torch.sigmoid(x));
    F.silu(torch.add(x, 1.0, out=x.clone()))
    """,
    (ACTIVATION, "its result may be laid out otherwise"): "F.silu(x[..., None, None] + 1)",
    (OPERAND, "its operands are needed elsewhere"): """
    x + x; x * m.w; x + m.linear(x).view(3, 4); (y := m.linear(x), x + y);
    x * torch.add(x, 1.0, out=x.clone())
    """,
    (OPERAND, "a gradient of a square needs its root"): "(y := m.linear(x)) * y",
    (OPERAND, "the operands differ in dtype, shape or layout"): """
    m.linear(x) + m.norm(x)[:1]; m.linear(x) + x.float(); m.linear(x) + x.t().contiguous().t()
    """,
    (OPERAND, 0): """
    m.linear(x) * 2.0 + 1; torch.add(m.linear(x), m.other(x), alpha=2)
    """,
}


@spelled(ALONE, cells="forward case")
def test_one_pass_alone(forward: str, case: Any) -> None:
    name, outcome = case
    ranks = [inputs_like([shape], "random", 0) for shape in ((4,), (2, 5, 4))]

    fast = tried(name, model_of(forward), X, outcome, *ranks * (outcome == (LinearReLU,)))

    if "signs" in str(outcome):
        fast(*X).sum().backward()  # raised an error


NO_PLAIN_LINEAR = {
    0: """
    m.linear = Doubled(4, 4); m.linear.forward = lambda x: F.linear(x, m.linear.weight) - 1;
    m.linear.register_forward_hook(lambda module, given, result: result - given[0]);
    nn.utils.parametrize.register_parametrization(m.linear, "weight", Negated())
    """,
    "the layer has tensors that no cast of it reaches": """
    w = m.linear.weight.detach(); del m.linear.weight; m.linear.weight = w; return m
    """,
}


@spelled(NO_PLAIN_LINEAR, cells="change outcome")
def test_a_layer_that_is_no_plain_linear_stays(change: str, outcome: Any) -> None:
    tried(LINEAR, model_of("m.linear(x).relu()", change), X, outcome)


def test_a_fused_layer_shares_its_weights_and_needs_no_example_inputs() -> None:
    model = model_of("m.relu(m.linear(x))")

    fast = optimized_by(LINEAR, model)

    (fused,) = layers_of(fast)
    assert address(fused.weight) == address(model.linear.weight)
    assert address(fused.bias) == address(model.linear.bias)
    assert_same_gradients(model, fast, *X)
    tried(LINEAR, model, (), [LinearReLU], X)


OVER = """
    m.relu(m.linear(x)); m.relu6(m.linear(x)); m.hardtanh(m.linear(x)); m.leaky(m.linear(x));
    m.silu(m.linear(x)); m.mish(m.linear(x)); m.hardswish(m.linear(x)); m.hardsigmoid(m.linear(x));
    m.exact(m.linear(x)); m.gelu(m.linear(x)); torch.relu(m.linear(x)); F.relu6(m.linear(x));
    F.hardtanh(m.linear(x), -0.5, max_val=0.25); F.leaky_relu(m.linear(x), negative_slope=0.25);
    F.leaky_relu(m.linear(x), 0.25, False); F.silu(m.linear(x)); F.hardswish(m.linear(x));
    F.mish(m.linear(x), inplace=False); F.hardsigmoid(m.linear(x)); F.gelu(m.linear(x));
    F.gelu(m.linear(x), approximate='tanh')
"""


@pytest.mark.parametrize("forward", texts(OVER))
def test_every_activation_writes_over_its_input(forward: str) -> None:
    model, (x,) = model_of(forward), X

    fast = tried(ACTIVATION, model, (LARGE,), 1, (x[:2],))
    with torch.no_grad():
        measured = optimizer.measure(fast, LARGE, repeats=1, warmup=1)

    assert measured.peak_memory <= LARGE.nbytes
    assert_same_gradients(model, fast, x)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert_equivalent(model.to(dtype), fast.to(dtype), (x.to(dtype),), exact=True)


def test_a_module_of_a_module_stays_for_its_other_calls() -> None:
    inner = nn.Sequential(nn.LeakyReLU(0.5), nn.Hardtanh())
    model = Forward("(first := m.inner(x + 1), m.inner(first))", inner=inner).eval()
    x = torch.linspace(-4, 4, 6, dtype=torch.float64)

    assert_equivalent(model, Optimize(only=("reuse_activations",))(model, (x,)), (x,))


def overwritten(fast: Any) -> list[Any]:
    """For each combination in place: the function, and which operand it overwrites."""
    made = [node for node in fast.graph.nodes if node.target in (add_over, mul_over)]
    return [(node.target, node.args[2]) for node in made]


SUMS = {
    ((add_over, 1),): "x + m.linear(x)",
    ((add_over, 0),): "torch.add(m.linear(x), x); m.linear(x) + m.other(x); (y := m.linear(x)) + y",
    ((mul_over, 1),): "x.sigmoid() * m.linear(x)",
    ((mul_over, 0), (add_over, 1)): "x + torch.mul(m.linear(x), m.norm(x))",
}


@spelled(SUMS)
def test_overwrites_the_operand_that_is_not_needed(forward: str, outcome: Any) -> None:
    model = model_of(forward)

    fast = tried(OPERAND, model, X, len(outcome), *[inputs_like([(2, 5, 4)], "random", 0)])

    assert overwritten(fast) == list(outcome)
    assert_equivalent(model, pickle.loads(pickle.dumps(fast)), X, exact=True)
    assert_same_gradients(model, fast, *X)


# Of a larger or a smaller batch, another dtype or layout, one number, expanded.
LATER = """
    torch.randn(2, 3, 4); torch.randn(4); torch.randn(3, 4).double(); torch.randn(4, 3).t();
    torch.tensor(2.0); torch.randn(3, 1).expand(3, 4)
"""


@pytest.mark.parametrize("later", texts(LATER))
def test_a_later_call_may_pass_anything(later: str) -> None:
    model = ForwardOfTwo("m.linear(x) + z", linear=nn.Linear(4, 4)).eval()
    x = torch.randn(3, 4)

    tried(OPERAND, randomize(model), (x, torch.randn(3, 4)), 1, (x, eval(later)))


def test_autocast_may_give_the_operands_two_dtypes() -> None:
    model, x = model_of("m.linear(x) + m.norm(x)").float(), X[0].float()
    fast = optimized_by(OPERAND, model, x)

    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(x), fast(x)

    assert overwritten(fast) == [(add_over, 0)]
    assert expected.dtype == actual.dtype
    assert torch.equal(expected, actual)


def test_refuses_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "WORTHWHILE", 1 << 17)
    model, small = model_of("x + m.linear(x)"), "its operands are too small for it to pay"

    tried(OPERAND, model, (torch.randn(4095, 4).double(),), small)
    tried(OPERAND, model, (torch.randn(4096, 4).double(),), 1)
