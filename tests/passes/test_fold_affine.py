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
from tests.single_pass import Forward, assert_as_near_to_the_truth, callees, optimized_by

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


IMAGE = (2, 3, 6, 6)
conv = partial(nn.Conv2d, 3, 4, 3)
LAYERS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "linear": (lambda: [nn.Linear(3, 4), batchnorm(1)], (5, 3)),
    "linear without bias": (lambda: [nn.Linear(3, 4, bias=False), batchnorm(1)], (5, 3)),
    "conv1d": (lambda: [nn.Conv1d(3, 4, 3), batchnorm(1)], (2, 3, 8)),
    "conv1d as long as wide": (lambda: [nn.Conv1d(3, 4, 3), batchnorm(1)], (2, 3, 6)),
    "conv2d": (lambda: [conv(), batchnorm(2)], IMAGE),
    "conv3d": (lambda: [nn.Conv3d(3, 4, 2), batchnorm(3)], (2, 3, 4, 4, 4)),
    "conv without bias": (lambda: [conv(bias=False), batchnorm(2)], IMAGE),
    "no affine": (lambda: [conv(), batchnorm(2, affine=False)], IMAGE),
    "no affine, no bias": (lambda: [conv(bias=False), batchnorm(2, affine=False)], IMAGE),
    "groups, stride, padding, dilation": (
        lambda: [nn.Conv2d(4, 4, 3, 2, padding=1, dilation=2, groups=2), batchnorm(2)],
        (2, 4, 9, 9),
    ),
    "depthwise": (lambda: [nn.Conv2d(4, 4, 3, groups=4), batchnorm(2)], (2, 4, 6, 6)),
    "padding to the same size": (lambda: [conv(padding="same"), batchnorm(2)], IMAGE),
    "padding by reflection": (
        lambda: [conv(padding=1, padding_mode="reflect"), batchnorm(2)], IMAGE,
    ),
    "two BatchNorms": (lambda: [conv(), batchnorm(2), batchnorm(2, eps=0.25)], IMAGE),
    "momentum None": (lambda: [conv(), batchnorm(2, momentum=None)], IMAGE),
}  # fmt: skip


