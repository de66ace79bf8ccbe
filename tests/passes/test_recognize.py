"""What is spelled out becomes one call: an activation, attention, or a Linear."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import assert_equivalent
from tests.conftest import address
from tests.single_pass import (
    Forward,
    ForwardOfThree,
    ForwardOfTwo,
    assert_outcome,
    callees,
    layers_of,
    optimized_by,
    spelled,
    tried,
)

ACTIVATION, ATTENTION, LINEAR = "recognize_activations", "recognize_attention", "recognize_linear"
ELSEWHERE = "what it computes on the way is read elsewhere"
WRITTEN = "its input is written later"
attend = F.scaled_dot_product_attention
LAYERS = {"relu6": nn.ReLU6(inplace=True), "hardtanh": nn.Hardtanh(0.0, 6.0)}
LAYERS |= {"sigmoid": nn.Sigmoid(), "tanh": nn.Tanh()}
VALUES = torch.cat([torch.linspace(-12, 12, 200), torch.tensor([0.0, -0.0])]).double()
# See also the motifs.
ACTIVATIONS: dict[Any, str] = {
    (F.silu,): "m.sigmoid(x) * x; x.sigmoid().mul_(x)",
    (F.hardswish,): """
    x * (m.relu6(x + 3.0) / 6.0)
    F.hardsigmoid(x) * x
    x * (x + 3).clamp(min=0, max=6) * (1 / 6)
    y = x + 3; y = y.clamp_(0, 6); y /= 6; return y.mul_(x)""",
    (F.hardsigmoid,): """
    torch.clamp(max=6, min=0, input=x.add(3.0)).div(6); m.hardtanh(x + 3) / 6;
    F.relu6(x + 4 - 1) / 6""",
    (F.gelu,): """
    0.5 * x * (1 + m.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))""",
    ELSEWHERE: """
    gate = torch.sigmoid(x); return (x * gate, gate)
    moved = x + 3; clamped = moved.clamp_(0, 6); return x * clamped / 6 + moved
    return x.add_(3).clamp_(0, 6).div_(6)""",
    WRITTEN: "y = x * 2; gate = torch.sigmoid(y); y.add_(1.0); return y * gate",
    "the result would differ in layout": """
    (y := x.as_strided((1, 3, 4), (1, 2, 0))) * F.hardsigmoid(y)""",
    "its input is not floating point": "y = x.long(); return y * torch.sigmoid(y)",
    # What only looks alike, and a spelling of more than twelve calls
    0: f"""
    y = x * 1; gate = y.sigmoid_(); return y * gate
    y = x * 0.5; z = y.mul_(-1.0); return y * 2 * torch.sigmoid(z * -2)
    x * torch.sigmoid(1.702 * x); x * x.flip(0).sigmoid(); x * F.relu6(x + 3) / 5;
    x * (x + 3).clamp(0, 6) // 6; torch.add(x, 3, alpha=2).clamp(0, 6) / 6; F.hardtanh(x + 3) / 6;
    0.5 * x * (1 + torch.erf(x / math.sqrt(2.0))); x * F.relu6(x + 3) * 0.1666667;
    x * torch.sigmoid(x.clamp(min=-100)); x / 0; x * torch.sigmoid(x{" * 1" * 11})""",
}


@spelled(ACTIVATIONS)
def test_activations(forward: str, outcome: Any) -> None:
    model = Forward(forward, **LAYERS).eval()

    fast = tried(ACTIVATION, model, (VALUES,), outcome, (VALUES.reshape(2, -1, 1),))

    if isinstance(outcome, tuple):
        huge = [1e30, -1e30] * (outcome != (F.gelu,))
        specials = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, *huge] * 8)
        torch.testing.assert_close(fast(specials), model(specials), equal_nan=True)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            optimizer.check(model, fast, (VALUES.to(dtype),))


def test_a_long_run_of_products_is_looked_at_in_no_time() -> None:
    tried(ACTIVATION, Forward("x = x * x;" * 60 + "return x").eval(), (VALUES,), 0)


SHAPE = (2, 3, 5, 8)


def attention(forward: str) -> nn.Module:
    bias = torch.ones(5, 5, dtype=torch.float64)
    layers = {"softmax": nn.Softmax(dim=-1), "dropout": nn.Dropout(0.5)}
    return ForwardOfThree(forward, bias=bias, **layers).eval()


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape, dtype=dtype) for shape in shapes or [SHAPE] * 3)


PLAIN = "torch.softmax(q @ k.permute(0, 1, 3, 2), 3) @ v"
SCALED = "(q @ k.mT / math.sqrt(k.size(-1))).softmax(-1) @ v"
DROPPED = "m.dropout(F.softmax(q @ k.mT, -1)) @ v"
SLOWER, FOUR = "torch has no faster kernel for it", "it has not four dimensions"
HALF = torch.bfloat16
# The outcome, the dtype and the shapes of q, k and v
ATTENTIONS: dict[Any, str] = {
    (1,): f"""
    {PLAIN}; {SCALED}; m.softmax(2.0 * (q * 0.3 @ (k.mT / 4) * -3)) @ v;
    torch.matmul(torch.softmax(input=torch.div(torch.matmul(q, k.mT), 4.0), dim=-1), v);
    q.matmul(k.mT).mul(0.3).softmax(-1).matmul(v); (q @ k.mT).softmax(-1) @ v + q * k.mean() - v""",
    (1, HALF, *[(1, 4, 64, 8)] * 3): PLAIN,
    (1, torch.float32, *[(1, 4, 65, 8)] * 3): PLAIN,
    (0,): """
    torch.relu(q).softmax(-1) @ v.mT; (q @ k.mT * m.bias).softmax(-1) @ v;
    (2.0 / (q @ k.mT)).softmax(-1) @ v; (q @ k.mT / 0).softmax(-1) @ v;
    v.mT @ (q @ k.mT).softmax(-1); torch.matmul(torch.softmax(q @ k.mT, -1), other=v);
    torch.softmax(torch.matmul(q, other=k.mT), -1) @ v""",
    ("a mask may hide all keys from a query",): "(q @ k.mT + m.bias).softmax(-1) @ v",
    ("its softmax is over another axis or dtype",): """
    (q @ k.mT).softmax(-2) @ v; (q @ k.mT).softmax(-1, dtype=torch.float64) @ v""",
    (ELSEWHERE,): """
    weights = (q @ k.mT).softmax(-1); return (weights @ v, weights)
    scores = q @ k.mT; scores.tanh_(); return scores.softmax(-1) @ v""",
    (WRITTEN,): "weights = (q @ k.mT).softmax(-1); q.mul_(2.0); return weights @ v",
    ("its result is written",): "((q @ k.mT).softmax(-1) @ v).mul_(2.0)",
    (FOUR, torch.float64, *[SHAPE[1:]] * 3): "(q @ k.mT).softmax(2) @ v",
    (SLOWER, torch.float64, SHAPE, SHAPE, (2, 3, 5, 4)): PLAIN,  # heads of two sizes
    (SLOWER, torch.float64, SHAPE, (2, 1, 5, 8), (2, 1, 5, 8)): PLAIN,  # keys that are broadcast
    (SLOWER, torch.float64, *[(2, 3, 8, 8)] * 3): "(q @ k).softmax(-1) @ v",  # keys in columns
    (SLOWER, HALF, *[(1, 4, 65, 8)] * 3): PLAIN,  # much in half precision
    (SLOWER, torch.float64, *[(1, 1, 5, 8)] * 3): PLAIN,  # later (1, 0) and (0, 1) may meet
}


@spelled(ATTENTIONS, cells="forward case")
def test_attention(forward: str, case: Any) -> None:
    outcome, dtype, *shapes = case if len(case) > 1 else (*case, torch.float64)
    inputs, model = tensors(*shapes, dtype=dtype), attention(forward)

    fast = optimized_by(ATTENTION, model, *inputs)

    assert_outcome(ATTENTION, fast, outcome)
    assert callees(fast).count(attend) == (outcome == 1)
    if dtype == torch.float64:
        assert_equivalent(model, fast, inputs, exact=outcome != 1)
    if outcome == 1:
        optimizer.check(model, fast, inputs)


LATER = {
    "other sizes, one query": ((7, 2, 1, 4), (7, 2, 65, 4), (7, 2, 65, 4)),
    "no keys": ((1, 1, 3, 8), (1, 1, 0, 8), (1, 1, 0, 8)),
    "keys and queries that are broadcast": ((2, 3, 5, 8), (1, 1, 5, 8), (1, 3, 5, 8)),
}


@pytest.mark.parametrize("case", LATER)
def test_holds_in_later_calls(case: str) -> None:
    fast = optimized_by(ATTENTION, attention(SCALED), *tensors())
    for dtype in (torch.bfloat16, torch.float64):
        later = tensors(*LATER[case], dtype=dtype)

        optimizer.check(attention(SCALED), fast, later)
        assert fast(*later).is_contiguous()


@pytest.mark.parametrize("forward", [SCALED, DROPPED])
def test_autocast_changes_nothing_but_rounding(forward: str) -> None:
    inputs = tensors(dtype=torch.float32)
    fast: Any = optimizer.optimize(attention(forward), inputs, level=1)

    with torch.autocast("cpu", torch.bfloat16):
        expected, result = attention(forward)(*inputs), fast(*inputs)

    assert attend in callees(fast)
    torch.testing.assert_close(result, expected, atol=0.05, rtol=0.0)


def test_its_strides_and_gradients_are_the_models_and_it_pickles_and_exports() -> None:
    inputs = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors())
    learning, model = [x.requires_grad_() for x in tensors()], attention(SCALED)
    fast = tried(ATTENTION, model, inputs, 1)
    exported = torch.export.export(fast, inputs).module()

    found, expected = (
        torch.autograd.grad(f(*learning).exp().sum(), learning) for f in (fast, model)
    )

    assert all(map(torch.allclose, found, expected))
    for copied in (exported, pickle.loads(pickle.dumps(fast))):
        assert torch.equal(copied(*inputs), fast(*inputs))


def test_a_number_that_is_an_argument_may_be_a_tensor_in_a_later_call() -> None:
    x, bias = torch.randn(2, 3, 5, 5), torch.randn(5, 5)
    model = ForwardOfTwo("(x @ x.mT * z).softmax(-1) @ x").eval()

    fast: Any = optimizer.optimize(model, (x, 2.0), check=None, level=1)

    assert torch.equal(fast(x, bias), model(x, bias))


# Linears of matrices, and of any rank
PRODUCTS: dict[Any, str] = {
    (nn.Linear,): """
    m.bias.addmm(x, m.weight.T); x.mm(m.weight.t()); torch.addmm(m.bias, x, m.untransposed)""",
    (nn.Linear, "any rank"): """
    x @ m.weight.transpose(0, 1); x @ m.untransposed; torch.matmul(x, m.weight.permute(-1, 0));
    x @ m.square; x @ m.square.transpose(1, 1)""",
    0: """
    x @ x.mT; m.weight @ x.mT; x @ (m.weight * 2.0).t(); x @ m.weight.transpose(0, x.dim() - 1);
    torch.addmm(m.bias * 2.0, x, m.weight.t())""",
    "its terms are scaled, or the result is written elsewhere": """
    torch.addmm(m.bias, x, m.weight.t(), beta=2.0)""",
    "the model's tensor is no matrix": "x @ m.vector",
    "what is added is no bias, one number for each output": """
    torch.addmm(m.square, x, m.square.t())""",
    "the forward may write the matrix": """
    y = x @ m.untransposed; m.untransposed.mul_(2.0); return y + m.untransposed.sum()""",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@spelled(PRODUCTS)
def test_products(forward: str, outcome: Any, dtype: torch.dtype) -> None:
    shapes = {"weight": (5, 4), "bias": (5,), "vector": (4,), "square": (4, 4)}
    own: Any = {name: nn.Parameter(torch.randn(each)) for name, each in shapes.items()}
    model = Forward(forward, untransposed=torch.randn(4, 5), **own).eval().to(dtype)
    later = [(1, 4), (0, 4)]
    if "any rank" in (outcome or ()):
        outcome, later = outcome[:1], [*later, (4,), (2, 3, 1, 4)]
    inputs = (torch.randn(4, 4, dtype=dtype),)
    calls = [(torch.randn(shape, dtype=dtype),) for shape in later]

    for linear in layers_of(optimized_by(LINEAR, model, *inputs)):
        places = [address(each) for each in (model.weight, model.square)]
        assert address(linear.weight) in places or "untransposed" in forward
        assert linear.bias is None or address(linear.bias) == address(model.bias)
    tried(LINEAR, model, inputs, outcome, *calls * isinstance(outcome, tuple))


@pytest.mark.parametrize("learns", [True, False])
def test_the_kernel_is_the_same_for_every_layout(learns: bool) -> None:
    x, matrix = torch.randn(4, 3, 2, 64), nn.Parameter(torch.randn(64, 48), requires_grad=learns)
    model = Forward("x @ m.matrix", matrix=matrix).eval()

    fast = tried(LINEAR, model, (x,), [nn.Linear], (x.permute(2, 1, 0, 3),))

    assert [linear.weight.requires_grad for linear in layers_of(fast)] == [learns]
