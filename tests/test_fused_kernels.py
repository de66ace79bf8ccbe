"""Operators of a GPU in the place of a layer and its activation: cuDNN's faked, cublasLt's real."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import models
import optimizer
from optimizer.core.inputs import Call
from optimizer.lowering.autotune import Chooser
from optimizer.lowering.candidates import CANDIDATES
from optimizer.lowering.cudnn import can_fuse, with_fused_kernels
from optimizer.lowering.partition import name_of
from optimizer.lowering.policies import AS_IT_IS, POLICIES
from optimizer.lowering.trace import straight_line
from optimizer.verify.equivalence import BOUNDS

RELU, ADD_RELU = "cudnn_convolution_relu", "cudnn_convolution_add_relu"


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What cuDNN would answer. The arguments are held to torch's own schemas."""

    def cudnn_convolution_relu(*args: Any) -> torch.Tensor:
        _bound(RELU, args)
        return F.conv2d(*args).relu()

    def cudnn_convolution_add_relu(*args: Any) -> torch.Tensor:
        _bound(ADD_RELU, args)
        x, weight, z, alpha, *rest = args
        assert z.shape == F.conv2d(x, weight, *rest).shape
        return (F.conv2d(x, weight, *rest) + alpha * z).relu()

    monkeypatch.setattr(torch, RELU, cudnn_convolution_relu)
    monkeypatch.setattr(torch, ADD_RELU, cudnn_convolution_add_relu)
    with torch.no_grad():
        yield


def _bound(name: str, args: tuple[Any, ...]) -> None:
    meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    with pytest.raises(NotImplementedError):  # the arguments fit, and only the kernel is missing
        getattr(torch.ops.aten, name)(*meta)


class Layers(nn.Module):
    """What a test does with a convolution, another one, and a Linear."""

    def __init__(self, then: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, **({"padding": 1} | options))
        self.other = nn.Conv2d(4, 4, 1)
        self.linear = nn.Linear(8, 5)
        self.then = then

    def forward(self, x: torch.Tensor) -> Any:
        return (self.then(self, x),)


def region_of(then: Callable[..., Any], **options: Any) -> fx.GraphModule:
    torch.manual_seed(0)
    model = Layers(then, **options)
    return straight_line(model, list(model.parameters()), Call((image(),), {})).module


def image() -> torch.Tensor:
    return torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(1))


def calls(module: fx.GraphModule) -> list[str]:
    return [name_of(node) for node in module.graph.nodes if node.op.startswith("call")]


FUSED = [
    ("conv relu", lambda m, x: F.relu(m.conv(x)), [RELU]),
    ("conv relu method", lambda m, x: m.conv(x).relu(), [RELU]),
    ("two in a row", lambda m, x: m.conv(m.conv(x).relu()).relu(), [RELU, RELU]),
    ("sum", lambda m, x: F.relu(m.conv(x) + x), [ADD_RELU]),
    ("sum, other way round", lambda m, x: F.relu(x + m.conv(x)), [ADD_RELU]),
    ("sum of two", lambda m, x: torch.add(m.conv(x), m.other(x)).relu(), ["conv2d", ADD_RELU]),
    (
        "sum of what was fused",
        lambda m, x: F.relu(m.other(x) + m.conv(x).relu()),
        [RELU, ADD_RELU],
    ),
    ("numbers", lambda m, x: F.conv2d(x, m.conv.weight, None, 2, 1, 1, 1).relu(), [RELU]),
    ("keywords", lambda m, x: F.conv2d(x, m.conv.weight, padding=(1,)).relu(), [RELU]),
    ("linear", lambda m, x: m.linear(x).relu(), ["flatten", "t", "_addmm_activation", "view"]),
    (
        "linear of rows",
        lambda m, x: m.linear(x.flatten(0, 2)).relu(),
        ["flatten", "t", "_addmm_activation", "view"],
    ),
]


