"""Zeros around the input of a convolution become its own, and pointwise ones move behind a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import assert_equivalent, randomize
from tests.conftest import address
from tests.single_pass import Forward, callees, layers_of, optimized_by, rows, tried

PADDING, SINK = "fold_padding", "sink_convolutions"
SHAPE, IMAGE = (2, 4, 7, 6), (2, 4, 9, 7)
READ = "the layer's output is read elsewhere"


def padded(forward: Callable[..., Any], layer: nn.Module | None = None) -> nn.Module:
    """A model of a convolution, and of a padding that stands in the place of a forward."""
    conv = layer or nn.Conv2d(4, 3, 3)
    if isinstance(forward, nn.Module):
        return randomize(
            Forward(lambda m, x: m.conv(m.pad(x)), conv=conv, pad=forward).double().eval()
        )
    return randomize(Forward(forward, conv=conv).double().eval())


CONV1D, CONV3D = nn.Conv1d(4, 3, 3), nn.Conv3d(4, 3, 2)
OWN = nn.Conv2d(4, 3, 3, padding=(1, 2))
FOLDED = {
    "F.pad": (lambda m, x: m.conv(F.pad(x, (1, 1, 2, 2))), None, SHAPE, (2, 1)),
    "a keyword": (lambda m, x: m.conv(F.pad(x, pad=[1, 1, 0, 0])), None, SHAPE, (0, 1)),
    "zero": (lambda m, x: m.conv(F.pad(x, (1, 1), "constant", 0.0)), None, SHAPE, (0, 1)),
    "one dimension of two": (lambda m, x: m.conv(F.pad(x, (2, 2))), None, SHAPE, (0, 2)),
    "nothing": (lambda m, x: m.conv(F.pad(x, (0, 0))), None, SHAPE, (0, 0)),
    "a layer": (nn.ZeroPad2d((1, 1, 2, 2)), None, SHAPE, (2, 1)),
    "a layer of zeros": (nn.ConstantPad2d(1, 0.0), None, SHAPE, (1, 1)),
    "no batch": (nn.ZeroPad2d(1), None, SHAPE[1:], (1, 1)),
    "more than its own": (nn.ZeroPad2d(1), OWN, SHAPE, (2, 3)),
    "valid": (nn.ZeroPad2d(1), nn.Conv2d(4, 3, 3, padding="valid"), SHAPE, (1, 1)),
    "settings": (
        nn.ZeroPad2d(2),
        nn.Conv2d(4, 2, (3, 2), stride=2, dilation=(2, 1), groups=2, bias=False), SHAPE, (2, 2),
    ),
    "one": (nn.ZeroPad1d(2), CONV1D, (2, 4, 5), (2,)),
    "three": (lambda m, x: m.conv(F.pad(x, (1, 1, 2, 2))), CONV3D, (2, 4, 3, 3, 3), (0, 2, 1)),
    "the same twice": (lambda m, x: m.conv(F.pad(F.pad(x, (1, 1)), (1, 1))), None, SHAPE, (0, 2)),
}  # fmt: skip


@rows("forward layer shape padding", FOLDED)
def test_folds_padding(forward: Any, layer: Any, shape: Any, padding: Any) -> None:
    model = padded(forward, layer)
    x, later = (torch.randn(*shape[:-1], size).double() for size in (shape[-1], 11))

    (conv,) = layers_of(optimized_by(PADDING, model, x))

    assert conv.padding == padding
    assert address(conv.weight) == address(model.conv.weight)
    tried(PADDING, model, (x,), [type(model.conv)], (later,))


def test_a_layer_that_is_called_twice_keeps_its_weights_and_its_other_call() -> None:
    model = padded(lambda m, x: m.conv(F.pad(x, (1, 1))) + m.conv(F.pad(x, (1, 1), value=2.0)))

    tried(PADDING, model, (torch.randn(SHAPE).double(),), 1)


def test_what_is_folded_into_it_later_sees_the_padding() -> None:
    layers = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3))
    model, x = randomize(layers.double().eval()), torch.randn(SHAPE).double()

    fast = optimizer.optimize(model, x, level=1)

    assert fast.report.counts() == {PADDING: 1, "fold_affine": 1}
    assert_equivalent(model, fast, (x,))


OTHER = "it pads with something else than a constant number of zeros"
DIFFERENTLY = "the convolution pads in another way"
SAME, ROUND = nn.Conv2d(4, 3, 3, padding="same"), nn.Conv2d(4, 3, 3, padding_mode="circular")
PADDING_STAYS = {
    "another number": (lambda m, x: m.conv(F.pad(x, (1, 1), value=0.5)), None, OTHER),
    "a layer of another number": (nn.ConstantPad2d(1, -1.0), None, OTHER),
    "by reflection": (lambda m, x: m.conv(F.pad(x, (1, 1, 1, 1), mode="reflect")), None, OTHER),
    "less than nothing": (lambda m, x: m.conv(F.pad(x, (-1, -1))), None, OTHER),
    "as many as there are": (lambda m, x: m.conv(F.pad(x, (x.shape[2], 7))), None, OTHER),
    "one side": (
        lambda m, x: m.conv(F.pad(x, (1, 0))), None,
        "it pads the two sides of a dimension differently",
    ),
    "channels": (
        lambda m, x: m.conv(F.pad(x[:, 1:3], (0, 0, 0, 0, 1, 1))), None,
        "it pads the channels or the batch",
    ),
    "a convolution that pads as it likes": (nn.ZeroPad2d(1), SAME, DIFFERENTLY),
    "a convolution of a ring": (nn.ZeroPad2d(1), ROUND, DIFFERENTLY),
    "a second reader": ("padded = F.pad(x, (1, 1)); return (m.conv(padded), padded)", None, READ),
    "a write between": (
        "padded = F.pad(x, (1, 1)); x.mul_(2.0); return m.conv(padded)", None,
        "what is padded is written later",
    ),
}  # fmt: skip


@rows("forward layer reason", PADDING_STAYS)
def test_padding_stays(forward: Any, layer: Any, reason: str) -> None:
    tried(PADDING, padded(forward, layer), (torch.randn(SHAPE).double(),), reason)


def test_padding_stays_around_what_is_empty_but_for_the_zeros() -> None:
    model, x = padded(lambda m, x: m.conv(F.pad(x, (2, 2)))), torch.ones(2, 4, 5, 0).double()

    tried(PADDING, model, (x,), "it is empty, which a convolution may not read")


def test_padding_stays_where_something_stands_between() -> None:
    model = padded(lambda m, x: m.conv(torch.relu(F.pad(x, (1, 1)))))

    tried(PADDING, model, (torch.randn(SHAPE).double(),), 0)


def test_padding_stays_before_a_layer_with_a_plain_tensor() -> None:
    model = padded(lambda m, x: m.conv(F.pad(x, (1, 1))))
    weight = model.conv.weight.detach().clone()
    del model.conv.weight
    model.conv.weight = weight

    reason = "the layer has tensors that no cast of it reaches"
    tried(PADDING, model, (torch.randn(SHAPE).double(),), reason)


def pooled(pool: Callable[..., Any], conv: nn.Module) -> nn.Module:
    """A convolution and a pool, or the forward of a model that holds the convolution."""
    layers = isinstance(pool, nn.Module)
    model = nn.Sequential(conv, pool) if layers else Forward(pool, conv=conv)
    return randomize(model.double().eval()).requires_grad_(False)


def conv(out: int = 6, kernel: int = 1, **settings: Any) -> nn.Module:
    return nn.Conv2d(4, out, kernel, **settings)


BARE = conv(bias=False)
SUNK = {
    "a layer": (nn.AvgPool2d(2), conv(), IMAGE),
    "a function": (lambda m, x: F.avg_pool2d(m.conv(x), 2), conv(), IMAGE),
    "keywords": (
        lambda m, x: F.avg_pool2d(m.conv(x), kernel_size=3, stride=(2, 1), count_include_pad=False),
        conv(), IMAGE,
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


@rows("forward layer shape", SUNK)
def test_sinks(forward: Any, layer: Any, shape: Any) -> None:
    x, later = (torch.randn(*shape[:-1], size).double() for size in (shape[-1], 12))

    fast = tried(SINK, pooled(forward, layer), (x,), 1, (later,))

    assert callees(fast)[1:] == [type(layer)]


@pytest.mark.parametrize("weight", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("image", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 4])
def test_the_result_lies_in_memory_as_before(channels: int, image: Any, weight: Any) -> None:
    model = pooled(nn.AvgPool2d(2), nn.Conv2d(channels, 6, 1).to(memory_format=weight))
    x = torch.randn(2, channels, 9, 7).double().to(memory_format=image)

    fast = tried(SINK, model, (x,), 1)

    assert fast(x).stride() == model(x).stride()


def test_what_is_scaled_before_and_behind_is_folded_into_the_convolution() -> None:
    layers = (nn.BatchNorm2d(4), nn.Conv2d(4, 6, 1), nn.AvgPool2d(2), nn.BatchNorm2d(6))
    model, x = randomize(nn.Sequential(*layers).double().eval()), torch.randn(IMAGE).double()

    fast = optimizer.optimize(model, x, level=1)

    assert fast.report.counts() == {"fold_affine_forward": 1, SINK: 1, "fold_affine": 1}
    assert_equivalent(model, fast, (x,))


DIVIDES = "the pool does not divide by the number of places"
DIMENSIONS = "it pools other dimensions than the convolution has"
COSTS = "the pool would cost more than it saves"
REFUSALS = {
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
        nn.Conv2d(256, 128, 1, groups=64), COSTS,
    ),
    "as many channels and places": (nn.AvgPool2d(1), conv(4), COSTS),
    "a second reader": ("y = m.conv(x); return (F.avg_pool2d(y, 2), y)", conv(), READ),
    "a write between": (
        "y = m.conv(x); x.mul_(2.0); return F.avg_pool2d(y, 2)", conv(),
        "what is convolved is written before it is pooled",
    ),
    "a weight that is written": (
        "y = m.conv(torch.relu(x)); m.conv.weight.mul_(0.5); return F.avg_pool2d(y, 2)", conv(),
        "the forward writes their tensors",
    ),
}  # fmt: skip
OTHERS = {
    "neighbours": (nn.AvgPool2d(2), conv(kernel=2)),
    "places left out": (nn.AvgPool2d(2), conv(stride=2)),
    "several places": (nn.AdaptiveAvgPool2d(2), conv()),
    "as many places as there are": (nn.AdaptiveAvgPool2d((None, 1)), conv()),
    "the largest": (nn.MaxPool2d(2), conv()),
    "something between": (lambda m, x: F.avg_pool2d(torch.relu(m.conv(x)), 2), conv()),
}


@rows("forward layer outcome", REFUSALS, {name: (*row, 0) for name, row in OTHERS.items()})
def test_a_convolution_stays(forward: Any, layer: Any, outcome: Any) -> None:
    tried(SINK, pooled(forward, layer), (torch.randn(IMAGE).double(),), outcome)


def test_a_single_place_lies_in_memory_as_before() -> None:
    layers = nn.Conv1d(4, 6, 1), nn.AdaptiveAvgPool1d(1), nn.Conv1d(6, 6, 1, padding=1)
    model, x = randomize(nn.Sequential(*layers).double().eval()), torch.randn(2, 9, 4).double().mT

    fast = tried(SINK, model, (x,), "its output may be laid out otherwise")

    assert fast(x).stride() == model(x).stride()


def test_refuses_under_autocast_which_gives_the_two_other_dtypes() -> None:
    model, x = (
        pooled(nn.AdaptiveAvgPool3d(1), nn.Conv3d(4, 4, 1)).float(),
        torch.randn(2, 4, 3, 3, 3),
    )

    with torch.autocast("cpu", torch.bfloat16):
        reason = "autocast gives the pool another dtype than the convolution"
        fast = tried(SINK, model, (x,), reason)

        assert fast(x).dtype == model(x).dtype
