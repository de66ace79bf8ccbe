"""BatchNorm folds into the Linear or Conv before it, in every spelling, or says why not."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.core.node import module_of
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.single_pass import Forward, callees, optimized_by

NAME = "fold_affine"
optimized = partial(optimized_by, NAME)
EPS = 0.125  # a power of two: then a correct fold of dyadic values rounds nothing


def reasons(fast: Any) -> set[str]:
    return {refusal.reason for refusal in fast.report.refused if refusal.name == NAME}


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


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), batchnorm(1)), (5, 3)),
    "linear without bias": (
        lambda: nn.Sequential(nn.Linear(3, 4, bias=False), batchnorm(1)),
        (5, 3),
    ),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), batchnorm(1)), (2, 3, 8)),
    "conv1d as long as wide": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), batchnorm(1)),
        (2, 3, 6),
    ),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), batchnorm(2)), (2, 3, 6, 6)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(3, 4, 2), batchnorm(3)), (2, 3, 4, 4, 4)),
    "conv without bias": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), batchnorm(2)),
        (2, 3, 6, 6),
    ),
    "no affine": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), batchnorm(2, affine=False)),
        (2, 3, 6, 6),
    ),
    "no affine, no bias": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), batchnorm(2, affine=False)),
        (2, 3, 6, 6),
    ),
    "groups, stride, padding, dilation": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3, stride=2, padding=1, dilation=2, groups=2), batchnorm(2)
        ),
        (2, 4, 9, 9),
    ),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), batchnorm(2)), (2, 4, 6, 6)),
    "padding to the same size": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), batchnorm(2)),
        (2, 3, 6, 6),
    ),
    "padding by reflection": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), batchnorm(2)),
        (2, 3, 6, 6),
    ),
    "two BatchNorms": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), batchnorm(2), batchnorm(2, eps=0.25)),
        (2, 3, 6, 6),
    ),
    "momentum None": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), batchnorm(2, momentum=None)),
        (2, 3, 6, 6),
    ),
}


@pytest.mark.parametrize("regime", ["random", "dyadic", "ill"])
@pytest.mark.parametrize("case", LAYERS)
def test_folds_into_each_kind_of_layer(case: str, regime: str) -> None:
    build, shape = LAYERS[case]
    model = randomize(build().double().eval(), regime)
    inputs = inputs_like([shape], regime, 0)

    fast = optimized(model, *inputs)

    kind = type(model[0])  # type: ignore[index]
    assert callees(fast) == [kind]
    assert_equivalent(model, fast, inputs)


SPELLINGS: dict[str, Callable[[], nn.Module]] = {
    "keyword calls": lambda: Forward(
        lambda m, x: m.bn(input=m.conv(input=x)), conv=nn.Conv2d(3, 4, 3), bn=batchnorm(2)
    ),
    "F.conv2d": lambda: Forward(
        lambda m, x: m.bn(F.conv2d(x, m.w, m.b)), bn=batchnorm(2), **convolution()
    ),
    "F.conv2d without bias": lambda: Forward(
        lambda m, x: m.bn(F.conv2d(x, m.w)), bn=batchnorm(2), **convolution(bias=False)
    ),
    "F.conv2d with keywords": lambda: Forward(
        lambda m, x: m.bn(F.conv2d(input=x, weight=m.w, bias=m.b, padding=1, stride=(2, 1))),
        bn=batchnorm(2),
        **convolution(),
    ),
    "torch.conv2d": lambda: Forward(
        lambda m, x: m.bn(torch.conv2d(x, m.w, m.b, 2)), bn=batchnorm(2), **convolution()
    ),
    "F.batch_norm": lambda: Forward(
        lambda m, x: F.batch_norm(m.conv(x), m.mean, m.var, m.gain, m.shift, False, 0.1, EPS),
        conv=nn.Conv2d(3, 4, 3),
        **statistics(),
    ),
    "F.batch_norm with keywords": lambda: Forward(
        lambda m, x: F.batch_norm(
            m.conv(x), running_mean=m.mean, running_var=m.var, bias=m.shift, weight=m.gain, eps=EPS
        ),
        conv=nn.Conv2d(3, 4, 3),
        **statistics(),
    ),
    "F.batch_norm in the module's mode": lambda: Forward(
        lambda m, x: F.batch_norm(m.conv(x), m.mean, m.var, training=m.training, eps=EPS),
        conv=nn.Conv2d(3, 4, 3),
        **statistics(),
    ),
    "both as functions": lambda: Forward(
        lambda m, x: F.batch_norm(F.conv2d(x, m.w, m.b), m.mean, m.var, m.gain, m.shift, eps=EPS),
        **convolution(),
        **statistics(),
    ),
    "a function on the parameters of a module": lambda: Forward(
        lambda m, x: m.bn(F.conv2d(x, m.conv.weight, m.conv.bias)),
        conv=nn.Conv2d(3, 4, 3),
        bn=batchnorm(2),
    ),
    "a subclass that calls its base class": lambda: nn.Sequential(Conv(3, 4, 3), batchnorm(2)),
    "layers in a dictionary": lambda: Forward(
        lambda m, x: m.layers["norm"](m.layers["first"](x)),
        layers=nn.ModuleDict({"first": nn.Conv2d(3, 4, 3), "norm": batchnorm(2)}),
    ),
}


class Conv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("regime", ["random", "dyadic"])
@pytest.mark.parametrize("case", SPELLINGS)
def test_folds_in_every_spelling_of_a_convolution(case: str, regime: str) -> None:
    model = randomize(SPELLINGS[case]().double().eval(), regime)
    inputs = inputs_like([(2, 3, 6, 6)], regime, 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == [nn.Conv2d]
    assert_equivalent(model, fast, inputs)


@pytest.mark.parametrize(
    "function", [F.linear, lambda x, w, b: F.linear(input=x, weight=w, bias=b)]
)
def test_folds_into_a_linear_function(function: Callable[..., Tensor]) -> None:
    model = Forward(
        lambda m, x: m.bn(function(x, m.w, m.b)), w=parameter(4, 3), b=parameter(4), bn=batchnorm(1)
    )
    randomize(model.double().eval())
    inputs = inputs_like([(5, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == [nn.Linear]
    assert_equivalent(model, fast, inputs)


@pytest.mark.parametrize(
    ("function", "kind", "shape"),
    [(F.conv1d, nn.Conv1d, (2, 3, 6)), (torch.conv3d, nn.Conv3d, (2, 3, 4, 4, 4))],
)
def test_folds_into_a_convolution_function_of_any_rank(
    function: Callable[..., Tensor], kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    dimensions = len(shape) - 2
    model = Forward(
        lambda m, x: m.bn(function(x, m.w, m.b)),
        bn=batchnorm(dimensions),
        **convolution(dimensions),
    )
    randomize(model.double().eval())
    inputs = inputs_like([shape], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == [kind]
    assert_equivalent(model, fast, inputs)


class Flattened(nn.Module):
    """timm's LeViT: a Linear on (N, L, C), normalized as (N * L, C)."""

    def __init__(self, *span: int) -> None:
        super().__init__()
        self.layer, self.bn = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.span = span

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.bn(x.flatten(*self.span)).reshape_as(x)


