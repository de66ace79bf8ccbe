"""Zeros around the input of a convolution become its own, and pointwise ones move behind a pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from optimizer.testing import randomize
from tests.conftest import address
from tests.single_pass import Forward, layers_of, optimized_by, spelled, tried

PADDING, SINK = "fold_padding", "sink_convolutions"
SHAPE, IMAGE = (2, 4, 7, 6), (2, 4, 9, 7)
LAST = "x.contiguous(memory_format=torch.channels_last)"


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


def image(shape: Any, last: int = 0) -> torch.Tensor:
    return torch.randn(*shape[:-1], last or shape[-1]).double()


# The shape, and the padding of the layer that is left
FOLDED = {
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
    own = [*model.children()][-1]

    (folded,) = layers_of(optimized_by(PADDING, model, image(shape)))

    assert folded.padding == padding
    assert address(folded.weight) == address(own.weight)
    tried(PADDING, model, (image(shape),), [type(own)], (image(shape, 11),))


SUNK = {
    IMAGE: """
    F.avg_pool2d(m.conv(x), (2, 3), []); conv(), nn.AvgPool2d(3, (2,));
    F.avg_pool2d(m.conv(x), kernel_size=3, stride=(2, 1), count_include_pad=False);
    conv(), nn.AvgPool2d(3, 1, 1, count_include_pad=False); conv(), nn.AvgPool2d(4, ceil_mode=True);
    conv(bias=False), nn.AvgPool2d(3, padding=1, ceil_mode=True);
    conv(bias=False), nn.AvgPool2d(2, divisor_override=3); conv(groups=2), nn.AvgPool2d(2);
    F.avg_pool2d(y := m.conv(x), y.shape[2:]);
    conv(padding="same"), nn.AvgPool2d(2); F.adaptive_avg_pool2d(m.conv(x), output_size=(1, 1))""",
    IMAGE[1:]: "conv(), nn.AvgPool2d(2)",
    (0, *IMAGE[1:]): "conv(), nn.AvgPool2d(2)",
    (2, 4, 9): "nn.Conv1d(4, 5, 1), nn.AdaptiveAvgPool1d(1)",
    (2, 4, 5, 4, 6): "nn.Conv3d(4, 5, 1), nn.AvgPool3d(2)",
    (1, 256, 4, 4): "nn.Conv2d(256, 128, 1), nn.AvgPool2d(2)",
}


@spelled(SUNK, cells="text shape")
def test_sinks(text: str, shape: Any) -> None:
    layer = conv(4 if "adaptive" in text else 5)

    fast = tried(SINK, model_of(text, layer), (image(shape),), 1, (image(shape, 12),))

    *_, last = layers_of(fast)
    assert isinstance(last, nn.Conv1d | nn.Conv2d | nn.Conv3d)


COSTS = "the pool would cost more than it saves"
READ = "the layer's output is read elsewhere"
# The pass and the outcome, and the shape of another input than an image
STAYS: dict[Any, str] = {
    (PADDING, 1): "m.conv(F.pad(x, (1, 1))) + m.conv(F.pad(x, (1, 1), value=2.0))",
    (PADDING, "it pads with something else than a constant number of zeros"): """
    nn.ConstantPad2d(1, -1.0), conv(3, 3); m.conv(F.pad(x, (1, 1, 1, 1), mode="reflect"));
    m.conv(F.pad(x, (-1, -1))); m.conv(F.pad(x, (x.shape[2], 7)))""",
    (PADDING, "it pads the two sides of a dimension differently"): "m.conv(F.pad(x, (1, 0)))",
    (PADDING, "it pads the channels or the batch"): "m.conv(F.pad(x[:, 1:3], (0, 0, 0, 0, 1, 1)))",
    (PADDING, "the convolution pads in another way"): "nn.ZeroPad2d(1), conv(3, 3, padding='same')",
    (PADDING, "one number is the padding of all dimensions"): """
    F.conv2d(F.pad(x, (1, 1, 1, 1)), m.conv.weight, None, (1,), (0,))""",
    (PADDING, READ): "(m.conv(y := F.pad(x, (1, 1))), y)",
    (PADDING, "what is padded is written later"): """
    y = F.pad(x, (1, 1)); x.mul_(2.0); return m.conv(y)""",
    (PADDING, "the layer has tensors that no cast of it reaches"): "m.plain(F.pad(x, (1, 1)))",
    (PADDING, "it is empty, which a convolution may not read"): """
    m.conv(F.pad(x[..., :0], (2, 2)))""",
    (SINK, "the pool does not divide by the number of places"): """
    conv(), nn.AvgPool2d(3, padding=1); F.avg_pool2d(m.conv(x), 2, divisor_override=3)""",
    (SINK, "it pools other dimensions than the convolution has"): "F.avg_pool1d(m.conv(x[0]), 2)",
    (SINK, "the convolution pads"): "conv(padding=1), nn.AvgPool2d(2)",
    (SINK, COSTS): "conv(2), nn.AvgPool2d(2); conv(4), nn.AvgPool2d(1)",
    (SINK, COSTS, (2, 256, 9, 7)): "nn.Conv2d(256, 128, 1, groups=64), nn.AvgPool2d(2)",
    (SINK, READ): "(F.avg_pool2d(y := m.conv(x), 2), y)",
    (SINK, "what is convolved is written before it is pooled"): """
    y = m.conv(x); x.mul_(2.0); return F.avg_pool2d(y, 2)""",
    (SINK, "the forward writes their tensors"): """
    y = m.conv(torch.relu(x)); m.conv.weight.mul_(0.5); return F.avg_pool2d(y, 2)""",
    (SINK, "its output may be laid out otherwise", (2, 9, 4)): """
    nn.Flatten(0, 0), Forward("x.mT"), nn.Conv1d(4, 6, 1), nn.AdaptiveAvgPool1d(1),
    nn.Conv1d(6, 6, 1, padding=1)""",
    (SINK, "its output may be laid out otherwise"): f"""
    nn.Identity(), Forward("{LAST}"), conv(), nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(2)""",
    (SINK, 0): "conv(stride=2), nn.AvgPool2d(2); conv(), nn.AdaptiveAvgPool2d((None, 1))",
    # the result lies in memory as before
    (SINK, 1): f'nn.Identity(), Forward("{LAST}"), conv(), nn.AvgPool2d(2)',
    (SINK, 1, (2, 1, 9, 7)): f"""
    nn.Identity(), Forward("{LAST}"), nn.Conv2d(1, 6, 1).to(memory_format=torch.channels_last),
    nn.AvgPool2d(2)""",
}


@spelled(STAYS, cells="forward case")
def test_what_differs_a_little(forward: str, case: Any) -> None:
    name, outcome, *shape = case
    layer = conv(3, 3) if name == PADDING else conv()

    tried(name, model_of(forward, layer), (image(*shape or [IMAGE]),), outcome)


def test_refuses_under_autocast_which_gives_the_two_other_dtypes() -> None:
    model = model_of("nn.Conv3d(4, 4, 1), nn.AdaptiveAvgPool3d(1)").float()

    with torch.autocast("cpu", torch.bfloat16):
        fast = optimized_by(SINK, model, torch.randn(2, 4, 3, 3, 3))

    [refused] = fast.report.refused
    assert refused.reason == "autocast gives the pool another dtype than the convolution"
