"""BatchNorm and constants fold into the layer before or behind them, or say why not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.conftest import address
from tests.single_pass import (
    Forward,
    alike,
    assert_as_near_to_the_truth,
    assert_outcome,
    callees,
    function_of,
    layers_of,
    optimized_by,
    rows,
    tried,
)

FOLD, FORWARD = "fold_affine", "fold_affine_forward"
EPS = 0.125  # a power of two: then a correct fold of dyadic values rounds nothing
UNKNOWN = "the graph was captured without example inputs"
IMAGE = (2, 3, 6, 6)
conv = partial(nn.Conv2d, 3, 4, 3)


def tried_on(name: str, model: nn.Module, shape: tuple[int, ...], outcome: Any, *later: Any) -> Any:
    """`tried` on weights and inputs that hide nothing, and on inputs of other shapes later."""
    model = randomize(deepcopy(model).double().eval())
    calls = (inputs_like([each], "random", place) for place, each in enumerate((shape, *later)))
    return tried(name, model, next(calls), outcome, *calls)


def batchnorm(dimensions: int, features: int = 4, **settings: Any) -> nn.Module:
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
    return kind(features, **({"eps": EPS} | settings))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def convolution(dimensions: int = 2, *, bias: bool = True) -> dict[str, nn.Parameter]:
    return {"w": parameter(4, 3, *[3] * dimensions)} | ({"b": parameter(4)} if bias else {})


def statistics() -> dict[str, Tensor]:
    """Buffers for `F.batch_norm`: variance + eps is a power of four, as in dyadic data."""
    return {
        "mean": torch.tensor([1.0, -2.0, 3.0, 0.0]),
        "var": torch.tensor([1.0, 4.0, 0.25, 16.0]) - EPS,
        "gain": parameter(4),
        "shift": parameter(4),
    }


def normalized(text: str) -> nn.Module:
    """A model whose forward gets weights `w` and `b`, a layer and a norm, and statistics."""
    return Forward(text, **convolution(), **statistics(), conv=conv(), bn=batchnorm(2))


class Conv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


Sequential = nn.Sequential
NAMED = nn.ModuleDict({"first": conv(), "norm": batchnorm(2)})
FOLDED = {
    "linear": (Sequential(nn.Linear(3, 4), batchnorm(1)), (5, 3)),
    "linear without bias": (Sequential(nn.Linear(3, 4, bias=False), batchnorm(1)), (5, 3)),
    "conv1d": (Sequential(nn.Conv1d(3, 4, 3), batchnorm(1)), (2, 3, 8)),
    "conv1d as long as wide": (Sequential(nn.Conv1d(3, 4, 3), batchnorm(1)), (2, 3, 6)),
    "conv2d": (Sequential(conv(), batchnorm(2)), IMAGE),
    "conv3d": (Sequential(nn.Conv3d(3, 4, 2), batchnorm(3)), (2, 3, 4, 4, 4)),
    "conv without bias": (Sequential(conv(bias=False), batchnorm(2)), IMAGE),
    "no affine": (Sequential(conv(), batchnorm(2, affine=False)), IMAGE),
    "no affine, no bias": (Sequential(conv(bias=False), batchnorm(2, affine=False)), IMAGE),
    "groups, stride, padding, dilation": (
        Sequential(nn.Conv2d(4, 4, 3, 2, padding=1, dilation=2, groups=2), batchnorm(2)),
        (2, 4, 9, 9),
    ),
    "depthwise": (Sequential(nn.Conv2d(4, 4, 3, groups=4), batchnorm(2)), (2, 4, 6, 6)),
    "padding to the same size": (Sequential(conv(padding="same"), batchnorm(2)), IMAGE),
    "padding by reflection": (
        Sequential(conv(padding=1, padding_mode="reflect"), batchnorm(2)), IMAGE,
    ),
    "two BatchNorms": (Sequential(conv(), batchnorm(2), batchnorm(2, eps=0.25)), IMAGE),
    "momentum None": (Sequential(conv(), batchnorm(2, momentum=None)), IMAGE),
    "a subclass that calls its base class": (Sequential(Conv(3, 4, 3), batchnorm(2)), IMAGE),
    "layers in a dictionary": (
        Forward("m.layers['norm'](m.layers['first'](x))", layers=NAMED), IMAGE,
    ),
}  # fmt: skip
SPELLINGS = (
    "m.bn(input=m.conv(input=x))",
    "m.bn(F.conv2d(x, m.w, m.b))",
    "m.bn(F.conv2d(x, m.w))",
    "m.bn(F.conv2d(input=x, weight=m.w, bias=m.b, padding=1, stride=(2, 1)))",
    "m.bn(torch.conv2d(x, m.w, m.b, 2))",
    "F.batch_norm(m.conv(x), m.mean, m.var, m.gain, m.shift, False, 0.1, 0.125)",
    "F.batch_norm(m.conv(x), running_mean=m.mean, running_var=m.var, bias=m.shift, weight=m.gain, "
    "eps=0.125)",
    "F.batch_norm(m.conv(x), m.mean, m.var, training=m.training, eps=0.125)",
    "F.batch_norm(F.conv2d(x, m.w, m.b), m.mean, m.var, m.gain, m.shift, eps=0.125)",
    "m.bn(F.conv2d(x, m.conv.weight, m.conv.bias))",
)


@pytest.mark.parametrize("regime", ["random", "dyadic", "ill"])
@rows("model shape", FOLDED)
def test_folds_into_each_kind_of_layer(model: Any, shape: Any, regime: Any) -> None:
    model = randomize(deepcopy(model).double().eval(), regime)
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layer = next(type(each) for each in model.modules() if isinstance(each, kinds))

    tried(FOLD, model, inputs_like([shape], regime, 0), [nn.Conv2d if layer is Conv else layer])


@pytest.mark.parametrize("regime", ["random", "dyadic"])
@pytest.mark.parametrize("text", SPELLINGS)
def test_folds_in_every_spelling_of_a_convolution(text: str, regime: Any) -> None:
    model = randomize(normalized(text).double().eval(), regime)

    tried(FOLD, model, inputs_like([IMAGE], regime, 0), [nn.Conv2d])


def calls(text: str, dimensions: int, **weights: Any) -> nn.Module:
    """A model of a text with a norm `bn`, and weights `w` and `b` of a layer."""
    norm = batchnorm(dimensions or 1)
    return Forward(text, bn=norm, **(weights or convolution(dimensions)))


LINEAR, CONV, UP = nn.Linear(3, 4), nn.Conv1d(3, 4, 2, padding=1), nn.ConvTranspose1d(3, 4, 2)
BEHIND = [nn.Linear, torch.flatten, "reshape_as"]  # as timm's LeViT does, on (N * L, C)
BLOCK = Sequential(nn.Conv2d(4, 4, 3, padding=1), batchnorm(2))
BOTH = {"conv": conv(), "bn": batchnorm(2), "second": batchnorm(2, eps=0.5)}
MORE = {
    "F.linear": (calls("m.bn(F.linear(x, m.w, m.b))", 0), (5, 3), [nn.Linear]),
    "F.linear with keywords": (
        calls("m.bn(F.linear(input=x, weight=m.w, bias=m.b))", 0), (5, 3), [nn.Linear],
    ),
    "F.conv1d": (calls("m.bn(F.conv1d(x, m.w, m.b))", 1), (2, 3, 6), [nn.Conv1d]),
    "torch.conv3d": (calls("m.bn(torch.conv3d(x, m.w, m.b))", 3), (2, 3, 4, 4, 4), [nn.Conv3d]),
    **{
        f"a flatten of {span}": (
            calls(f"m.bn((y := m.w(x)).flatten{span}).reshape_as(y)", 1, w=LINEAR),
            (2, 5, 3), BEHIND,
        )
        for span in ((0, 1), (0, -2), (-3, -2))
    },
    **{
        f"channels that came last, {layer} of {length}": (
            calls("m.bn(m.w(x.mT))", 1, w=layer), (2, length, 3), 1, (2, 1, 3),
        )
        for layer in (CONV, UP)
        for length in (1, 3)
    },
    **{  # as timm's BatchNormAct2d checks the rank of what it is given
        f"a second reader, {read}": (Forward(f"(m.bn(y := m.conv(x)), {read})", **BOTH), IMAGE, 1)
        for read in ("y.ndim", "y.shape[0]", "y.size(1)", "y.dim()")
    },
    "a pair called twice": (
        Sequential(BLOCK, nn.ReLU(), BLOCK), (2, 4, 6, 6), [nn.Conv2d, F.relu, nn.Conv2d],
    ),
    "a layer before two BatchNorms": (
        Forward("m.bn(m.conv(x)) - m.second(m.conv(x))", **BOTH), IMAGE, 2,
    ),
    "F.conv_transpose2d": (
        Forward(
            "m.bn(F.conv_transpose2d(x, m.w, stride=2, groups=2, dilation=2))",
            bn=nn.BatchNorm2d(6), w=parameter(4, 3, 3, 3),
        ), (2, 4, 5, 5), [nn.ConvTranspose2d],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MORE)
def test_folds(case: str) -> None:
    model, shape, outcome, *later = MORE[case]

    fast = tried_on(FOLD, model, shape, outcome, *later)

    targets = [node.target for node in fast.graph.nodes if node.op == "call_module"]
    assert len(set(targets)) == (1 if case == "a pair called twice" else len(targets))


def test_the_rank_behind_a_flatten_is_required_of_later_calls() -> None:
    fast = optimized_by(FOLD, MORE["a flatten of (0, 1)"][0].eval(), torch.randn(2, 5, 3))

    with pytest.raises(optimizer.InputError, match="3 dimensions and got 4"):
        fast(torch.randn(2, 5, 3, 3))


def test_without_example_inputs_a_rank_that_the_layers_imply_suffices() -> None:
    model = randomize(nn.Sequential(conv(), batchnorm(2)).double().eval())

    tried(FOLD, model, (), [nn.Conv2d], inputs_like([IMAGE], "random", 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_fold_is_computed_in_float64_and_rounded_once(dtype: torch.dtype) -> None:
    model = randomize(nn.Sequential(conv(), batchnorm(2)), "random").to(dtype).eval()
    layer, bn = model
    scale = bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt()
    weight = layer.weight.double() * scale[:, None, None, None]
    bias = scale * (layer.bias.double() - bn.running_mean.double()) + bn.bias.double()

    (folded,) = layers_of(optimized_by(FOLD, model, torch.randn(2, 3, 6, 6, dtype=dtype)))

    assert torch.allclose(folded.weight.double(), weight, rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.allclose(folded.bias.double(), bias, rtol=torch.finfo(dtype).eps, atol=1e-12)
    assert folded.weight.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_fold_in_low_precision_is_as_near_to_the_truth_as_the_model(dtype: torch.dtype) -> None:
    model = randomize(nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()))
    other = randomize(nn.Sequential(nn.BatchNorm2d(16), nn.Conv2d(16, 32, 3)))

    assert_as_near_to_the_truth(FOLD, model.eval(), (4, 8, 12, 12), dtype)
    if dtype != torch.float64:
        assert_as_near_to_the_truth(FORWARD, other.eval(), (4, 16, 12, 12), dtype)


def test_a_frozen_layer_stays_frozen() -> None:
    model = nn.Sequential(conv().requires_grad_(False), batchnorm(2)).eval()

    fast = optimized_by(FOLD, model, torch.randn(2, 3, 6, 6))

    assert not any(folded.requires_grad for folded in fast.parameters())


class Over(nn.Module):
    """`function(layer(x), constant)`, where the constant is a buffer of the model."""

    def __init__(
        self, function: Any, layer: nn.Module, *shape: int, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.layer, self.function = layer.double(), function
        self.register_buffer("constant", torch.rand(shape).add(0.5).to(dtype))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), self.constant)


class Before(Over):
    """`layer(function(x, constant))`."""

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.function(x, self.constant))


CONSTANTS = {
    text: function_of("x, c", text)
    for text in (
        *("x * c", "c * x", "x.mul(c)", "torch.mul(input=x, other=c)", "x + c", "c + x"),
        *("torch.add(x, c)", "x - c", "c - x", "torch.sub(x, other=c)", "x / c", "x.div(c)"),
        *("x * c + c", "(2 - x * 3 + 0.25) / 4"),
    )
}


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1), (1, 1, 1), (1,), ()])
@pytest.mark.parametrize("spelling", CONSTANTS)
def test_a_constant_for_each_channel_folds(spelling: str, shape: tuple[int, ...]) -> None:
    tried_on(FOLD, Over(CONSTANTS[spelling], conv(), *shape), IMAGE, [nn.Conv2d])


@pytest.mark.parametrize("shape", [(2, 3), (5, 2, 3), (2, 3, 5, 2, 3), (3,)])
def test_a_constant_along_the_last_dimension_folds_into_a_linear_of_any_rank(shape: Any) -> None:
    tried_on(FOLD, Over(CONSTANTS["x - c"], nn.Linear(3, 4), 4), shape, [nn.Linear])


@pytest.mark.parametrize("bias", [True, False])
def test_a_constant_folds_where_there_is_no_batch(bias: bool) -> None:
    model = Over(CONSTANTS["x * c + c"], conv(bias=bias), 4, 1, 1)

    tried_on(FOLD, model, (3, 6, 6), [nn.Conv2d])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("groups", "width"), [(1, 6), (2, 6), (4, 4), (4, 8)])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_transposed_convolution_absorbs_over_its_second_dimension(
    dimensions: int, groups: int, width: int, bias: bool
) -> None:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1]
    layer = kind(4, width, 3, stride=2, padding=1, output_padding=1, groups=groups, bias=bias)
    model = nn.Sequential(layer, batchnorm(dimensions, width, eps=1e-5))

    tried_on(FOLD, model, (2, 4, *[4] * dimensions), [kind])


def test_an_output_size_that_is_asked_for_is_kept() -> None:
    up = nn.ConvTranspose2d(3, 4, 3, stride=2)
    model = Forward(lambda m, x: m.bn(m.up(x, output_size=(12, 12))), up=up, bn=nn.BatchNorm2d(4))
    randomize(model.double().eval())
    inputs = inputs_like([(2, 3, 5, 5)], "random", 0)

    assert_equivalent(model, optimized_by(FOLD, model, *inputs), inputs)


def test_a_sum_keeps_the_weight_and_a_product_adds_no_bias() -> None:
    summed = Over(CONSTANTS["x + c"], conv(bias=False), 4, 1, 1).eval()
    scaled = Over(CONSTANTS["x * c"], conv(bias=False), 4, 1, 1).eval()
    x = torch.randn(IMAGE).double()

    (with_bias,) = layers_of(optimized_by(FOLD, summed, x))
    (without,) = layers_of(optimized_by(FOLD, scaled, x))

    assert address(with_bias.weight) == address(summed.layer.weight)
    assert without.bias is None


def test_a_pair_that_is_called_twice_shares_one_folded_layer() -> None:
    model = Forward(
        lambda m, x: m.over(x) + m.over(x.flip(-1)) + m.over.layer(x) * 2.0,
        over=Over(CONSTANTS["x * c"], conv(), 4, 1, 1),
    )

    first, second, third = layers_of(optimized_by(FOLD, model.eval(), torch.randn(IMAGE).double()))

    assert first is second is not third


def training() -> nn.Module:
    model = nn.Sequential(conv(), batchnorm(2)).eval()
    model[1].train()
    return model


def tiny_variance() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), batchnorm(1, eps=1e-7))
    nn.init.zeros_(model[1].running_var)
    nn.init.constant_(model[1].weight, 300.0)
    nn.init.uniform_(model[0].weight, 1.0, 2.0)
    return model.half().eval()


def sequence(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers).eval()


def forward(function: Callable[[Any, Tensor], Any], **held: Any) -> Callable[[], nn.Module]:
    return lambda: Forward(function, **held).eval().requires_grad_(False)


OTHER_AXIS = "BatchNorm normalizes another axis than the layer's"
READ_ELSEWHERE = "the layer's output is read elsewhere"
MIXES = "flattening mixes the layer's outputs"
WRITTEN = "the forward writes their tensors"
REFUSALS = {
    "BatchNorm in training mode": (
        training, IMAGE, "BatchNorm is in training mode and uses batch statistics",
    ),
    "no running statistics": (
        sequence(conv(), batchnorm(2, track_running_stats=False)), IMAGE,
        "BatchNorm tracks no running statistics and uses the batch's",
    ),
    "a second reader": (
        forward(lambda m, x: (y := m.conv(x), m.bn(y)), conv=conv(), bn=batchnorm(2)), IMAGE,
        READ_ELSEWHERE,
    ),
    "a constant for each place": (
        forward(lambda m, x: m.fc(x) * m.c, fc=nn.Linear(3, 4), c=torch.ones(2, 4)), (2, 3),
        "the constant is not one number a channel",
    ),
    "a constant of more dimensions": (
        forward(lambda m, x: m.fc(x) * m.c, fc=nn.Linear(3, 4), c=torch.ones(1, 1, 4)), (2, 3),
        "the constant has more dimensions than what it is combined with",
    ),
    "Linear on (N, C, L) with L == C": (
        sequence(nn.Linear(3, 4), batchnorm(1)), (2, 4, 3), OTHER_AXIS,
    ),
    "Linear on (N, C, L) with L != C": (
        sequence(nn.Linear(3, 4), batchnorm(1, 5)), (2, 5, 3), OTHER_AXIS,
    ),
    "Linear on an image": (sequence(nn.Linear(3, 4), batchnorm(2)), (2, 4, 5, 3), OTHER_AXIS),
    "Conv1d without a batch and L == C": (
        sequence(nn.Conv1d(3, 4, 3), batchnorm(1)), (3, 6), OTHER_AXIS,
    ),
    "a bfloat16 layer and a float32 BatchNorm": (
        sequence(conv().bfloat16(), batchnorm(2)), IMAGE, "dtype or device differ",
    ),
    "a forward that writes the layer's weight": (
        forward(
            lambda m, x: (m.conv.weight.mul_(2), m.bn(m.conv(x)))[1], conv=conv(), bn=batchnorm(2)
        ), IMAGE, WRITTEN,
    ),
    "a forward that writes the running mean": (
        forward(
            lambda m, x: (m.bn.running_mean.add_(1), m.bn(m.conv(x)))[1],
            conv=conv(), bn=batchnorm(2),
        ), IMAGE, WRITTEN,
    ),
    "weights beyond float16": (tiny_variance, (2, 3), "the folded weights overflow or underflow"),
    "outputs that are flattened away": (
        forward(lambda m, x: m.layer(x).flatten(1) * 2, layer=nn.Linear(3, 4)), (2, 5, 3), MIXES,
    ),
    "a flattened convolution": (
        forward(lambda m, x: m.layer(x).flatten(0, 1) * 2, layer=conv()), IMAGE, MIXES,
    ),
    "a rank that depends on sizes": (
        sequence(Forward(lambda m, x: x.squeeze()), nn.Linear(3, 4), batchnorm(1)), (2, 1, 3),
        "its rank depends on sizes, through a squeeze",
    ),
}  # fmt: skip
NOT_A_CHANNEL = "the constant is not one number a channel"
OTHER_DTYPE = "dtype or device differ"
HIGHER_RANK = "the constant has more dimensions than what it is combined with"
OVERFLOW = "the folded weights overflow or underflow"
times = CONSTANTS["x * c"]
CONSTANTS_THAT_STAY = {
    "a number for each position": (lambda: Over(times, conv(), 4, 4, 4), IMAGE, NOT_A_CHANNEL),
    "a number for each column": (lambda: Over(times, conv(), 4), IMAGE, NOT_A_CHANNEL),
    "a number for each image": (lambda: Over(times, conv(), 2, 1, 1, 1), IMAGE, NOT_A_CHANNEL),
    "one channel made four": (
        lambda: Over(times, nn.Conv2d(3, 1, 3), 4, 1, 1), IMAGE, NOT_A_CHANNEL,
    ),
    "a constant of higher rank": (lambda: Over(times, conv(), 1, 1, 1, 1, 1), IMAGE, HIGHER_RANK),
    "a batch of one that only the constant has": (
        lambda: Over(times, conv(), 1, 4, 1, 1), (3, 6, 6), HIGHER_RANK,
    ),
    "a constant that promotes": (
        lambda: Over(times, conv().float(), 4, 1, 1, dtype=torch.complex128), IMAGE, OTHER_DTYPE,
    ),
    "a constant of integers": (
        lambda: Over(times, conv(), 4, 1, 1, dtype=torch.int64), IMAGE, OTHER_DTYPE,
    ),
    "a constant that is written": (
        lambda: Over(lambda y, c: (c.add_(1), y * c)[1], conv(), 4, 1, 1), IMAGE,
        "the forward writes their tensors",
    ),
    "division by zero": (lambda: Over(lambda y, c: y / 0, conv(), 1), IMAGE, OVERFLOW),
    "an infinite sum": (
        lambda: Over(lambda y, c: y + float("inf"), conv(), 1), IMAGE, "the folded bias overflows",
    ),
    "a second reader before a flatten": (
        lambda: Over(lambda y, c: y.flatten(0, 1) * c + y.sum(), nn.Linear(3, 4), 4), (2, 5, 3),
        READ_ELSEWHERE,
    ),
    "a second reader after a flatten": (
        lambda: Over(lambda y, c: (z := y.flatten(0, 1)) * c + z, nn.Linear(3, 4), 4), (2, 5, 3),
        READ_ELSEWHERE,
    ),
}  # fmt: skip

NOT_AFFINE: dict[str, Callable[..., Tensor]] = {
    "x / y": lambda y, c: y / y.sum(),
    "1 / x": lambda y, c: c / y,
    "x + y": lambda y, c: y + y.mean(),
    "torch.add(alpha=)": lambda y, c: torch.add(y, c, alpha=2),
    "int": lambda y, c: y + y.shape[0],
}


@rows("build shape reason", REFUSALS)
def test_a_layer_stays(build: Any, shape: tuple[int, ...], reason: str) -> None:
    model = deepcopy(build())
    if build is not tiny_variance:
        randomize(model)
    x = torch.randn(shape, dtype=next(model.parameters()).dtype) * 1e-3

    tried(FOLD, model, (x,), reason)


@rows("build shape reason", CONSTANTS_THAT_STAY)
def test_a_constant_stays(build: Any, shape: tuple[int, ...], reason: str) -> None:
    fast = optimized_by(FOLD, build().eval(), torch.randn(shape, dtype=torch.float64))

    assert {refusal.reason for refusal in fast.report.refused} == {reason}
    assert fast.report.fired == ()


@rows("function outcome", alike(0, NOT_AFFINE))
def test_what_is_not_affine_in_one_value_is_passed_over(function: Any, outcome: Any) -> None:
    fast = optimized_by(FOLD, Over(function, conv(), 4, 1, 1).eval(), torch.randn(IMAGE).double())

    assert_outcome(FOLD, fast, outcome)


def test_weights_that_would_lose_their_digits_in_float16_are_left_alone() -> None:
    model = Over(lambda y, c: y * 1e-6, conv(bias=False), 1).half().eval()

    assert_outcome(FOLD, optimized_by(FOLD, model, 100 * torch.randn(IMAGE).half()), OVERFLOW)


def test_channels_that_are_switched_off_do_not_stop_a_fold() -> None:
    model, x = nn.Sequential(conv(), nn.BatchNorm2d(4)).eval().half(), torch.randn(IMAGE).half()
    nn.init.zeros_(model[1].weight)

    fast = optimized_by(FOLD, model, x)

    assert fast.report.counts() == {FOLD: 1}
    optimizer.check(model, fast, x)


def test_an_empty_layer_is_folded() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        layer = nn.Linear(0, 4)
    model = nn.Sequential(layer, nn.BatchNorm1d(4)).double().eval()

    tried(FOLD, model, (torch.randn(5, 0).double(),), 1)


def test_a_folded_parameter_can_be_written() -> None:
    model = Forward(lambda m, x: m.linear(x) - 1.0, linear=nn.Linear(3, 4, bias=False))
    fast = optimized_by(FOLD, model.double().eval(), torch.ones(2, 3, dtype=torch.float64))
    fast.load_state_dict(fast.state_dict())

    assert fast.report.counts() == {FOLD: 1}
    assert all(parameter.is_contiguous() for parameter in fast.parameters())


def test_layers_that_do_not_fit_one_another_stay() -> None:
    fast = optimized_by(FOLD, nn.Sequential(conv(), batchnorm(2, 1)).eval())

    assert_outcome(FOLD, fast, "the number of features differs")
    with pytest.raises(RuntimeError, match="running_mean"):
        fast(torch.randn(2, 3, 6, 6))


def test_no_rank_is_guessed_without_example_inputs() -> None:
    model = nn.Sequential(nn.Linear(3, 4), batchnorm(1)).double().eval()

    tried(FOLD, model, (), UNKNOWN, inputs_like([(5, 3)], "random", 0))


def test_another_rank_than_the_example_is_an_error() -> None:
    fast = tried_on(FOLD, nn.Sequential(nn.Linear(3, 4), batchnorm(1)), (5, 3), 1, (4, 3))

    with pytest.raises(optimizer.InputError, match="2 dimensions and got 3"):
        fast(torch.randn(2, 4, 3).double())


def test_a_constant_that_widens_what_has_no_elements_is_guarded() -> None:
    held = {"layer": nn.ConvTranspose2d(4, 4, 3), "scale": parameter(4, 1, 1)}
    model = Forward(lambda m, x: m.fc(m.layer(x) * m.scale), fc=nn.Linear(5, 2), **held)
    fast = tried_on(FOLD, model, (2, 4, 3, 3), 1, (0, 4, 3, 3))

    with pytest.raises(optimizer.InputError, match="float64 and got"):
        fast(torch.empty(0, 4, 3, 3))  # a layer of no rows leaves it, and the product does not


def test_a_constant_that_widens_what_autocast_narrows_stays() -> None:
    scale = nn.Parameter(torch.linspace(0.5, 2.0, 4))
    model = Forward(lambda m, x: m.fc(x) * m.scale, fc=nn.Linear(4, 4), scale=scale).eval()
    x = torch.ones(2, 4)

    with torch.autocast("cpu", torch.bfloat16):
        fast: Any = optimizer.optimize(model, x, check=None, level=1)

        assert fast(x).dtype == model(x).dtype == torch.float32
    reason = "autocast gives the layer another dtype than the constant"
    assert reason in [refusal.reason for refusal in fast.report.refused]


@pytest.mark.parametrize("dimensions", [2, 3])
def test_single_elements_lie_in_memory_as_before(dimensions: int) -> None:
    layout = (torch.channels_last, torch.channels_last_3d)[dimensions - 2]
    kind, pool = ((nn.Conv2d, nn.AdaptiveAvgPool2d), (nn.Conv3d, nn.AdaptiveAvgPool3d))[
        dimensions - 2
    ]
    model = nn.Sequential(pool(1), kind(4, 4, 1), batchnorm(dimensions), pool(2)).double().eval()
    x = torch.randn(2, 4, *[3] * dimensions).double().contiguous(memory_format=layout)

    fast = tried(FOLD, model, (x,), "its output may be laid out otherwise")

    assert fast(x).stride() == model(x).stride()
    assert not optimized_by(FOLD, model, x.contiguous()).report.refused


WIDE = (2, 4, 6, 6)


def plus(x: Tensor, constant: Tensor) -> Tensor:
    return x + constant


def valid(kernel: int = 3, **settings: Any) -> nn.Module:
    return nn.Conv2d(4, 6, kernel, **settings)


def behind(norm: nn.Module, layer: nn.Module) -> nn.Module:
    return randomize(nn.Sequential(norm, layer).eval())


def norm(channels: int = 4) -> nn.Module:
    return nn.BatchNorm2d(channels)


NORMALIZED = function_of("x, c", "(x - 0.485) / c")
FOLDS = {
    "BatchNorm2d": (behind(norm(), valid()), WIDE),
    "BatchNorm2d without bias": (behind(norm(), valid(1, bias=False)), WIDE),
    "BatchNorm3d": (behind(nn.BatchNorm3d(4), nn.Conv3d(4, 6, 2)), (2, 4, 3, 3, 3)),
    "BatchNorm1d and Conv1d": (behind(nn.BatchNorm1d(4), nn.Conv1d(4, 6, 2)), (2, 4, 5)),
    "BatchNorm1d and Linear": (behind(nn.BatchNorm1d(4), nn.Linear(4, 6)), (5, 4)),
    "groups": (behind(norm(), valid(groups=2)), WIDE),
    "depthwise": (behind(norm(), nn.Conv2d(4, 8, 3, groups=4)), WIDE),
    "stride and dilation": (behind(norm(), valid(2, stride=2, dilation=2)), WIDE),
    "padding by name, of nothing": (behind(norm(), valid(padding="valid")), WIDE),
    "padding to the same size, of nothing": (behind(norm(), valid(1, padding="same")), WIDE),
    "padding by reflection": (behind(norm(), valid(padding=1, padding_mode="reflect")), WIDE),
    "padding by wrapping around": (behind(norm(), valid(padding=2, padding_mode="circular")), WIDE),
    "a product and zeros": (Before(times, valid(padding=1), 4, 1, 1), WIDE),
    "a product and a transposed layer": (
        Before(times, nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), 1, 4, 1, 1), WIDE,
    ),
    "a sum": (Before(plus, valid(), 4, 1, 1), WIDE),
    "a sum over the last dimension": (Before(plus, nn.Linear(4, 6), 4), (2, 3, 4)),
    "an image without a batch": (Before(plus, valid(), 4, 1, 1), WIDE[1:]),
    "the normalization of an input": (Before(NORMALIZED, valid(), 1, 4, 1, 1), WIDE),
    "a second reader of its shape": (
        Before(function_of("x, c", "(y := x * c, y.ndim)[0]"), valid(), 4, 1, 1), WIDE,
    ),
}  # fmt: skip


@rows("build shape", FOLDS)
def test_folds_forward(build: Any, shape: tuple[int, ...]) -> None:
    model = randomize(deepcopy(build).double().eval())
    inputs = inputs_like([shape], "random", 0)

    fast = optimized_by(FORWARD, model, *inputs)

    assert set(fast.report.counts()) == {FORWARD}
    assert not {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d} & set(callees(fast))
    assert {operator.mul, operator.add, operator.sub}.isdisjoint(callees(fast))
    assert_equivalent(model, fast, inputs)


WIDENED = {
    "an input": times,
    "the normalization of an input": NORMALIZED,
    "two constants": lambda x, c: (x * c) / c,
    "what else computes": lambda x, c: x.relu() * c,
}


@pytest.mark.parametrize("case", WIDENED)
@pytest.mark.parametrize("shape", [WIDE, WIDE[1:]], ids=str)
def test_constants_repeat_a_single_channel(case: str, shape: tuple[int, ...]) -> None:
    model = randomize(Before(WIDENED[case], valid(), 4, 1, 1).double().eval())

    fast = optimized_by(FORWARD, model, *inputs_like([shape], "random", 0))

    assert FORWARD in fast.report.counts()
    gray = (*shape[:-3], 1, *shape[-2:])
    assert_equivalent(model, fast, inputs_like([gray], "random", 1))


GRAY = (2, 1, 6, 6)
SINGLE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "an example binds nobody": (
        lambda: Before(lambda x, c: x * c * c, valid(), 4, 1, 1), GRAY, WIDE,
    ),
    "other readers see it": (
        lambda: Forward(
            lambda m, x: (m.layer((y := x - 0.5) * m.c), y), layer=valid(), c=torch.rand(4, 1, 1)
        ), WIDE, GRAY,
    ),
    "a layer fixes no other axis": (
        lambda: nn.Sequential(nn.Linear(6, 6), Before(times, valid(), 4, 1, 1)), WIDE, GRAY,
    ),
}  # fmt: skip


@rows("build shape other", SINGLE)
def test_a_single_channel(build: Any, shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    tried_on(FORWARD, build(), shape, 1, other)


def test_a_layer_fixes_its_channels() -> None:
    scale = torch.rand(4) + 0.5
    model = Forward(lambda m, x: m.layer(m.layer(x) * m.c), layer=nn.Linear(4, 4), c=scale)

    fast = tried_on(FORWARD, model, (3, 4), 1)

    assert [node.op for node in fast.graph.nodes if node.op == "call_method"] == []


def test_a_pair_that_is_called_twice_is_folded_once() -> None:
    block = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))

    fast = tried_on(FORWARD, nn.Sequential(block, nn.ReLU(), block), WIDE, 2)

    calls = [node.target for node in fast.graph.nodes if node.op == "call_module"]
    assert calls[0] == calls[-1]


def training_before() -> nn.Module:
    model = nn.Sequential(norm(), valid()).eval()
    model[0].train()
    return model


def reading(text: str) -> nn.Module:
    return Forward(text, layer=valid()).eval().requires_grad_(False)


def with_mean(mean: float) -> nn.Module:
    model = nn.Sequential(norm(), valid()).eval()
    nn.init.constant_(model[0].running_mean, mean)
    return model


ZEROS = "the layer pads with zeros, which are not shifted"
SHAPE = "the constant changes the shape"
AFFINES_THAT_STAY = {
    "zero padding": (lambda: behind(norm(), valid(padding=1)), torch.randn(WIDE), ZEROS),
    "zero padding on one side": (
        lambda: behind(norm(), valid(2, padding="same")), torch.randn(WIDE), ZEROS,
    ),
    "a transposed layer": (
        lambda: behind(norm(), nn.ConvTranspose2d(4, 6, 3)), torch.randn(WIDE), ZEROS,
    ),
    "training mode": (
        training_before, torch.randn(WIDE),
        "BatchNorm is in training mode and uses batch statistics",
    ),
    "BatchNorm2d and Linear": (
        lambda: behind(norm(), nn.Linear(4, 4)), torch.randn(2, 4, 4, 4),
        "BatchNorm normalizes another axis than the layer's",
    ),
    "a second reader": (
        lambda: Before(lambda x, c: (y := x * c) + y.mean(), valid(), 4, 1, 1), torch.randn(WIDE),
        "",
    ),
    "an output": (
        lambda: reading("(m.layer(y := x * 0.5), y)"), torch.randn(WIDE), READ_ELSEWHERE,
    ),
    "an image of bytes": (
        lambda: Before(lambda x, c: x / 255.0, valid(), 1),
        torch.randint(0, 256, WIDE, dtype=torch.uint8), "dtype or device differ",
    ),
    "one channel made four": (
        lambda: Before(times, valid(), 4, 1, 1), torch.randn(2, 1, 6, 6), SHAPE,
    ),
    "a dimension that the constant adds": (
        lambda: Before(times, valid(), 4, 1, 1), torch.randn(6, 6), SHAPE,
    ),
    "weights that the forward writes": (
        lambda: reading("(m.layer.weight.mul_(2), m.layer(x * 2))[1]"), torch.randn(WIDE), WRITTEN,
    ),
    "a mean far beyond the deviation": (
        lambda: with_mean(100.0), torch.randn(WIDE),
        "the shift is so large that it would cancel after the layer only",
    ),
}  # fmt: skip


@rows("build x reason", AFFINES_THAT_STAY)
def test_an_affine_stays(build: Any, x: Tensor, reason: str) -> None:
    fast = optimized_by(FORWARD, build().float(), x)

    assert {refusal.reason for refusal in fast.report.refused} == ({reason} if reason else set())
    assert fast.report.fired == ()


def test_another_dtype_than_the_example_is_an_error() -> None:
    model = Before(lambda x, c: x / 255.0, valid(), 1).float().eval()
    fast = optimized_by(FORWARD, model, torch.rand(WIDE))

    with pytest.raises(optimizer.InputError, match=r"torch\.float32 and got torch\.uint8"):
        fast(torch.randint(0, 256, WIDE, dtype=torch.uint8))


def test_without_example_inputs_nothing_is_folded_forward() -> None:
    tried(FORWARD, nn.Sequential(norm(), valid()).eval(), (), UNKNOWN)


def test_a_batchnorm_may_lay_its_output_out_anew() -> None:
    model = Forward(
        lambda m, x: torch.stack((y := m.pair(torch.relu(x[:, :1])), y), 1),
        pair=nn.Sequential(norm(1), nn.Conv2d(1, 1, 1)),
    ).eval()
    x = torch.rand(2, 4, 4, 4).contiguous(memory_format=torch.channels_last)

    fast = tried(FORWARD, model, (x,), "the affine lays its output out otherwise")

    assert fast(x).stride() == model(x).stride()


def test_a_batchnorm_of_no_elements_takes_any_channels() -> None:
    layer, scale = nn.Conv1d(2, 2, 1), torch.rand(2, 1)
    model = Forward(lambda m, x: m.c(m.bn(x) * m.s), bn=nn.BatchNorm1d(2), c=layer, s=scale).eval()
    fast = optimized_by(FORWARD, model, torch.empty(0, 2, 3))

    assert fast.report.counts()[FORWARD] >= 1
    assert_equivalent(model, fast, (torch.empty(0, 1, 3),))


def test_what_the_layer_would_keep_for_gradients_must_not_be_written_later() -> None:
    forward = lambda m, x: m.layer((y := x + 1.0) * 0.5) + y.mul_(2.0).sum()  # noqa: E731
    model, x = Forward(forward, layer=nn.Linear(3, 3)).eval(), torch.randn(2, 3, requires_grad=True)

    reason = "what the layer would keep for gradients is written later"
    tried(FORWARD, model, (x.detach(),), reason)(x).sum().backward()

    assert x.grad is not None