@pytest.mark.parametrize("span", [(0, 1), (0, -2), (-3, -2)])
def test_a_batchnorm_behind_a_flatten_folds_into_the_linear(
    span: tuple[int, int],
) -> None:
    model = randomize(Flattened(*span).double().eval())
    inputs = inputs_like([(2, 5, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == [nn.Linear, torch.flatten, "reshape_as"]
    assert_equivalent(model, fast, inputs)
    with pytest.raises(optimizer.InputError, match="3 dimensions and got 4"):
        fast(torch.randn(2, 5, 3, 3).double())


def test_without_example_inputs_a_rank_that_the_layers_imply_suffices() -> None:
    model = randomize(nn.Sequential(nn.Conv2d(3, 4, 3), batchnorm(2)).double().eval())

    fast = optimized(model)

    assert callees(fast) == [nn.Conv2d]
    assert_equivalent(model, fast, inputs_like([(2, 3, 6, 6)], "random", 0))


def test_a_pair_called_twice_is_folded_once_and_called_twice() -> None:
    block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), batchnorm(2))
    model = randomize(nn.Sequential(block, nn.ReLU(), block).double().eval())
    inputs = inputs_like([(2, 4, 6, 6)], "random", 0)

    fast = optimized(model, *inputs)

    calls = [node for node in fast.graph.nodes if node.op == "call_module"]
    assert callees(fast) == [nn.Conv2d, F.relu, nn.Conv2d]
    assert calls[0].target == calls[1].target
    assert_equivalent(model, fast, inputs)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("layer", [nn.Conv1d(3, 4, 2, padding=1), nn.ConvTranspose1d(3, 4, 2)])
def test_channels_that_came_last_do_not_after_the_batchnorm(layer: nn.Module, length: int) -> None:
    model = Forward(lambda self, x: self.norm(self.layer(x.mT)), layer=layer, norm=batchnorm(1))
    randomize(model.double().eval())

    fast = optimized(model, *inputs_like([(2, length, 3)], "random", 0))

    assert fast.report.counts() == {NAME: 1}
    assert_equivalent(model, fast, inputs_like([(2, 1, 3)], "random", 1))


def test_a_layer_before_two_batchnorms_gets_two_folded_copies() -> None:
    model = Forward(
        lambda m, x: m.first(m.conv(x)) - m.second(m.conv(x)),
        conv=nn.Conv2d(3, 4, 3),
        first=batchnorm(2),
        second=batchnorm(2, eps=0.5),
    )
    randomize(model.double().eval())
    inputs = inputs_like([(2, 3, 6, 6)], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast)[:2] == [nn.Conv2d, nn.Conv2d]
    assert fast.report.counts() == {NAME: 2}
    assert_equivalent(model, fast, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_fold_is_computed_in_float64_and_rounded_once(dtype: torch.dtype) -> None:
    model = randomize(nn.Sequential(nn.Conv2d(3, 4, 3), batchnorm(2)), "random").to(dtype).eval()
    conv, bn = model
    scale = bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt()
    weight = conv.weight.double() * scale[:, None, None, None]
    bias = scale * (conv.bias.double() - bn.running_mean.double()) + bn.bias.double()

    fast = optimized(model, torch.randn(2, 3, 6, 6, dtype=dtype))

    folded = module_of(next(node for node in fast.graph.nodes if node.op == "call_module"))
    assert torch.allclose(folded.weight.double(), weight, rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.allclose(folded.bias.double(), bias, rtol=torch.finfo(dtype).eps, atol=1e-12)
    assert folded.weight.dtype == dtype


def test_a_frozen_layer_stays_frozen() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3).requires_grad_(False), batchnorm(2)).eval()

    fast = optimized(model, torch.randn(2, 3, 6, 6))

    assert not any(folded.requires_grad for folded in fast.parameters())


def training() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), batchnorm(2)).eval()
    model[1].train()
    return model


