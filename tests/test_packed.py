"""Linear layers and convolutions on packed weights: the same values, NaN too, in as few calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.conftest import address
from tests.internals import with_packed_weights
from tests.level_2 import Then, chosen, image, line_of, lowered, plan_of
from tests.single_pass import Forward, function_of, rows

pytestmark = pytest.mark.usefixtures("right_is_enough")
PRODUCT = torch.ops.mkldnn._linear_pointwise.default
CONVOLVED = torch.ops.mkldnn._convolution_pointwise.default


def block():
    """What ConvNeXt is made of, without its norm."""
    torch.manual_seed(2)
    return Forward(
        "y = m.wide(m.depthwise(x).movedim(1, 3)); return x + m.narrow(F.gelu(y)).movedim(3, 1)",
        depthwise=nn.Conv2d(6, 6, 7, padding=3, groups=6),
        wide=nn.Linear(6, 24),
        narrow=nn.Linear(24, 6),
    ).eval()


def spoiled(x):
    x = 3 * x
    x[0, 0], x[1, ..., 0] = torch.nan, torch.inf
    return x


def packed(model, x):
    """The program for a call, and the functions that it calls where inputs are moderate."""
    line = line_of(model.eval(), model.parameters(), x)
    program = with_packed_weights(line.module, line.inputs)
    held = getattr(program, "__closure__", None)  # the code first, then the region's
    code = held[0].cell_contents.args[0] if held else program
    return program, [node.target for node in code._graph.nodes if node.op.startswith("call")]


ROWS, IMAGES = image(3, 6), image(2, 6, 8, 8).transpose(2, 3)
LINEAR = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6, bias=False)}
CONVOLUTIONS = {"a": nn.Conv2d(6, 6, 3, padding=1), "b": nn.Conv2d(6, 6, 3, padding=1, groups=6)}
STRIDED = {"stride": 2, "padding": 1, "dilation": 2}
GROUPED = {"a": nn.Conv2d(6, 12, 3, groups=6, **STRIDED), "b": nn.Conv2d(6, 12, 3, **STRIDED)}
SOLID, INFINITE = {"a": nn.Conv3d(6, 12, 3, bias=False, **STRIDED)}, {"a": nn.Linear(6, 6)}
INFINITE["a"].weight.data[0, 0] = torch.inf
# One call for each, but for those of these texts, of Linear layers and of convolutions.
SUMS = {
    "x + m.a(x)": (0, 0),
    "(m.a(x) + m.b(x)).relu()": (1, 0),
    "F.gelu(x + m.a(x))": (1, 1),
    "m.a(x).tanh() + x": (1, 1),
    "torch.add(x, m.a(x), alpha=2)": (1, 1),
    "(y := m.a(x)) + y": (1, 1),
    "(y := m.a(x)) + x + y.sum()": (3, 3),
    "F.gelu(y := m.a(x)) + y": (2, 2),
    "m.a(x) + x.mean((0, 1), keepdim=True)": (2, 2),
    "m.a(x) + 1": (1, 1),
}
ACTIVATIONS = [
    "F.gelu(m.b(x))", "F.gelu(m.a(x), approximate='tanh')", "F.hardswish(m.a(x))",
    "torch.sigmoid(m.b(x))", "F.silu(m.a(x), inplace=True)", "torch.tanh(m.a(x))",
    # What would lose NaN is part of the product where none arises.
    "F.relu(m.a(x))", "F.relu6(m.b(x))", "F.hardsigmoid(m.a(x))", "F.hardtanh(m.a(x), -0.5, 0.25)",
]  # fmt: skip
FUSED = {
    **{f"Linear, {text}": (LINEAR, text, ROWS, calls[0]) for text, calls in SUMS.items()},
    **{f"Conv2d, {text}": (CONVOLUTIONS, text, IMAGES, calls[1]) for text, calls in SUMS.items()},
    **{text: (LINEAR, text, ROWS, 0) for text in ACTIVATIONS},
    "an infinite weight": (INFINITE, "F.relu(m.a(x))", ROWS, 1),
    # One activation is part of it.
    "strides and groups": (GROUPED, "F.hardswish(m.a(x)).relu()", IMAGES, 1),
    "strides": (GROUPED, "F.hardswish(m.b(x)).relu()", IMAGES, 1),
    "3d": (SOLID, "F.hardswish(m.a(x)).relu()", image(2, 6, 9, 9, 9), 1),
}


@rows("layers text x beside", FUSED)
@torch.no_grad()
def test_a_sum_and_an_activation_are_part_of_the_product_where_no_nan_is_lost(
    layers, text, x, beside
):
    model, before = Forward(f"return {text}", **layers), x.clone()
    program, called = packed(model, x)

    assert {PRODUCT, CONVOLVED} & {*called} or "+" in text
    assert sum(each.namespace != "mkldnn" for each in called) == beside
    for each in (x, spoiled(x), x * 0):
        assert_close(*program(each), model(each), equal_nan=True)
    assert torch.equal(x, before)


_LINEAR, _CONVOLUTION = nn.Linear(6, 6), nn.Conv2d(6, 6, 3)


@rows(
    "model x called weights dense",
    {
        "a layer": (_LINEAR, ROWS, 1, 1, 1),  # the bias is dense, the weight no more
        "twice": (nn.Sequential(_LINEAR, nn.Tanh(), _LINEAR), ROWS, 2, 1, 1),
        "two sizes": (nn.Sequential(*[_CONVOLUTION] * 2), image(1, 6, 9, 9), 2, 2, 1),
        "the same": (nn.Conv2d(6, 6, 3, padding="same"), image(2, 6, 9, 9), 0, 0, 2),
        "1d": (nn.Conv1d(6, 6, 3), image(2, 6, 9), 0, 0, 2),
        "of one call": (Forward("F.linear(x, x)"), ROWS, 0, 0, 0),
    },
)
def test_a_weight_is_packed_once_for_each_geometry(model, x, called, weights, dense):
    program, functions = packed(model, x)

    assert sum(each in (PRODUCT, CONVOLVED) for each in functions) == called
    kinds = [buffer.is_mkldnn for buffer in program.buffers()]
    assert [kinds.count(True), kinds.count(False)] == [weights, dense]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["x[0]", "x[:0]", "x[None, None]", "x.mT", "x[:1].expand(3, 6)"])
@torch.no_grad()
def test_inputs_of_any_rank_and_layout(text, dtype):
    model = Then("F.relu(y)", nn.Linear(6, 5)).eval().to(dtype)
    x = function_of("x", text)(image(6, 6).to(dtype))
    fast = lowered(model, x.contiguous())

    there = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert chosen(fast) == ["packed weights" if there else "as it is"]
    for each in (x, x * torch.nan):
        assert_close(fast(each), model(each), equal_nan=True)


def product():
    return Then("F.gelu(y)", nn.Linear(6, 5)).eval()


@rows(
    "model x seconds choice",
    {
        "products": (product(), ROWS, 1, ["packed weights"]),
        "where some are grouped": (block(), IMAGES, 1, ["packed Linear, channels_last"]),
        "untimed products": (product(), ROWS, 0, []),
        "most are products, untimed": (block(), IMAGES, 0, []),
    },
)
def test_what_is_chosen_and_dense_weights_stay_the_models(model, x, seconds, choice):
    """Only what is packed takes memory then: the dense ones can be read again."""
    fast = lowered(model, x, tune_seconds=seconds)
    name, weight = next(model.named_parameters())

    assert chosen(fast) == choice
    assert (plan_of(fast, x) is not None) is bool(choice)
    assert choice or fast.report.remarks == ("such a call is not lowered: no region of it can be",)
    assert address(fast.get_parameter(name)) == address(weight)
    assert_close(fast(x), model(x))
    assert fast(x).stride() == model(x).stride()
