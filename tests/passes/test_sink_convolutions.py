"""Pointwise convolutions move behind an average pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import assert_equivalent, randomize
from tests.single_pass import Forward, callees, optimized_by

NAME = "sink_convolutions"
IMAGE = (2, 4, 9, 7)
Case = tuple[Callable[..., Any], nn.Module, tuple[int, ...]]


def model(pool: Callable[..., Any], conv: nn.Module) -> nn.Module:
    """A convolution and a pool, or the forward of a model that holds the convolution."""
    layers = isinstance(pool, nn.Module)
    given = nn.Sequential(conv, pool) if layers else Forward(pool, conv=conv)
    return randomize(given.double().eval())


def conv(out: int = 6, kernel: int = 1, **settings: Any) -> nn.Module:
    return nn.Conv2d(4, out, kernel, **settings)


BARE = conv(bias=False)
SUNK: dict[str, Case] = {
    "a layer": (nn.AvgPool2d(2), conv(), IMAGE),
    "a function": (lambda m, x: F.avg_pool2d(m.conv(x), 2), conv(), IMAGE),
    "keywords": (
        lambda m, x: F.avg_pool2d(m.conv(x), kernel_size=3, stride=(2, 1), count_include_pad=False),
        conv(),
        IMAGE,
    ),
    "no stride": (lambda m, x: F.avg_pool2d(m.conv(x), (2, 3), []), conv(), IMAGE),
    "overlapping": (nn.AvgPool2d(3, (2,)), conv(), IMAGE),
    "as many places, of fewer channels": (nn.AvgPool2d(3, 1, 1), BARE, IMAGE),
    "windows that are cut off": (nn.AvgPool2d(4, ceil_mode=True), conv(), IMAGE),
    "zeros that are no places": (
        nn.AvgPool2d(3, padding=1, count_include_pad=False), conv(), IMAGE,
    ),
    "zeros without a bias": (nn.AvgPool2d(3, padding=1, ceil_mode=True), BARE, IMAGE),
    "another divisor without a bias": (nn.AvgPool2d(2, divisor_override=3), BARE, IMAGE),
    "groups": (nn.AvgPool2d(2), conv(groups=2), IMAGE),
    "valid": (nn.AvgPool2d(2), conv(padding="valid"), IMAGE),
    "same": (nn.AvgPool2d(2), conv(padding="same"), IMAGE),
    "no batch": (nn.AvgPool2d(2), conv(), IMAGE[1:]),
    "an empty batch": (nn.AvgPool2d(2), conv(), (0, *IMAGE[1:])),
    "one dimension": (nn.AvgPool1d(2), nn.Conv1d(4, 5, 1), (2, 4, 9)),
    "three dimensions": (nn.AvgPool3d(2), nn.Conv3d(4, 5, 1), (2, 4, 5, 4, 6)),
    "of one dimension": (lambda m, x: F.avg_pool1d(m.conv(x), 2), nn.Conv1d(4, 5, 1), (2, 4, 9)),
    "of three": (lambda m, x: F.avg_pool3d(m.conv(x), 2), nn.Conv3d(4, 5, 1), (2, 4, 5, 4, 6)),
    "all places": (nn.AdaptiveAvgPool2d(1), conv(4), IMAGE),
    "all places, a function": (
        lambda m, x: F.adaptive_avg_pool2d(m.conv(x), output_size=(1, 1)), conv(4), IMAGE,
    ),
    "all of one dimension": (nn.AdaptiveAvgPool1d(1), nn.Conv1d(4, 5, 1), (2, 4, 9)),
    "half as many channels": (nn.AvgPool2d(2), nn.Conv2d(256, 128, 1), (1, 256, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("case", SUNK)
def test_sinks(case: str) -> None:
    forward, layer, shape = SUNK[case]
    given = model(forward, layer)
    x = torch.randn(shape, dtype=torch.float64)

    fast = optimized_by(NAME, given, x)

    assert fast.report.counts() == {NAME: 1}
    assert callees(fast)[1:] == [type(layer)]
    for later in (x, torch.randn(*shape[:-1], 12, dtype=torch.float64)):
        assert_equivalent(given, fast, (later,))
        assert fast(later).stride() == given(later).stride()


@pytest.mark.parametrize("weight", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("image", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 4])
def test_the_result_lies_in_memory_as_before(
    channels: int, image: torch.memory_format, weight: torch.memory_format
) -> None:
    layer = nn.Conv2d(channels, 6, 1).to(memory_format=weight)  # type: ignore[call-overload]
    given = model(nn.AvgPool2d(2), layer)
    x = torch.randn(2, channels, 9, 7, dtype=torch.float64).to(memory_format=image)

    fast = optimized_by(NAME, given, x)

    assert fast.report.counts() == {NAME: 1}
    assert fast(x).stride() == given(x).stride()


def test_what_is_scaled_before_and_behind_is_folded_into_the_convolution() -> None:
    layers = (nn.BatchNorm2d(4), nn.Conv2d(4, 6, 1), nn.AvgPool2d(2), nn.BatchNorm2d(6))
    given = randomize(nn.Sequential(*layers).double().eval())
    x = torch.randn(IMAGE, dtype=torch.float64)

    fast = optimizer.optimize(given, x, level=1)

    assert fast.report.counts() == {"fold_affine_forward": 1, NAME: 1, "fold_affine": 1}
    assert_equivalent(given, fast, (x,))


def written(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    x.mul_(2.0)
    return F.avg_pool2d(y, 2)


def weight_written(m: Any, x: Tensor) -> Tensor:
    y = m.conv(torch.relu(x))
    m.conv.weight.mul_(0.5)
    return F.avg_pool2d(y, 2)


def read(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.conv(x)
    return F.avg_pool2d(y, 2), y


DIVIDES = "the pool does not divide by the number of places"
DIMENSIONS = "it pools other dimensions than the convolution has"
COSTS = "the pool would cost more than it saves"
REFUSALS: dict[str, tuple[Callable[..., Any], nn.Module, str]] = {
    "zeros with a bias": (nn.AvgPool2d(3, padding=1), conv(), DIVIDES),
    "another divisor": (nn.AvgPool2d(2, divisor_override=3), conv(), DIVIDES),
    "a divisor of one": (
        lambda m, x: F.avg_pool2d(m.conv(x), 2, divisor_override=1), conv(), DIVIDES,
    ),
    "rows": (lambda m, x: F.avg_pool1d(m.conv(x[0]), 2), conv(), DIMENSIONS),
    "channels": (lambda m, x: F.avg_pool3d(m.conv(x), 2), conv(), DIMENSIONS),
    "borders": (nn.AvgPool2d(2), conv(padding=1), "the convolution pads"),
    "fewer channels": (nn.AvgPool2d(2), conv(2), COSTS),
    "few products": (
        lambda m, x: F.avg_pool2d(m.conv(x.repeat(1, 64, 1, 1)), 2),
        nn.Conv2d(256, 128, 1, groups=64),
        COSTS,
    ),
    "as many channels and places": (nn.AvgPool2d(1), conv(4), COSTS),
    "a second reader": (read, conv(), "the layer's output is read elsewhere"),
    "a write between": (
        written, conv(), "what is convolved is written before it is pooled",
    ),
    "a weight that is written": (weight_written, conv(), "the forward writes their tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    forward, layer, reason = REFUSALS[case]
    given = model(forward, layer)
    x = torch.randn(IMAGE, dtype=torch.float64)

    with torch.no_grad():
        fast = optimized_by(NAME, given, x)

    assert [refusal.reason for refusal in fast.report.refused] == [reason]
    assert fast.report.fired == ()
    with torch.no_grad():
        assert_equivalent(given, fast, (x,), exact=True)


def test_a_single_place_lies_in_memory_as_before() -> None:
    layers = nn.Conv1d(4, 6, 1), nn.AdaptiveAvgPool1d(1), nn.Conv1d(6, 6, 1, padding=1)
    given = randomize(nn.Sequential(*layers).double().eval())
    x = torch.randn(2, 9, 4, dtype=torch.float64).transpose(1, 2)

    fast = optimized_by(NAME, given, x)

    assert [r.reason for r in fast.report.refused] == ["its output may be laid out otherwise"]
    assert fast(x).stride() == given(x).stride()


def test_refuses_under_autocast_which_gives_the_two_other_dtypes() -> None:
    given = model(nn.AdaptiveAvgPool3d(1), nn.Conv3d(4, 4, 1)).float()
    x = torch.randn(2, 4, 3, 3, 3)

    with torch.autocast("cpu", torch.bfloat16):
        fast = optimized_by(NAME, given, x)

        reason = "autocast gives the pool another dtype than the convolution"
        assert [refusal.reason for refusal in fast.report.refused] == [reason]
        assert fast(x).dtype == given(x).dtype


OTHERS: dict[str, tuple[Callable[..., Any], nn.Module]] = {
    "neighbours": (nn.AvgPool2d(2), conv(kernel=2)),
    "places left out": (nn.AvgPool2d(2), conv(stride=2)),
    "several places": (nn.AdaptiveAvgPool2d(2), conv()),
    "as many places as there are": (nn.AdaptiveAvgPool2d((None, 1)), conv()),
    "the largest": (nn.MaxPool2d(2), conv()),
    "something between": (lambda m, x: F.avg_pool2d(torch.relu(m.conv(x)), 2), conv()),
}


@pytest.mark.parametrize("case", OTHERS)
def test_leaves_alone(case: str) -> None:
    forward, layer = OTHERS[case]
    given = model(forward, layer)

    fast = optimized_by(NAME, given, torch.randn(IMAGE, dtype=torch.float64))

    assert (fast.report.fired, fast.report.refused, fast.report.remarks) == ((), (), ())
