"""In channels_last, a shuffle of two groups of channels is one copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optimizer
from optimizer._inputs import Call
from optimizer.lowering._interleave import with_interleaved_channels
from optimizer.lowering._onednn import in_channels_last
from optimizer.lowering._regions import name_of
from optimizer.lowering._straight_line import StraightLine, straight_line

Shuffle = Callable[[Tensor, Tensor], Tensor]
N, C, H, W = 2, 6, 5, 7


class Around(nn.Module):
    """Convolves one value twice, and then what a function makes of the two."""

    def __init__(self, function: Shuffle) -> None:
        super().__init__()
        self.function = function
        self.left, self.right = nn.Conv2d(3, C, 1), nn.Conv2d(3, C, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b = self.left(x), self.right(x)
        return self.function(a, b) + 1, torch.relu(a)


def line_of(function: Shuffle, dtype: torch.dtype = torch.float32) -> StraightLine:
    torch.manual_seed(0)
    model = Around(function).eval().to(dtype)
    call = Call((torch.randn(N, 3, H, W, dtype=dtype),), {})
    return straight_line(model, list(model.parameters()), call)


def names(module: fx.GraphModule) -> set[str]:
    return {name_of(node) for node in module.graph.nodes}


def in_groups(y: Tensor, groups: int = 2) -> Tensor:
    return y.view(N, groups, y.shape[1] // groups, H, W)


SHUFFLES: dict[str, Shuffle] = {
    "torchvision's": lambda a, b: (
        in_groups(torch.cat((a, b), dim=1)).transpose(1, 2).contiguous().view(N, 2 * C, H, W)
    ),
    "reshape and permute": lambda a, b: (
        torch.cat([a, b], 1).reshape(N, 2, -1, H, W).permute(0, 2, 1, 3, 4).reshape(N, -1, H, W)
    ),
    "keywords": lambda a, b: (
        in_groups(torch.cat(tensors=(a, b), dim=1)).transpose(dim0=1, dim1=2).flatten(1, 2)
    ),
    "swapaxes": lambda a, b: in_groups(torch.cat((a, b), -3)).swapaxes(2, 1).flatten(1, 2),
    "swapdims": lambda a, b: in_groups(torch.cat((a, b), 1)).swapdims(1, 2).flatten(1, 2),
    "movedim": lambda a, b: in_groups(torch.cat((a, b), 1)).movedim(1, 2).flatten(1, 2),
    "channel_shuffle": lambda a, b: F.channel_shuffle(torch.cat((a, b), 1), 2),
    "of one value": lambda a, b: F.channel_shuffle(a * b, 2),
    "of unequal branches": lambda a, b: F.channel_shuffle(torch.cat((a, b[:, :2]), 1), 2),
    "of three branches": lambda a, b: F.channel_shuffle(torch.cat((a, b, a), 1), 2),
    "of two dtypes": lambda a, b: F.channel_shuffle(torch.cat((a.double(), b.float()), 1), 2).to(
        a.dtype
    ),
    "of rows": lambda a, b: F.channel_shuffle(torch.cat((a[:, :, :2], b[:, :, :3]), 2), 2),
    "of halves of the rows": lambda a, b: F.channel_shuffle(torch.cat((a, b), 2), 2),
    "what else reads the branches": lambda a, b: (
        (y := torch.cat((a, b), 1)) * F.channel_shuffle(y, 2)
    ),
    "twice": lambda a, b: F.channel_shuffle(F.channel_shuffle(torch.cat((a, b), 1), 2), 2),
    "four channels": lambda a, b: in_groups(a[:, :4]).transpose(1, 2).flatten(1, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_shuffle_of_two_groups_is_one_copy_of_every_bit(shuffle: str, dtype: torch.dtype) -> None:
    line = line_of(SHUFFLES[shuffle], dtype)
    made = with_interleaved_channels(line.module, line.inputs)

    assert "complex" in names(made)
    assert not names(made) & {"transpose", "swapaxes", "swapdims", "movedim", "channel_shuffle"}
    for x in (*line.inputs, line.inputs[0] * torch.inf, -line.inputs[0] * 0):
        for expected, actual in zip(line.module(x), made(x), strict=True):
            assert torch.equal(expected.nan_to_num(7), actual.nan_to_num(7))
            assert torch.equal(expected.signbit(), actual.signbit())


def test_what_was_joined_only_to_be_shuffled_is_not_joined() -> None:
    line = line_of(SHUFFLES["torchvision's"])

    assert "cat" not in names(with_interleaved_channels(line.module, line.inputs))


OTHERS: dict[str, Shuffle] = {
    "three groups": lambda a, b: in_groups(a[:, :3], 3).transpose(1, 2).flatten(1, 2) * b[:, :3],
    "the way back": lambda a, b: (
        torch.cat((a, b), 1).view(N, C, 2, H, W).transpose(1, 2).flatten(1, 2)
    ),
    "rows and channels": lambda a, b: in_groups(a * b).transpose(2, 3).reshape(N, C, H, W),
    "something between": lambda a, b: torch.relu(
        in_groups(torch.cat((a, b), 1)).transpose(1, 2)
    ).flatten(1, 2),
    "another joined": lambda a, b: torch.cat(
        (in_groups(a).transpose(1, 2), in_groups(b).transpose(1, 2))
    )[N:].flatten(1, 2),
    "no image": lambda a, b: F.channel_shuffle((a * b).flatten(2), 2).view(N, C, H, W),
    "five dimensions": lambda a, b: in_groups(a * b).transpose(1, 2),
    "images": lambda a, b: (a * b).transpose(2, 3),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_such_shuffle_stays(other: str) -> None:
    line = line_of(OTHERS[other])
    made = with_interleaved_channels(line.module, line.inputs)

    assert names(made) == names(line.module)
    for expected, actual in zip(line.outputs, made(*line.inputs), strict=True):
        assert torch.equal(expected, actual)


def test_a_dtype_without_complex_numbers_stays() -> None:
    line = line_of(SHUFFLES["channel_shuffle"], torch.bfloat16)

    assert "complex" not in names(with_interleaved_channels(line.module, line.inputs))


def test_without_a_shuffle_or_an_image_nothing_is_run() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).transpose(1, 2)  # type: ignore[no-any-return]

    model, x = Heads(), torch.randn(2, 3, 6)
    heads = straight_line(model, list(model.parameters()), Call((x,), {}))
    convolutions = line_of(lambda a, b: a * b)

    for line in (heads, convolutions):
        assert with_interleaved_channels(line.module, ()) is line.module


def test_channels_last_is_where_it_is_done() -> None:
    line = line_of(SHUFFLES["torchvision's"])
    with torch.no_grad():
        made = in_channels_last(line.module, line.inputs)
        output = made(*line.inputs)[0]

    assert "complex" in names(made)
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output, line.outputs[0])


def test_layers_with_a_shuffle_between_them_are_one_region() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ChannelShuffle(2), nn.Conv2d(6, 4, 1)).eval()
    x = torch.randn(N, 3, H, W)
    fast = optimizer.optimize(model, x, level=2, tune_seconds=0)

    assert len(fast.report.choices) == 1
    torch.testing.assert_close(fast(x), model(x))
