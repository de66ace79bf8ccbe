"""Zeros around the input of a convolution become its own, and pointwise ones move behind a pool."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import optimizer
from optimizer.testing import assert_equivalent, randomize
from tests.conftest import address
from tests.single_pass import Forward, layers_of, optimized_by, spelled, tried

PADDING, SINK = "fold_padding", "sink_convolutions"
SHAPE, IMAGE = (2, 4, 7, 6), (2, 4, 9, 7)
READ = "the layer's output is read elsewhere"


def model_of(text: str, layer: nn.Module | None = None) -> nn.Module:
    """Layers in a row, or the forward of a model that holds a convolution."""
    if text.startswith(("nn.", "conv(")):
        return randomize(nn.Sequential(*eval(text)).double().eval()).requires_grad_(False)
    model: Any = Forward(text, plain=conv(3, 3), conv=layer).double().eval()
    if "plain" in text:
        del model.plain.weight
        model.plain.weight = torch.ones(3, 4, 3, 3, dtype=torch.float64)
    return randomize(model).requires_grad_(False)


def conv(out: int = 6, kernel: int = 1, **settings: Any) -> nn.Module:
    return nn.Conv2d(4, out, kernel, **settings)


# The shape, and the padding of the layer that is left
FOLDED = {
    (SHAPE, (2, 1)): "m.conv(F.pad(x, (1, 1, 2, 2))); nn.ZeroPad2d((1, 1, 2, 2)), conv(3, 3)",
    (SHAPE, (0, 1)): "m.conv(F.pad(x, pad=[1, 1, 0, 0])); m.conv(F.pad(x, (1, 1), value=0.0))",
    (SHAPE, (0, 2)): "m.conv(F.pad(F.pad(x, (1, 1)), (1, 1)))",
    (SHAPE, (1, 1)): "nn.ConstantPad2d(1, 0.0), conv(3, 3, padding='valid')",
    (SHAPE[1:], (1, 1)): "nn.ZeroPad2d(1), conv(3, 3)",
    (SHAPE, (2, 3)): "nn.ZeroPad2d(1), conv(3, 3, padding=(1, 2))",
    (SHAPE, (2, 2)): "nn.ZeroPad2d(2), conv(2, (3, 2), stride=2, dilation=(2, 1), groups=2)",
    ((2, 4, 5), (2,)): "nn.ZeroPad1d(2), nn.Conv1d(4, 3, 3, bias=False)",
    ((2, 4, 3, 3, 3), (0, 2, 1)): "nn.ConstantPad3d((1, 1, 2, 2, 0, 0), 0), nn.Conv3d(4, 3, 2)",
}


@spelled(FOLDED, cells="text case")
def test_folds_padding(text: str, case: Any) -> None:
    (shape, padding), model = case, model_of(text, conv(3, 3))
    x, later = (torch.randn(*shape[:-1], size).double() for size in (shape[-1], 11))
    own = [*model.children()][-1]

    (folded,) = layers_of(optimized_by(PADDING, model, x))

    assert folded.padding == padding
    assert address(folded.weight) == address(own.weight)
    tried(PADDING, model, (x,), [type(own)], (later,))


# How many values there are when a convolution has moved
SUNK = {
    IMAGE: """
    F.avg_pool2d(m.conv(x), (2, 3), []); nn.Conv2d(4, 6, 1), nn.AvgPool2d(3, (2,));
    F.avg_pool2d(m.conv(x), kernel_size=3, stride=(2, 1), count_include_pad=False);
    conv(bias=False), nn.AvgPool2d(3, 1, 1); conv(), nn.AvgPool2d(4, ceil_mode=True);
    conv(), nn.AvgPool2d(3, padding=1, count_include_pad=False);
    conv(bias=False), nn.AvgPool2d(3, padding=1, ceil_mode=True);
    conv(bias=False), nn.AvgPool2d(2, divisor_override=3); conv(groups=2), nn.AvgPool2d(2);
    conv(padding="same"), nn.AvgPool2d(2); F.adaptive_avg_pool2d(m.conv(x), output_size=(1, 1))
    """,
    IMAGE[1:]: "conv(), nn.AvgPool2d(2)",
    (0, *IMAGE[1:]): "conv(), nn.AvgPool2d(2)",
    (2, 4, 9): "nn.Conv1d(4, 5, 1), nn.AdaptiveAvgPool1d(1); F.avg_pool1d(m.conv(x), 2)",
    (2, 4, 5, 4, 6): "nn.Conv3d(4, 5, 1), nn.AvgPool3d(2)",
    (1, 256, 4, 4): "nn.Conv2d(256, 128, 1), nn.AvgPool2d(2)",
}


@spelled(SUNK, cells="text shape")
def test_sinks(text: str, shape: Any) -> None:
    x, later = (torch.randn(*shape[:-1], size).double() for size in (shape[-1], 12))
    kind = {"1d": nn.Conv1d, "2d": nn.Conv2d, "3d": nn.Conv3d}[re.findall(r"\dd", text)[0]]

    fast = tried(
        SINK, model_of(text, kind(4, 4 if "adaptive" in text else 5, 1)), (x,), 1, (later,)
    )

    assert [*map(type, layers_of(fast))][-1] is kind


COSTS = "the pool would cost more than it saves"
# The pass and the outcome, and the shape of another input than an image
STAYS: dict[Any, str] = {
    (PADDING, 0): "m.conv(torch.relu(F.pad(x, (1, 1))))",
    (PADDING, 1): "m.conv(F.pad(x, (1, 1))) + m.conv(F.pad(x, (1, 1), value=2.0))",
    (PADDING, "it pads with something else than a constant number of zeros"): """
    nn.ConstantPad2d(1, -1.0), conv(3, 3); m.conv(F.pad(x, (1, 1, 1, 1), mode="reflect"));
    m.conv(F.pad(x, (-1, -1))); m.conv(F.pad(x, (x.shape[2], 7)))
    """,
    (PADDING, "it pads the two sides of a dimension differently"): "m.conv(F.pad(x, (1, 0)))",
    (PADDING, "it pads the channels or the batch"): """
    m.conv(F.pad(x[:, 1:3], (0, 0, 0, 0, 1, 1)))
    """,
    (PADDING, "the convolution pads in another way"): """
    nn.ZeroPad2d(1), conv(3, 3, padding="same");
    nn.ZeroPad2d(1), conv(3, 3, padding_mode="circular")
    """,
    (PADDING, READ): "(m.conv(y := F.pad(x, (1, 1))), y)",
    (PADDING, "what is padded is written later"): """
    y = F.pad(x, (1, 1)); x.mul_(2.0); return m.conv(y)
    """,
    (PADDING, "the layer has tensors that no cast of it reaches"): "m.plain(F.pad(x, (1, 1)))",
    (PADDING, "it is empty, which a convolution may not read"): """
    m.conv(F.pad(x[..., :0], (2, 2)))
    """,
    (SINK, "the pool does not divide by the number of places"): """
    conv(), nn.AvgPool2d(3, padding=1); F.avg_pool2d(m.conv(x), 2, divisor_override=3)
    """,
    (SINK, "it pools other dimensions than the convolution has"): """
    F.avg_pool1d(m.conv(x[0]), 2); F.avg_pool3d(m.conv(x), 2)
    """,
    (SINK, "the convolution pads"): "conv(padding=1), nn.AvgPool2d(2)",
    (SINK, COSTS): "conv(2), nn.AvgPool2d(2); conv(4), nn.AvgPool2d(1)",
    (SINK, COSTS, (2, 256, 9, 7)): "nn.Conv2d(256, 128, 1, groups=64), nn.AvgPool2d(2)",
    (SINK, READ): "(F.avg_pool2d(y := m.conv(x), 2), y)",
    (SINK, "what is convolved is written before it is pooled"): """
    y = m.conv(x); x.mul_(2.0); return F.avg_pool2d(y, 2)
    """,
    (SINK, "the forward writes their tensors"): """
    y = m.conv(torch.relu(x)); m.conv.weight.mul_(0.5); return F.avg_pool2d(y, 2)
    """,
    (SINK, 0): """
    conv(kernel=2), nn.AvgPool2d(2); conv(stride=2), nn.AvgPool2d(2);
    conv(), nn.AdaptiveAvgPool2d((None, 1)); conv(), nn.MaxPool2d(2);
    F.avg_pool2d(torch.relu(m.conv(x)), 2)
    """,
}


@spelled(STAYS, cells="forward case")
def test_stays(forward: str, case: Any) -> None:
    name, outcome, *shape = case
    layer = conv(3, 3) if name == PADDING else conv()

    tried(name, model_of(forward, layer), (torch.randn(*shape or [IMAGE]).double(),), outcome)


NEIGHBOURS = {
    (PADDING, "fold_affine"): "nn.ZeroPad2d(1), conv(3, 3), nn.BatchNorm2d(3)",
    ("fold_affine_forward", SINK, "fold_affine"): """
    nn.BatchNorm2d(4), conv(), nn.AvgPool2d(2), nn.BatchNorm2d(6)
    """,
}


@spelled(NEIGHBOURS, cells="layers names")
def test_what_is_folded_into_it_later_sees_the_change(layers: str, names: tuple[str, ...]) -> None:
    model, x = model_of(layers), torch.randn(IMAGE).double()

    fast = optimizer.optimize(model, x, level=1)

    assert fast.report.counts() == dict.fromkeys(names, 1)
    assert_equivalent(model, fast, (x,))


@pytest.mark.parametrize("weight", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("image", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 4])
def test_the_result_lies_in_memory_as_before(channels: int, image: Any, weight: Any) -> None:
    model = model_of(f"nn.Conv2d({channels}, 6, 1), nn.AvgPool2d(2)").to(memory_format=weight)
    x = torch.randn(2, channels, 9, 7).double().to(memory_format=image)

    assert tried(SINK, model, (x,), 1)(x).stride() == model(x).stride()


def test_a_single_place_lies_in_memory_as_before() -> None:
    layers = "nn.Conv1d(4, 6, 1), nn.AdaptiveAvgPool1d(1), nn.Conv1d(6, 6, 1, padding=1)"
    model, x = model_of(layers), torch.randn(2, 9, 4).double().mT

    fast = tried(SINK, model, (x,), "its output may be laid out otherwise")

    assert fast(x).stride() == model(x).stride()


def test_refuses_under_autocast_which_gives_the_two_other_dtypes() -> None:
    model = model_of("nn.Conv3d(4, 4, 1), nn.AdaptiveAvgPool3d(1)").float()
    x = torch.randn(2, 4, 3, 3, 3)

    with torch.autocast("cpu", torch.bfloat16):
        reason = "autocast gives the pool another dtype than the convolution"
        fast = tried(SINK, model, (x,), reason)

        assert fast(x).dtype == model(x).dtype