@pytest.mark.parametrize(
    ("then", "called"), [row[1:] for row in FUSED], ids=[row[0] for row in FUSED]
)
def test_it_gives_the_regions_answer(then: Callable[..., Any], called: list[str]) -> None:
    region, x = region_of(then), image()
    before = region.code
    fused = with_fused_kernels(region, [x])

    assert can_fuse(region)
    assert calls(fused) == called
    torch.testing.assert_close(fused(x * 2), region(x * 2))
    assert region.code == before


@pytest.mark.parametrize(
    "options", [{"bias": False}, {"groups": 2}, {"stride": 2}, {"dilation": (1, 2)}]
)
def test_convolutions_of_any_kind(options: dict[str, Any]) -> None:
    region, x = region_of(lambda m, x: m.conv(x).relu(), **options), image()
    fused = with_fused_kernels(region, [x])

    assert calls(fused) == [RELU]
    torch.testing.assert_close(fused(x), region(x))


def test_resnet50_takes_56_kernels() -> None:
    """Of 53 convolutions, 33 take their ReLU along and 16 the sum of a block and its ReLU."""
    model, x = models.load("resnet50").module, torch.randn(1, 3, 64, 64)
    portable = optimizer.optimize(model, x, level=1, check=None)
    line = straight_line(portable, list(portable.parameters()), Call((x,), {}))
    found = Counter(calls(with_fused_kernels(line.module, [x])))
    del found["flatten"]  # a view

    assert found == {RELU: 33, ADD_RELU: 16, "conv2d": 4} | dict.fromkeys(
        ("max_pool2d", "adaptive_avg_pool2d", "linear"), 1
    )
    assert found.total() == 56


def _gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    return F.gelu(x, approximate=approximate)


KEPT = [
    ("another reader", lambda m, x: (y := m.conv(x)).relu() + y),
    ("a sum that is read twice", lambda m, x: (y := m.conv(x) + x).relu() + y),
    ("an addend that is broadcast", lambda m, x: (m.conv(x) + x.mean((2, 3), True)).relu()),
    ("a number", lambda m, x: (m.conv(x) + 1).relu()),
    ("a weighted sum", lambda m, x: torch.add(m.conv(x), x, alpha=2).relu()),
    ("twice the same", lambda m, x: ((y := m.conv(x)) + y).relu()),
    ("no batch", lambda m, x: m.conv(x[0]).relu()),
    ("another activation", lambda m, x: m.conv(x).sigmoid()),
    ("gelu of a convolution", lambda m, x: _gelu(m.conv(x), "tanh")),
    ("exact gelu", lambda m, x: _gelu(m.linear(x), "none")),
    ("a linear without bias", lambda m, x: F.linear(x, m.linear.weight).relu()),
    ("a vector", lambda m, x: m.linear(x[0, 0, 0]).relu()),
    ("relu first", lambda m, x: m.conv(x.relu())),
]


@pytest.mark.parametrize("then", [row[1] for row in KEPT], ids=[row[0] for row in KEPT])
def test_what_no_operator_computes_stays(then: Callable[..., Any]) -> None:
    region, x = region_of(then), image()
    fused = with_fused_kernels(region, [x])

    assert calls(fused) == calls(region)
    torch.testing.assert_close(fused(x), region(x))


def test_padding_by_name_stays() -> None:
    region, x = region_of(lambda m, x: m.conv(x).relu(), padding="same"), image()

    assert calls(with_fused_kernels(region, [x])) == ["conv2d", "relu"]


def test_gelu_by_tanh_is_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def addmm_activation(*args: Any, use_gelu: bool) -> torch.Tensor:
        assert use_gelu
        return F.gelu(torch.addmm(*args), approximate="tanh")

    monkeypatch.setattr(torch, "_addmm_activation", addmm_activation)
    region, x = region_of(lambda m, x: _gelu(m.linear(x), "tanh")), image()

    torch.testing.assert_close(with_fused_kernels(region, [x])(x), region(x))


