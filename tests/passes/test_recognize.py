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
    callees,
    layers_of,
    optimized_by,
    spelled,
    texts,
    tried,
)

ACTIVATION, ATTENTION, LINEAR = "recognize_activations", "recognize_attention", "recognize_linear"
UNKNOWN = "the graph was captured without example inputs"
ELSEWHERE = "what it computes on the way is read elsewhere"
WRITTEN = "its input is written later"
attend = F.scaled_dot_product_attention


def model_of(forward: str) -> nn.Module:
    """A model with the activations that are modules."""
    held = {"relu6": nn.ReLU6(inplace=True), "hardtanh": nn.Hardtanh(0.0, 6.0)}
    return Forward(forward, sigmoid=nn.Sigmoid(), tanh=nn.Tanh(), **held).eval()


def values(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.cat([torch.linspace(-12, 12, 200), torch.tensor([0.0, -0.0])]).to(dtype)


TANH_OF_A_CUBE = "m.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))"
SPELLINGS: dict[Any, str] = {
    (F.silu,): "x * x.sigmoid(); m.sigmoid(x) * x; x.mul(torch.sigmoid(x)); x.sigmoid().mul_(x)",
    (F.hardswish,): """
    x * F.relu6(x + 3) / 6
    x * (m.relu6(x + 3.0) / 6.0)
    F.hardsigmoid(x) * x
    x * F.relu6(x + 3, inplace=True).div_(6.0)
    x * (x + 3).clamp(min=0, max=6) * (1 / 6)
    x / 6 * F.hardtanh(3 + x, 0.0, 6.0)
    y = x + 3; y = y.clamp_(0, 6); y /= 6; return y.mul_(x)
    """,
    (F.hardsigmoid,): """
    torch.clamp(x.add(3.0), 0, 6).div(6); torch.clamp(max=6, min=0, input=x + 3) / 6;
    m.hardtanh(x + 3) / 6; F.relu6(x + 4 - 1) / 6
    """,
    (F.gelu,): f"""
    0.5 * x * (1 + {TANH_OF_A_CUBE});
    0.5 * x * (1.0 + torch.tanh(x * 0.7978845608028654 * (1 + 0.044715 * x * x)))
    """,
}


@spelled(SPELLINGS)
def test_recognizes_every_spelling(forward: str, outcome: Any) -> None:
    model = model_of(forward)
    finite = [0.0, -0.0, *[1e30, -1e30] * (outcome != (F.gelu,))]
    extremes = torch.tensor([torch.inf, -torch.inf, torch.nan, *finite] * 8)

    fast = tried(ACTIVATION, model, (values(),), outcome, (values().reshape(2, -1, 1),))

    torch.testing.assert_close(fast(extremes), model(extremes), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@spelled(SPELLINGS)
def test_is_as_near_to_float64_as_the_spelling_up_to_one_rounding(
    forward: str, outcome: Any, dtype: torch.dtype
) -> None:
    model, x = model_of(forward), values(dtype)
    exact = model(x.double())

    fast = optimized_by(ACTIVATION, model, x)

    errors = [float((answer.double() - exact).abs().max()) for answer in (fast(x), model(x))]
    assert fast(x).dtype == dtype
    assert errors[0] <= errors[1] + torch.finfo(dtype).eps * float(exact.abs().max())


NO_ACTIVATION = {
    ELSEWHERE: """
    gate = torch.sigmoid(x); return (x * gate, gate)
    gate = x.sigmoid(); return x * gate + gate
    moved = x + 3; clamped = moved.clamp_(0, 6); return x * clamped / 6 + moved
    gate = torch.sigmoid(x); gate.clamp_(0.25, 0.5); return x * gate
    y = x * 1; gate = y.sigmoid_(); return y * gate
    return x.add_(3).clamp_(0, 6).div_(6)
    """,
    WRITTEN: "y = x * 2; gate = torch.sigmoid(y); y.add_(1.0); return y * gate",
    "the result would differ in layout": """
    (y := x.as_strided((1, 3, 4), (1, 2, 0))) * F.hardsigmoid(y)
    """,
    "its input is not floating point": "y = x.long(); return y * torch.sigmoid(y)",
    # What only looks alike
    0: """
    x * torch.sigmoid(x + 1); x * torch.sigmoid(1.702 * x); (x + 1) * torch.sigmoid(x);
    x * x.flip(0).sigmoid(); x * F.relu6(x + 2) / 6; x * F.relu6(x + 3) / 5;
    F.relu6(x + 2 + 5) / 6; x * (x + 3).clamp(0) / 6; x * (x + 3).clamp(0, 6) // 6;
    torch.div(x * F.relu6(x + 3), 6, rounding_mode='floor');
    torch.add(x, 3, alpha=2).clamp(0, 6) / 6; F.hardtanh(x + 3) / 6;
    0.5 * x * (1 + torch.erf(x / math.sqrt(2.0)));
    0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x ** 3))); 6 / F.relu6(x + 3); x * True;
    (x * 1j).real; x.clamp(max=9) * torch.sigmoid(x); x * torch.sigmoid(x.clamp(min=-60));
    x * torch.sigmoid(x.clamp(min=-100)); x * F.relu6(x + 3) * 0.1666667; x / 0
    """,
}


@spelled(NO_ACTIVATION)
def test_an_activation_stays(forward: str, outcome: Any) -> None:
    tried(ACTIVATION, model_of(forward), (torch.arange(-6, 6).reshape(3, 4).double(),), outcome)


def test_an_activation_stays_without_example_inputs() -> None:
    tried(ACTIVATION, model_of("x * x.sigmoid()"), (), UNKNOWN, (values(),))


@pytest.mark.parametrize(("calls", "outcome"), [(12, 1), (13, 0)])
def test_a_spelling_is_twelve_calls_at_most(calls: int, outcome: int) -> None:
    gated = model_of(f"x * torch.sigmoid(x{' * 1' * (calls - 2)})")

    assert (F.silu in callees(tried(ACTIVATION, gated, (values(),), outcome))) == outcome


def test_a_long_run_of_products_is_looked_at_in_no_time_and_later_integers_are_an_error() -> None:
    squares = model_of("x = x * x;" * 60 + "return x")
    assert optimized_by(ACTIVATION, squares, values()).report.fired == ()

    with pytest.raises(NotImplementedError):
        optimized_by(ACTIVATION, model_of("x * torch.sigmoid(x)"), values())(torch.arange(4))


SHAPE = (2, 3, 5, 8)


def attention(forward: str) -> nn.Module:
    bias = torch.ones(5, 5, dtype=torch.float64)
    layers = {"softmax": nn.Softmax(dim=-1), "dropout": nn.Dropout(0.5)}
    return ForwardOfThree(forward, bias=bias, **layers).eval()


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    given = shapes if len(shapes) == 3 else (*shapes, SHAPE, SHAPE, SHAPE)[:3]
    return tuple(torch.randn(shape, dtype=dtype) for shape in given)


def attended(forward: str, inputs: tuple[Tensor, ...]) -> Any:
    return optimized_by(ATTENTION, attention(forward), *inputs, only=None)


PLAIN = "torch.softmax(q @ k.permute(0, 1, 3, 2), 3) @ v"
DROPPED = "m.dropout(F.softmax(q @ k.mT, -1)) @ v"
SCALED_BY_SIZE = "(q @ k.mT * q.shape[-1] ** (-0.5)).softmax(-1) @ v"
ATTENTIONS = texts(
    f"""
    (q @ k.transpose(-2, -1) / 4.0).softmax(-1) @ v; (0.3 * (q @ k.mT)).softmax(dim=3) @ v;
    {PLAIN}; {DROPPED}; {SCALED_BY_SIZE};
    F.softmax(q * 0.3 @ k.transpose(2, 3), dim=-1) @ v; F.softmax(q @ (k.mT * 0.3), dim=-1) @ v;
    m.softmax(2.0 * (q * 0.3 @ (k.mT / 4) * -3)) @ v;
    (q @ k.mT / math.sqrt(k.size(-1))).softmax(-1) @ v;
    torch.matmul(torch.softmax(input=torch.div(torch.matmul(q, k.mT), 4.0), dim=-1), v);
    q.matmul(k.mT).mul(0.3).softmax(-1).matmul(v); (q @ k.mT).softmax(-1) @ v + q * k.mean() - v
    """
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("spelling", ATTENTIONS)
def test_recognizes_attention(spelling: str, dtype: torch.dtype) -> None:
    inputs = tensors(dtype=dtype)

    fast = attended(spelling, inputs)

    assert callees(fast).count(attend) == fast.report.counts()[ATTENTION] == 1
    assert torch.softmax not in callees(fast)
    if dtype == torch.float64:
        assert_equivalent(attention(spelling), fast, inputs)
    optimizer.check(attention(spelling), fast, inputs)


@pytest.mark.parametrize(("length", "dtype"), [(128, torch.bfloat16), (129, torch.float32)])
def test_scores_may_be_many_where_their_dtype_is_wide(length: int, dtype: torch.dtype) -> None:
    assert attend in callees(attended(PLAIN, tensors(*[(1, 1, length, 8)] * 3, dtype=dtype)))


def test_the_result_pickles_and_exports() -> None:
    fast = attended(PLAIN, tensors())

    restored = pickle.loads(pickle.dumps(fast))
    exported = torch.export.export(fast, tensors())

    assert torch.equal(restored(*tensors()), fast(*tensors()))
    assert torch.equal(exported.module()(*tensors()), fast(*tensors()))


LATER = {
    "other sizes": ((7, 2, 33, 4), (7, 2, 65, 4), (7, 2, 65, 4)),
    "one query": ((1, 1, 1, 8), (1, 1, 6, 8), (1, 1, 6, 8)),
    "no keys": ((1, 1, 3, 8), (1, 1, 0, 8), (1, 1, 0, 8)),
    "no queries": ((1, 1, 0, 8), (1, 1, 3, 8), (1, 1, 3, 8)),
    "an empty batch": ((0, 1, 3, 8), (0, 1, 3, 8), (0, 1, 3, 8)),
    "heads of two sizes": ((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 4)),
    "keys that are broadcast": ((2, 3, 5, 8), (1, 1, 5, 8), (1, 3, 5, 8)),
    "queries that are broadcast": ((1, 3, 5, 8), (2, 1, 5, 8), (2, 3, 5, 8)),
    "values that are broadcast": ((1, 3, 5, 8), (1, 3, 5, 8), (2, 3, 5, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", LATER)
def test_holds_in_later_calls(case: str, dtype: torch.dtype) -> None:
    function = "(q @ k.mT / math.sqrt(k.size(-1))).softmax(-1) @ v"
    fast, later = attended(function, tensors()), tensors(*LATER[case], dtype=dtype)

    optimizer.check(attention(function), fast, later)

    if dtype == torch.float64:
        assert_equivalent(attention(function), fast, later)
    assert fast(*later).is_contiguous()


def test_the_result_is_contiguous_whatever_q_is() -> None:
    inputs = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors())

    fast = attended(PLAIN, inputs)

    assert attend in callees(fast)
    assert fast(*inputs).stride() == attention(PLAIN)(*inputs).stride()


@pytest.mark.parametrize("spelling", [PLAIN, SCALED_BY_SIZE, DROPPED])
def test_autocast_changes_nothing_but_rounding(spelling: str) -> None:
    inputs = tensors(dtype=torch.float32)
    fast = attended(spelling, inputs)

    with torch.autocast("cpu", torch.bfloat16):
        expected, result = attention(spelling)(*inputs), fast(*inputs)

    assert result.dtype == expected.dtype
    assert torch.allclose(result.float(), expected.float(), atol=0.05)


def test_gradients_are_the_models() -> None:
    inputs, model = tuple(x.requires_grad_() for x in tensors()), attention(SCALED_BY_SIZE)
    fast = attended(SCALED_BY_SIZE, inputs)

    found, expected = (
        torch.autograd.grad(run(*inputs).square().sum(), inputs) for run in (fast, model)
    )

    assert all(map(torch.allclose, found, expected))


DIFFERENT = "its softmax is over another axis or dtype"
SLOWER = "torch has no faster kernel for it"
FOUR = "it has not four dimensions"
ATTENTION_STAYS: dict[Any, str] = {
    (0,): """
    torch.relu(q).softmax(-1) @ v.mT; (q @ k.mT * m.bias).softmax(-1) @ v;
    (2.0 / (q @ k.mT)).softmax(-1) @ v; (q @ k.mT / 0).softmax(-1) @ v;
    (q @ k.mT).tanh().softmax(-1) @ v; v.mT @ (q @ k.mT).softmax(-1)
    """,
    ("a mask may hide all keys from a query",): """
    (q @ k.mT + m.bias).softmax(-1) @ v;
    (q @ k.mT).masked_fill(m.bias.tril() == 0, -math.inf).softmax(-1) @ v
    """,
    (DIFFERENT,): """
    (q @ k.mT).softmax(-2) @ v; (q @ k.mT).softmax(-1, dtype=torch.float64) @ v
    """,
    (ELSEWHERE,): """
    weights = (q @ k.mT).softmax(-1); return (weights @ v, weights)
    scores = q @ k.mT; return (scores * 0.5).softmax(-1) @ v + scores.mean()
    scores = q @ k.mT; scores.tanh_(); return scores.softmax(-1) @ v
    """,
    (WRITTEN,): """
    weights = (q @ k.mT).softmax(-1); q.mul_(2.0); return weights @ v
    return ((q @ k.mT).softmax(-1) @ v) + q.mul_(2.0).mean()
    """,
    ("its result is written",): "((q @ k.mT).softmax(-1) @ v).mul_(2.0)",
    (FOUR, *[SHAPE[1:]] * 3): "(q @ k.mT).softmax(2) @ v",
    (FOUR, SHAPE, SHAPE, SHAPE[1:]): PLAIN,
    (SLOWER, SHAPE, SHAPE, (2, 3, 5, 4)): PLAIN,  # heads of two sizes
    (SLOWER, SHAPE, (2, 1, 5, 8), (2, 1, 5, 8)): PLAIN,  # keys that are broadcast
    (SLOWER, *[(2, 3, 8, 8)] * 3): "(q @ k).softmax(-1) @ v",  # keys in columns
    (SLOWER, *[(1, 1, 129, 8)] * 3): PLAIN,  # much in half precision
}


@spelled(ATTENTION_STAYS, cells="forward case")
def test_attention_stays(forward: str, case: Any) -> None:
    outcome, *shapes = case
    dtype = torch.bfloat16 if (1, 1, 129, 8) in shapes else torch.float64

    tried(ATTENTION, attention(forward), tensors(*shapes, dtype=dtype), outcome)


def test_values_that_are_written_before_they_are_read_are_read_then() -> None:
    text = "v = v.clone(); weights = (q @ k.mT).softmax(-1); return weights @ v.mul_(2.0)"

    assert_equivalent(attention(text), attended(text, tensors()), tensors())


def test_a_number_that_is_an_argument_may_be_a_tensor_in_a_later_call() -> None:
    (x, *_), bias = tensors((2, 3, 5, 5)), torch.randn(5, 5).double()
    model = ForwardOfTwo("(x @ x.mT * z).softmax(-1) @ x").eval()

    fast: Any = optimizer.optimize(model, (x, 2.0), check=None, level=1)

    assert torch.equal(fast(x, bias), model(x, bias))


def test_the_rank_is_required_of_later_calls() -> None:
    with pytest.raises(optimizer.InputError, match="4 dimensions and got 3"):
        attended(PLAIN, tensors())(*tensors(*[SHAPE[1:]] * 3))


def product(forward: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    shapes = {"weight": (5, 4), "bias": (5,), "vector": (4,), "square": (4, 4)}
    own = {name: nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in shapes.items()}
    return Forward(forward, untransposed=torch.randn(4, 5, dtype=dtype), **own).eval()


MATRIX = [(7, 4), (1, 4), (0, 4)]
PRODUCTS = {
    (*MATRIX,): """
    torch.addmm(m.bias, x, m.weight.t()); m.bias.addmm(x, m.weight.T);
    torch.mm(x, m.weight.t()); x.mm(m.weight.t()); torch.addmm(m.bias, x, m.untransposed)
    """,
    (*MATRIX, (4,), (2, 3, 4), (2, 3, 1, 4)): """
    x @ m.weight.t(); x @ m.weight.T; x @ m.weight.mT; x @ m.weight.transpose(0, 1);
    x @ m.weight.permute(-1, 0); x @ m.weight.movedim(0, 1); torch.matmul(x, m.weight.t());
    x.matmul(m.weight.t()); x @ m.untransposed; x @ m.square; x @ m.square.t();
    x @ m.square.transpose(1, 1)
    """,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@spelled(PRODUCTS, cells="spelling shapes")
def test_a_product_is_a_linear_to_the_last_bit(
    spelling: str, shapes: Any, dtype: torch.dtype
) -> None:
    model = product(spelling, dtype)
    first, *later = ((torch.randn(shape, dtype=dtype),) for shape in shapes)

    fast = optimized_by(LINEAR, model, *first)

    (linear,) = layers_of(fast)
    pointers = [address(value) for value in (model.weight, model.square)]
    copied = "untransposed" in spelling  # a buffer, which is the result's own
    assert copied or address(linear.weight) in pointers
    assert linear.bias is None or address(linear.bias) == address(model.bias)
    assert fast.double()(first[0].double()).dtype == torch.float64  # it can still be cast
    tried(LINEAR, model, first, [nn.Linear], *later)


def test_a_matrix_of_integers_is_one_too() -> None:
    model = Forward("x @ m.matrix", matrix=torch.arange(12).reshape(4, 3)).eval()

    tried(LINEAR, model, (torch.arange(28).reshape(7, 4),), [nn.Linear])


def test_what_follows_folds_into_it() -> None:
    model = product("torch.relu(torch.addmm(m.bias, x, m.weight.t()))", torch.float32)

    fast = optimizer.optimize(model, torch.randn(7, 4), level=1)

    assert fast.report.counts() == {LINEAR: 1, "fuse_linear_relu": 1}


REFUSALS = {
    0: """
    x @ x.mT; m.weight @ x.mT; x @ (m.weight * 2.0).t(); x @ m.weight.transpose(0, x.dim() - 1);
    torch.addmm(m.bias * 2.0, x, m.weight.t())
    """,
    "its terms are scaled, or the result is written elsewhere": """
    torch.addmm(m.bias, x, m.weight.t(), beta=2.0); m.bias.addmm(x, m.weight.t(), alpha=0.5)
    """,
    "the model's tensor is no matrix": "x @ m.vector",
    "what is added is no bias, one number for each output": """
    torch.addmm(m.square, x, m.square.t())
    """,
    "the forward may write the matrix": """
    y = x @ m.untransposed; m.untransposed.mul_(2.0); return y + m.untransposed.sum()
    """,
}


@spelled(REFUSALS)
def test_a_product_stays(forward: str, outcome: Any) -> None:
    tried(LINEAR, product(forward), (torch.randn(4, 4, dtype=torch.float64),), outcome)


@pytest.mark.parametrize("learns", [True, False])
def test_the_kernel_is_the_same_for_every_layout(learns: bool) -> None:
    x, matrix = torch.randn(4, 3, 2, 64), nn.Parameter(torch.randn(64, 48), requires_grad=learns)
    model = Forward("x @ m.matrix", matrix=matrix).eval()

    fast = tried(LINEAR, model, (x,), [nn.Linear])

    assert [linear.weight.requires_grad for linear in layers_of(fast)] == [learns]
    with torch.no_grad():
        assert torch.equal(fast(x.permute(2, 1, 0, 3)), model(x.permute(2, 1, 0, 3)))