@pytest.mark.parametrize("regime", ["random", "dyadic", "ill"])
@pytest.mark.parametrize("case", LAYERS)
def test_folds_into_each_kind_of_layer(case: str, regime: str) -> None:
    build, shape = LAYERS[case]
    model = randomize(nn.Sequential(*build()).double().eval(), regime)
    inputs = inputs_like([shape], regime, 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == [type(model[0])]  # type: ignore[index]
    assert_equivalent(model, fast, inputs)


def normalized(forward: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A model whose forward gets weights `w` and `b`, a layer and a norm, and statistics."""
    return lambda: Forward(forward, **convolution(), **statistics(), conv=conv(), bn=batchnorm(2))


class Conv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


SPELLINGS: dict[str, Callable[[], nn.Module]] = {
    "keyword calls": normalized(lambda m, x: m.bn(input=m.conv(input=x))),
    "F.conv2d": normalized(lambda m, x: m.bn(F.conv2d(x, m.w, m.b))),
    "F.conv2d without bias": normalized(lambda m, x: m.bn(F.conv2d(x, m.w))),
    "F.conv2d with keywords": normalized(
        lambda m, x: m.bn(F.conv2d(input=x, weight=m.w, bias=m.b, padding=1, stride=(2, 1)))
    ),
    "torch.conv2d": normalized(lambda m, x: m.bn(torch.conv2d(x, m.w, m.b, 2))),
    "F.batch_norm": normalized(
        lambda m, x: F.batch_norm(m.conv(x), m.mean, m.var, m.gain, m.shift, False, 0.1, EPS)
    ),
    "F.batch_norm with keywords": normalized(
        lambda m, x: F.batch_norm(
            m.conv(x), running_mean=m.mean, running_var=m.var, bias=m.shift, weight=m.gain, eps=EPS
        )
    ),
    "F.batch_norm in the module's mode": normalized(
        lambda m, x: F.batch_norm(m.conv(x), m.mean, m.var, training=m.training, eps=EPS)
    ),
    "both as functions": normalized(
        lambda m, x: F.batch_norm(F.conv2d(x, m.w, m.b), m.mean, m.var, m.gain, m.shift, eps=EPS)
    ),
    "a function on the parameters of a module": normalized(
        lambda m, x: m.bn(F.conv2d(x, m.conv.weight, m.conv.bias))
    ),
    "a subclass that calls its base class": lambda: nn.Sequential(Conv(3, 4, 3), batchnorm(2)),
    "layers in a dictionary": lambda: Forward(
        lambda m, x: m.layers["norm"](m.layers["first"](x)),
        layers=nn.ModuleDict({"first": conv(), "norm": batchnorm(2)}),
    ),
}


@pytest.mark.parametrize("regime", ["random", "dyadic"])
@pytest.mark.parametrize("case", SPELLINGS)
def test_folds_in_every_spelling_of_a_convolution(case: str, regime: str) -> None:
    model = randomize(SPELLINGS[case]().double().eval(), regime)
    inputs = inputs_like([IMAGE], regime, 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == [nn.Conv2d]
    assert_equivalent(model, fast, inputs)


@pytest.mark.parametrize(
    ("function", "kind", "shape"),
    [
        (F.linear, nn.Linear, (5, 3)),
        (lambda x, w, b: F.linear(input=x, weight=w, bias=b), nn.Linear, (5, 3)),
        (F.conv1d, nn.Conv1d, (2, 3, 6)),
        (torch.conv3d, nn.Conv3d, (2, 3, 4, 4, 4)),
    ],
)
def test_folds_into_a_function_of_any_rank(
    function: Callable[..., Tensor], kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    dimensions = len(shape) - 2
    model = Forward(
        lambda m, x: m.bn(function(x, m.w, m.b)),
        bn=batchnorm(dimensions or 1),
        **convolution(dimensions),
    )
    randomize(model.double().eval())
    inputs = inputs_like([shape], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == [kind]
    assert_equivalent(model, fast, inputs)


@pytest.mark.parametrize("span", [(0, 1), (0, -2), (-3, -2)])
def test_a_batchnorm_behind_a_flatten_folds_into_the_linear(
    span: tuple[int, int],
) -> None:
    """As timm's LeViT does: a Linear on (N, L, C), normalized as (N * L, C)."""
    model = Forward(
        lambda m, x: m.bn((y := m.layer(x)).flatten(*span)).reshape_as(y),
        layer=nn.Linear(3, 4),
        bn=batchnorm(1),
    )
    randomize(model.double().eval())
    inputs = inputs_like([(2, 5, 3)], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == [nn.Linear, torch.flatten, "reshape_as"]
    assert_equivalent(model, fast, inputs)
    with pytest.raises(optimizer.InputError, match="3 dimensions and got 4"):
        fast(torch.randn(2, 5, 3, 3).double())


def test_without_example_inputs_a_rank_that_the_layers_imply_suffices() -> None:
    model = randomize(nn.Sequential(conv(), batchnorm(2)).double().eval())

    fast = optimized(model)

    assert callees(fast) == [nn.Conv2d]
    assert_equivalent(model, fast, inputs_like([IMAGE], "random", 0))


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
        conv=conv(),
        first=batchnorm(2),
        second=batchnorm(2, eps=0.5),
    )
    randomize(model.double().eval())
    inputs = inputs_like([IMAGE], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast)[:2] == [nn.Conv2d, nn.Conv2d]
    assert fast.report.counts() == {NAME: 2}
    assert_equivalent(model, fast, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_fold_is_computed_in_float64_and_rounded_once(dtype: torch.dtype) -> None:
    model = randomize(nn.Sequential(conv(), batchnorm(2)), "random").to(dtype).eval()
    layer, bn = model
    scale = bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt()
    weight = layer.weight.double() * scale[:, None, None, None]
    bias = scale * (layer.bias.double() - bn.running_mean.double()) + bn.bias.double()

    fast = optimized(model, torch.randn(2, 3, 6, 6, dtype=dtype))

    folded = module_of(next(node for node in fast.graph.nodes if node.op == "call_module"))
    assert torch.allclose(folded.weight.double(), weight, rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.allclose(folded.bias.double(), bias, rtol=torch.finfo(dtype).eps, atol=1e-12)
    assert folded.weight.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_fold_in_low_precision_is_as_near_to_the_truth_as_the_model(dtype: torch.dtype) -> None:
    model = randomize(nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()))

    assert_as_near_to_the_truth(NAME, model.eval(), (4, 8, 12, 12), dtype)


def test_a_frozen_layer_stays_frozen() -> None:
    model = nn.Sequential(conv().requires_grad_(False), batchnorm(2)).eval()

    fast = optimized(model, torch.randn(2, 3, 6, 6))

    assert not any(folded.requires_grad for folded in fast.parameters())


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
REFUSALS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
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


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    build, shape, reason = REFUSALS[case]
    model = deepcopy(build())
    if case != "weights beyond float16":
        randomize(model)
    x = torch.randn(shape, dtype=next(model.parameters()).dtype) * 1e-3

    fast = optimized(model, x)

    assert [each.split(":")[0] for each in reasons(fast)] == [reason]
    assert fast.report.fired == ()
    # Copies: a forward that writes a parameter writes the one that both share.
    assert_equivalent(deepcopy(model), deepcopy(fast), (x,), exact=True)


def test_refuses_layers_that_do_not_fit_one_another() -> None:
    model = nn.Sequential(conv(), batchnorm(2, 1)).eval()

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
    conv = (nn.Conv2d, nn.Conv3d)[dimensions - 2](4, 4, 1)
    pool = (nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[dimensions - 2]
    model = nn.Sequential(pool(1), conv, batchnorm(dimensions), pool(2)).double().eval()
    x = torch.randn(2, 4, *[3] * dimensions).double().contiguous(memory_format=layout)

    fast = optimized(model, x)

    assert fast(x).stride() == model(x).stride()
    assert reasons(fast) == {"its output may be laid out otherwise"}
    assert not reasons(optimized(model, x.contiguous()))
