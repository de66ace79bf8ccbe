"""Linear layers and convolutions on packed weights: the same values, NaN too, in as few calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from optimizer.core.inputs import Call
from optimizer.lowering.packed import with_packed_weights
from optimizer.lowering.partition import ForModerate
from optimizer.lowering.trace import straight_line
from tests.conftest import address
from tests.level_2 import Then, chosen, image, lowered, plan_of
from tests.single_pass import Forward, function_of, rows

pytestmark = pytest.mark.usefixtures("right_is_enough")
PRODUCT = torch.ops.mkldnn._linear_pointwise.default
CONVOLVED = torch.ops.mkldnn._convolution_pointwise.default
ATEN = torch.ops.aten


def then(text: str = "y.clone()", bias: bool = True) -> nn.Module:
    """A Linear, and a function of what it gives."""
    return Then(text, nn.Linear(6, 5, bias=bias)).eval()


def block() -> nn.Module:
    """What ConvNeXt is made of, without its norm."""
    torch.manual_seed(2)
    return Forward(
        "y = m.wide(m.depthwise(x).movedim(1, 3)); return x + m.narrow(F.gelu(y)).movedim(3, 1)",
        depthwise=nn.Conv2d(6, 6, 7, padding=3, groups=6),
        wide=nn.Linear(6, 24),
        narrow=nn.Linear(24, 6),
    ).eval()


def values(*shape: int) -> torch.Tensor:
    return image(*(shape or (3, 6)))


def spoiled(x: torch.Tensor) -> torch.Tensor:
    x = 3 * x
    x[0, 0], x[1, ..., 0] = torch.nan, torch.inf
    return x


def packed(model: nn.Module, x: torch.Tensor) -> tuple[nn.Module, list[Any]]:
    """The program for a call, and the functions that it calls where inputs are moderate."""
    line = straight_line(model.eval(), list(model.parameters()), Call((x,), {}))
    program = with_packed_weights(line.module, line.inputs)
    code: Any = program.program if isinstance(program, ForModerate) else program
    return program, [node.target for node in code.graph.nodes if node.op.startswith("call")]


def assert_keeps_nan(program: Any, model: nn.Module, x: torch.Tensor) -> None:
    before = x.clone()
    for each in (x, spoiled(x), x * 0):
        assert_close(*program(each), model(each), equal_nan=True)
    assert torch.equal(x, before)


FUSED = [
    "F.gelu(y)", "F.gelu(input=y)", "F.gelu(y, approximate='tanh')", "F.hardswish(y)",
    "torch.sigmoid(y)", "F.silu(y, inplace=True)", "torch.tanh(y)",
    # What would lose NaN is part of the product where none arises.
    "F.relu(y)", "F.relu6(y)", "F.hardsigmoid(y)", "F.hardtanh(y, -0.5, 0.25)",
]  # fmt: skip


@pytest.mark.parametrize("text", FUSED)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_an_activation_is_part_of_the_product(text: str, bias: bool) -> None:
    model, x = then(text, bias), values()
    fast, (program, called) = lowered(model, x), packed(model, x)

    assert called == [PRODUCT]
    assert plan_of(fast, x) is not None
    assert_keeps_nan(program, model, x)
    assert_keeps_nan(lambda given: [fast(given)], model, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_it_stays_a_call_where_nan_may_arise(dtype: torch.dtype) -> None:
    model, x = then("F.relu(y)").to(dtype), values().to(dtype)
    if dtype == torch.float32:
        next(model.parameters()).data[0, 0] = torch.inf
    program, called = packed(model, x)

    assert called == [PRODUCT, ATEN.relu.default]
    assert_keeps_nan(program, model, x)


_LAYERS = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6, bias=False)}
_IMAGES = {"a": nn.Conv2d(6, 6, 3, padding=1), "b": nn.Conv2d(6, 6, 3, padding=1, groups=6)}
SUMS = {  # text: the calls beside the products, of Linear layers and of convolutions
    "x + m.a(x)": (0, 0),
    "(m.a(x) + m.b(x)).relu()": (1, 0),
    "F.gelu(x + m.a(x))": (1, 1),
    "m.a(x).tanh() + x": (1, 1),
    "torch.add(x, m.a(x), alpha=2)": (1, 1),
    "torch.add(m.a(x), x, alpha=2)": (1, 1),
    "(y := m.a(x)) + y": (1, 1),
    "(y := m.a(x)) + x + y.sum()": (3, 3),
    "F.gelu(y := m.a(x)) + y": (2, 2),
    "m.a(x) + x.mean((0, 1), keepdim=True)": (2, 2),
    "m.a(x) + 1": (1, 1),
}


@pytest.mark.parametrize("layers", [_LAYERS, _IMAGES], ids=["Linear", "convolution"])
@pytest.mark.parametrize("text", SUMS)
@torch.no_grad()
def test_a_sum_is_part_of_the_product(text: str, layers: dict[str, nn.Module]) -> None:
    model = Forward(f"return {text}", **layers)
    x = values() if layers is _LAYERS else values(2, 6, 8, 8).transpose(2, 3)
    program, called = packed(model, x)

    beside = [each for each in called if each.namespace != "mkldnn"]
    assert len(beside) == SUMS[text][layers is _IMAGES]
    assert_keeps_nan(program, model, x)


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
@torch.no_grad()
def test_a_convolution_is_packed_with_its_activation(kind: Any, groups: int) -> None:
    options: dict[str, Any] = {"stride": 2, "padding": 1, "dilation": 2, "groups": groups}
    model = nn.Sequential(kind(6, 12, 3, bias=groups == 1, **options), nn.Hardswish(), nn.ReLU())
    x = values(2, 6, *[9] * (2 if kind is nn.Conv2d else 3))
    program, called = packed(model, x)

    assert called == [CONVOLVED, ATEN.relu.default]  # one activation is part of it
    assert_keeps_nan(program, model, x)


_LINEAR, _CONVOLUTION = nn.Linear(6, 6), nn.Conv2d(6, 6, 3)


@rows(
    "model x called weights dense",
    {
        "a layer": (then(), values(), 1, 1, 1),  # the bias is dense, the weight no more
        "twice": (nn.Sequential(_LINEAR, nn.Tanh(), _LINEAR), values(), 2, 1, 1),
        "two sizes": (nn.Sequential(*[_CONVOLUTION] * 2), values(1, 6, 9, 9), 2, 2, 1),
        "the same": (nn.Conv2d(6, 6, 3, padding="same"), values(2, 6, 9, 9), 0, 0, 2),
        "1d": (nn.Conv1d(6, 6, 3), values(2, 6, 9), 0, 0, 2),
        "of one call": (Forward("F.linear(x, x)"), values(), 0, 0, 0),
    },
)
def test_a_weight_is_packed_once_for_each_geometry(
    model: nn.Module, x: torch.Tensor, called: int, weights: int, dense: int
) -> None:
    program, functions = packed(model, x)

    assert sum(each in (PRODUCT, CONVOLVED) for each in functions) == called
    kinds = [buffer.is_mkldnn for buffer in program.buffers()]
    assert [kinds.count(True), kinds.count(False)] == [weights, dense]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["x[0]", "x[:0]", "x[None, None]", "x.mT", "x[:1].expand(3, 6)"])
@torch.no_grad()
def test_inputs_of_any_rank_and_layout(text: str, dtype: torch.dtype) -> None:
    square = values(6, 6).to(dtype)
    model, x = then("F.gelu(y)").to(dtype), function_of("x", text)(square)
    program, _ = packed(model, x.contiguous())

    assert chosen(lowered(model, x.contiguous())) == ["packed weights"]
    assert_close(*program(x), model(x))


def test_where_some_are_grouped_it_is_tried_to_leave_them() -> None:
    model, x = block(), values(2, 6, 9, 9)
    fast = lowered(model, x)

    assert chosen(fast) == ["packed Linear, channels_last"]
    assert_close(fast(x), model(x))
    assert fast(x).stride() == model(x).stride()


@rows("model x", {"all": (then("F.gelu(y)"), values()), "most": (block(), values(2, 6, 9, 9))})
def test_untimed_products_stay_as_they_are(model: nn.Module, x: torch.Tensor) -> None:
    fast = lowered(model, x, tune_seconds=0)

    assert plan_of(fast, x) is None
    assert fast.report.remarks == ("such a call is not lowered: no region of it can be",)


def test_dense_weights_stay_the_models() -> None:
    """Only what is packed takes memory then: the dense ones can be read again."""
    model, x = then("F.gelu(y)"), values()
    fast = lowered(model, x)

    assert plan_of(fast, x) is not None
    assert address(fast.get_parameter("layer.weight")) == address(model.layer.weight)