def tiny_variance() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), batchnorm(1, eps=1e-7))
    nn.init.zeros_(model[1].running_var)
    nn.init.constant_(model[1].weight, 300.0)
    nn.init.uniform_(model[0].weight, 1.0, 2.0)
    return model.half()


class WritesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), batchnorm(2)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.conv.weight.mul_(2)
        return self.bn(self.conv(x))


class WritesStatistics(WritesWeight):
    def forward(self, x: Tensor) -> Tensor:
        self.bn.running_mean.add_(1)
        return self.bn(self.conv(x))


def refused(model: nn.Module, *shape: int, **settings: Any) -> tuple[nn.Module, Tensor]:
    return model, torch.randn(shape, **settings)


OTHER_AXIS = "BatchNorm normalizes another axis than the layer's"
READ_ELSEWHERE = "the layer's output is read elsewhere"
MIXES = "flattening mixes the layer's outputs"
WRITTEN = "the forward writes their tensors"
REFUSALS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], str]] = {
    "BatchNorm in training mode": (
        lambda: refused(training(), 2, 3, 6, 6),
        "BatchNorm is in training mode and uses batch statistics",
    ),
    "no running statistics": (
        lambda: refused(
            nn.Sequential(nn.Conv2d(3, 4, 3), batchnorm(2, track_running_stats=False)).eval(),
            *(2, 3, 6, 6),
        ),
        "BatchNorm tracks no running statistics and uses the batch's",
    ),
    "a second reader": (
        lambda: refused(
            Forward(
                lambda m, x: (y := m.conv(x), m.bn(y)), conv=nn.Conv2d(3, 4, 3), bn=batchnorm(2)
            ).eval(),
            *(2, 3, 6, 6),
        ),
        READ_ELSEWHERE,
    ),
    "a constant for each place": (
        lambda: refused(
            Forward(lambda m, x: m.fc(x) * m.c, fc=nn.Linear(3, 4), c=torch.ones(2, 4)).eval(),
            *(2, 3),
        ),
        "the constant is not one number a channel",
    ),
    "a constant of more dimensions": (
        lambda: refused(
            Forward(lambda m, x: m.fc(x) * m.c, fc=nn.Linear(3, 4), c=torch.ones(1, 1, 4)).eval(),
            *(2, 3),
        ),
        "the constant has more dimensions than what it is combined with",
    ),
    "Linear on (N, C, L) with L == C": (
        lambda: refused(nn.Sequential(nn.Linear(3, 4), batchnorm(1)).eval(), 2, 4, 3),
        OTHER_AXIS,
    ),
    "Linear on (N, C, L) with L != C": (
        lambda: refused(nn.Sequential(nn.Linear(3, 4), batchnorm(1, 5)).eval(), 2, 5, 3),
        OTHER_AXIS,
    ),
    "Linear on an image": (
        lambda: refused(nn.Sequential(nn.Linear(3, 4), batchnorm(2)).eval(), 2, 4, 5, 3),
        OTHER_AXIS,
    ),
    "Conv1d without a batch and L == C": (
        lambda: refused(nn.Sequential(nn.Conv1d(3, 4, 3), batchnorm(1)).eval(), 3, 6),
        OTHER_AXIS,
    ),
    "a bfloat16 layer and a float32 BatchNorm": (
        lambda: refused(
            nn.Sequential(nn.Conv2d(3, 4, 3).bfloat16(), batchnorm(2)).eval(),
            *(2, 3, 6, 6),
            dtype=torch.bfloat16,
        ),
        "dtype or device differ",
    ),
    "a forward that writes the layer's weight": (
        lambda: refused(WritesWeight().eval(), 2, 3, 6, 6),
        WRITTEN,
    ),
    "a forward that writes the running mean": (
        lambda: refused(WritesStatistics().eval(), 2, 3, 6, 6),
        WRITTEN,
    ),
    "weights beyond float16": (
        lambda: (tiny_variance().eval(), torch.full((2, 3), 1e-3, dtype=torch.float16)),
        "the folded weights overflow or underflow",
    ),
    "outputs that are flattened away": (
        lambda: refused(
            Forward(lambda m, x: m.layer(x).flatten(1) * 2, layer=nn.Linear(3, 4)).eval(), 2, 5, 3
        ),
        MIXES,
    ),
    "a flattened convolution": (
        lambda: refused(
            Forward(lambda m, x: m.layer(x).flatten(0, 1) * 2, layer=nn.Conv2d(3, 4, 3)).eval(),
            *(2, 3, 6, 6),
        ),
        MIXES,
    ),
    "a rank that depends on sizes": (
        lambda: refused(nn.Sequential(Squeeze(), nn.Linear(3, 4), batchnorm(1)).eval(), *(2, 1, 3)),
        "its rank depends on sizes, through a squeeze",
    ),
}


