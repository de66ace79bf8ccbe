"""A Linear with its ReLU, and what is written over an operand that nothing else needs."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.conftest import address
from tests.internals import LinearReLU, add_over, fuse, mul_over
from tests.single_pass import Forward, ForwardOfTwo, layers_of, optimized_by, spelled, texts, tried

LINEAR, ACTIVATION, OPERAND = "fuse_linear_relu", "reuse_activations", "reuse_operands"
X = inputs_like([(3, 4)], "random", 0)
LATER = [inputs_like([shape], "random", 0) for shape in ((4,), (2, 5, 4))]
LARGE = torch.randn(64, 3, 4, dtype=torch.float64)


@pytest.fixture(autouse=True)
def small_tensors_are_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "WORTHWHILE", 1)


def model_of(forward: str) -> nn.Module:
    """Layers and parameters, of which the weight of one layer is no parameter."""
    held: dict[str, Any] = {"linear": nn.Linear(4, 4), "plain": nn.Linear(4, 4)}
    held |= {"norm": nn.LayerNorm(4), "inplace": nn.ReLU(inplace=True)}
    held |= {"silu_": nn.SiLU(inplace=True), "negative": nn.LeakyReLU(-0.5)}
    own = {"w": nn.Parameter(torch.empty(3, 4)), "b": nn.Parameter(torch.empty(3))}
    model: Any = Forward(forward, **held, **own).double().eval()
    del model.plain.weight
    model.plain.weight = torch.ones(4, 4, dtype=torch.float64)
    return randomize(model)


def assert_same_gradients(model: nn.Module, fast: Any, x: Tensor) -> None:
    found = []
    for each in (model, deepcopy(fast)):
        each(x).sum().backward()
        found.append([p.grad for p in each.parameters() if p.grad is not None])
    assert found[0]
    assert all(map(torch.equal, *found))


# See also the motifs.
ALONE = {
    (LINEAR, (LinearReLU,)): """
    F.relu(inplace=False, input=m.linear(input=x)); torch.relu_(m.linear(x));
    F.relu(F.linear(input=x, bias=m.b, weight=m.w))""",
    (LINEAR, 2): "(m.linear(x).relu(), F.relu(m.linear(-x)))",
    (LINEAR, 0): "F.relu6(m.linear(x)); m.negative(m.linear(x)).relu()",
    (LINEAR, "the layer's output is read elsewhere"): "(y := m.linear(x), m.inplace(y))[0] + y",
    (LINEAR, "the layer has tensors that no cast of it reaches"): "m.plain(x).relu()",
    (ACTIVATION, 0): "m.silu_(m.linear(x))",
    (ACTIVATION, 1): "F.silu(m.linear(F.silu(x)))",
    (ACTIVATION, "a gradient needs the signs, which would not be kept"): """
    m.negative(m.linear(x))
    F.leaky_relu(m.linear(x), 1 - x.shape[0])
    result = F.leaky_relu(m.linear(x), 0.5); result[result > 0] = 0.0; return result""",
    (ACTIVATION, "its input is needed elsewhere"): """
    F.silu(m.w) + x; F.silu(torch.einsum('ij->ji', x)); F.silu(torch.add(x, 1.0, out=x.clone()))""",
    (ACTIVATION, "its result may be laid out otherwise"): "F.silu(x[..., None, None] + 1)",
    (OPERAND, "its operands are needed elsewhere"): "x * m.w; (y := m.linear(x), x + y)",
    (OPERAND, "a gradient of a square needs its root"): "(y := m.linear(x)) * y",
    (OPERAND, "the operands differ in dtype, shape or layout"): """
    m.linear(x) + m.norm(x)[:1]; m.linear(x) + x.float(); m.linear(x) + x.t().contiguous().t()""",
    (OPERAND, 0): "torch.add(m.linear(x), m.norm(x), alpha=2)",
}


@spelled(ALONE, cells="forward case")
def test_one_pass_alone(forward: str, case: Any) -> None:
    name, outcome = case

    fast = tried(name, model_of(forward), X, outcome, *LATER * (outcome == (LinearReLU,)))

    if "signs" in str(outcome):
        fast(*X).sum().backward()  # raised an error


def test_a_fused_layer_shares_its_weights_and_needs_no_example_inputs() -> None:
    model = model_of("m.inplace(m.linear(x))")

    fast = optimized_by(LINEAR, model)

    (fused,) = layers_of(fast)
    assert address(fused.weight) == address(model.linear.weight)
    assert address(fused.bias) == address(model.linear.bias)
    assert_same_gradients(model, fast, *X)
    tried(LINEAR, model, (), [LinearReLU], X)


OVER = """
    nn.ReLU6(); nn.Hardtanh(-0.25, 0.5); nn.LeakyReLU(0.25); nn.SiLU(); nn.Mish(); nn.Hardswish();
    nn.Hardsigmoid(); nn.GELU("tanh"); Forward("F.hardtanh(x, -0.5, max_val=0.25)");
    Forward("F.leaky_relu(x, negative_slope=0.25)"); Forward("F.mish(x, inplace=False)");
    Forward("torch.relu(x)")"""


@pytest.mark.parametrize("activation", texts(OVER))
def test_every_activation_writes_over_its_input(activation: str) -> None:
    (x,), layers = X, nn.Sequential(nn.Linear(4, 4), eval(activation))
    model = randomize(layers.double().eval())

    fast = tried(ACTIVATION, model, (LARGE,), 1, (x[:2],))
    with torch.no_grad():
        measured = optimizer.measure(fast, LARGE, repeats=1, warmup=1)

    assert measured.peak_memory <= LARGE.nbytes
    assert_same_gradients(model, fast, x)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert_equivalent(model.to(dtype), fast.to(dtype), (x.to(dtype),), exact=True)


# For each combination in place: the function, and which operand it overwrites.
SUMS = {
    ((add_over, 1),): "x + m.linear(x)",
    ((add_over, 0),): "torch.add(m.linear(x), x); (y := m.linear(x)) + y",
    ((mul_over, 0), (add_over, 1)): "x + torch.mul(m.linear(x), m.norm(x))",
}


@spelled(SUMS)
def test_overwrites_the_operand_that_is_not_needed(forward: str, outcome: Any) -> None:
    model = model_of(forward)

    fast = tried(OPERAND, model, X, len(outcome), LATER[1])

    made = [node for node in fast.graph.nodes if node.target in (add_over, mul_over)]
    assert [(node.target, node.args[2]) for node in made] == list(outcome)
    assert_equivalent(model, pickle.loads(pickle.dumps(fast)), X, exact=True)
    assert_same_gradients(model, fast, *X)


# Of a larger or a smaller batch, another dtype or layout, expanded.
OTHERS = """
    torch.randn(2, 3, 4); torch.randn(4); torch.randn(3, 4).double(); torch.randn(4, 3).t();
    torch.randn(3, 1).expand(3, 4)"""


@pytest.mark.parametrize("later", texts(OTHERS))
def test_a_later_call_may_pass_anything(later: str) -> None:
    model, x = ForwardOfTwo("m.linear(x) + z", linear=nn.Linear(4, 4)).eval(), torch.randn(3, 4)

    tried(OPERAND, randomize(model), (x, torch.randn(3, 4)), 1, (x, eval(later)))


def test_refuses_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "WORTHWHILE", 1 << 17)
    model, small = model_of("x + m.linear(x)"), "its operands are too small for it to pay"

    tried(OPERAND, model, (torch.randn(4095, 4).double(),), small)
    tried(OPERAND, model, (torch.randn(4096, 4).double(),), 1)