@pytest.fixture
def chooser(monkeypatch: pytest.MonkeyPatch) -> Chooser:
    """Chooses as on a GPU, where the last candidate is the fastest."""
    monkeypatch.setitem(POLICIES, "cpu", POLICIES["cuda"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    fast = {name: 1.0 / place for place, name in enumerate(CANDIDATES, 1)}
    monkeypatch.setattr(Chooser, "race", lambda self, runs, *rest: {n: fast[n] for n in runs})
    return Chooser(1.0, {})


def test_the_fastest_of_layouts_and_kernels_is_chosen(chooser: Chooser) -> None:
    region, x = region_of(lambda m, x: m.conv(x).relu()), image()
    program, _ = chooser(region, [x])
    [choice] = chooser.choices

    assert choice.chosen == "fused kernels, channels_last"
    assert list(choice.seconds) == [AS_IT_IS, choice.chosen, "channels_last", "fused kernels"]
    torch.testing.assert_close(program(x), region(x))


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (None, "has no attribute"),
        (lambda *args: F.conv2d(*args).relu() * 1.01, "relative error"),
        (lambda *args: F.conv2d(*args).relu().half(), "has dtype"),
        (lambda *args: F.conv2d(*args).nan_to_num(0).relu(), "it loses NaN"),
    ],
)
def test_a_kernel_that_is_no_good_is_rejected(
    chooser: Chooser, monkeypatch: pytest.MonkeyPatch, kernel: Any, reason: str
) -> None:
    monkeypatch.setattr(torch, RELU, kernel)
    if kernel is None:
        monkeypatch.delattr(torch, RELU)
    region, x = region_of(lambda m, x: m.conv(x).relu()), image()
    chooser(region, [x])
    [choice] = chooser.choices

    assert choice.chosen == "channels_last"
    assert reason in choice.rejected["fused kernels"]


@pytest.mark.parametrize(("factor", "accepted"), [(1.0, True), (1 + 1e-5, False)])
def test_rounding_beyond_the_bound_is_judged_by_float64(
    chooser: Chooser, monkeypatch: pytest.MonkeyPatch, factor: float, accepted: bool
) -> None:
    def otherwise_rounded(*args: Any) -> torch.Tensor:
        x, weight, bias, *sizes = args
        wide = F.conv2d(x.double(), weight.double(), bias.double(), *sizes)
        return (wide.relu() * factor).to(x.dtype)

    monkeypatch.setattr(torch, RELU, otherwise_rounded)
    monkeypatch.setitem(BOUNDS, torch.float32, 0.0)
    chooser(region_of(lambda m, x: m.conv(x).relu()), [image()])

    assert ("fused kernels" not in chooser.choices[0].rejected) is accepted


@pytest.mark.parametrize(
    ("options", "dtype", "name"),
    [
        ({}, torch.float32, "fused kernels"),
        ({}, torch.bfloat16, "fused kernels, channels_last"),
        ({"groups": 2}, torch.bfloat16, "fused kernels"),
    ],
)
def test_without_timing_only_what_is_known_to_pay_is_chosen(
    options: dict[str, Any], dtype: torch.dtype, name: str
) -> None:
    region = region_of(lambda m, x: m.conv(x).relu(), **options)
    policy = POLICIES["cuda"]

    assert policy.untimed(region, [image().to(dtype)]) == name


def test_without_timing_layouts_alone_are_not_chosen_in_float32() -> None:
    region = region_of(lambda m, x: m.conv(x).sigmoid())

    assert POLICIES["cuda"].untimed(region, [image()]) == AS_IT_IS
    assert POLICIES["cuda"].untimed(region, [image().half()]) == "channels_last"


def test_the_real_operator_of_cublaslt_gives_relu() -> None:
    x, weight, bias = torch.randn(4, 8), torch.randn(5, 8), torch.randn(5)

    result = torch._addmm_activation(bias, x, weight.t())
    torch.testing.assert_close(result, F.linear(x, weight, bias).relu())
    assert torch._addmm_activation(bias * math.nan, x, weight.t()).isnan().all()