class Squeeze(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze()


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    build, reason = REFUSALS[case]
    model, x = build()
    if case != "weights beyond float16":
        randomize(model)

    fast = optimized(model, x)

    assert [each.split(":")[0] for each in reasons(fast)] == [reason]
    assert fast.report.fired == ()
    # Copies: a forward that writes a parameter writes the one that both share.
    assert_equivalent(deepcopy(model), deepcopy(fast), (x,), exact=True)


def test_refuses_layers_that_do_not_fit_one_another() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), batchnorm(2, 1)).eval()

    fast = optimized(model)

    assert reasons(fast) == {"the number of features differs"}
    with pytest.raises(RuntimeError, match="running_mean"):
        fast(torch.randn(2, 3, 6, 6))


def test_refuses_to_guess_a_rank_without_example_inputs() -> None:
    model = nn.Sequential(nn.Linear(3, 4), batchnorm(1)).eval()

    fast = optimized(model)

    assert reasons(fast) == {"the graph was captured without example inputs"}
    assert callees(fast) == [nn.Linear, nn.BatchNorm1d]


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)])
def test_another_rank_than_the_example_is_an_error(shape: tuple[int, ...]) -> None:
    model = randomize(nn.Sequential(nn.Linear(3, 4), batchnorm(1)).double().eval())
    x, other = torch.randn(5, 3).double(), torch.randn(shape).double()
    fast = optimized(model, x)

    if other.dim() == x.dim():
        assert_equivalent(model, fast, (other,))
        return
    with pytest.raises(optimizer.InputError, match="2 dimensions and got 3"):
        fast(other)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.linspace(0.5, 2.0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_a_constant_that_widens_what_autocast_narrows_stays() -> None:
    model, x = Scaled().eval(), torch.ones(2, 4)

    with torch.autocast("cpu", torch.bfloat16):
        fast: Any = optimizer.optimize(model, x, check=None, level=1)

        assert fast(x).dtype == model(x).dtype == torch.float32
    reason = "autocast gives the layer another dtype than the constant"
    assert reason in [refusal.reason for refusal in fast.report.refused]


@pytest.mark.parametrize("dimensions", [2, 3])
def test_single_elements_lie_in_memory_as_before(dimensions: int) -> None:
    layout = (torch.channels_last, torch.channels_last_3d)[dimensions - 2]
    conv = (nn.Conv2d, nn.Conv3d)[dimensions - 2](4, 4, 1)
    pool = (nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dimensions - 2]
    model = nn.Sequential(pool(1), conv, batchnorm(dimensions), pool(2)).double().eval()
    x = torch.randn(2, 4, *[3] * dimensions).double().contiguous(memory_format=layout)

    fast = optimized(model, x)

    assert fast(x).stride() == model(x).stride()
    assert reasons(fast) == {"its output may be laid out otherwise"}
    assert not reasons(optimized(model, x.contiguous()))
