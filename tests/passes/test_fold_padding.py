"""Zeros around the input of a convolution become its own padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.core.node import module_of
from optimizer.testing import assert_equivalent, randomize
from tests.conftest import address
from tests.single_pass import Forward, assert_left_alone, callees, optimized_by

NAME = "fold_padding"
IMAGE = (2, 4, 7, 6)
PADS: dict[Callable[..., Any], nn.Module] = {}


def model(forward: Callable[..., Any], layer: nn.Module | None = None) -> nn.Module:
    held = {"conv": layer or nn.Conv2d(4, 3, 3), "pad": PADS.get(forward)}
    return randomize(Forward(forward, **held).double().eval())


def after(pad: nn.Module) -> Callable[..., Any]:
    forward = lambda m, x: m.conv(m.pad(x))  # noqa: E731
    PADS[forward] = pad
    return forward


CONV1D, CONV3D = nn.Conv1d(4, 3, 3), nn.Conv3d(4, 3, 2)
OWN = nn.Conv2d(4, 3, 3, padding=(1, 2))
# name: forward, layer, shape, padding
FOLDED: dict[str, tuple[Callable[..., Any], nn.Module | None, tuple[int, ...], Any]] = {
    "F.pad": (lambda m, x: m.conv(F.pad(x, (1, 1, 2, 2))), None, IMAGE, (2, 1)),
    "a keyword": (lambda m, x: m.conv(F.pad(x, pad=[1, 1, 0, 0])), None, IMAGE, (0, 1)),
    "zero": (lambda m, x: m.conv(F.pad(x, (1, 1), "constant", 0.0)), None, IMAGE, (0, 1)),
    "one dimension of two": (lambda m, x: m.conv(F.pad(x, (2, 2))), None, IMAGE, (0, 2)),
    "nothing": (lambda m, x: m.conv(F.pad(x, (0, 0))), None, IMAGE, (0, 0)),
    "a layer": (after(nn.ZeroPad2d((1, 1, 2, 2))), None, IMAGE, (2, 1)),
    "a layer of zeros": (after(nn.ConstantPad2d(1, 0.0)), None, IMAGE, (1, 1)),
    "no batch": (after(nn.ZeroPad2d(1)), None, IMAGE[1:], (1, 1)),
    "more than its own": (after(nn.ZeroPad2d(1)), OWN, IMAGE, (2, 3)),
    "valid": (after(nn.ZeroPad2d(1)), nn.Conv2d(4, 3, 3, padding="valid"), IMAGE, (1, 1)),
    "settings": (
        after(nn.ZeroPad2d(2)),
        nn.Conv2d(4, 2, (3, 2), stride=2, dilation=(2, 1), groups=2, bias=False),
        IMAGE,
        (2, 2),
    ),
    "one": (after(nn.ZeroPad1d(2)), CONV1D, (2, 4, 5), (2,)),
    "three": (lambda m, x: m.conv(F.pad(x, (1, 1, 2, 2))), CONV3D, (2, 4, 3, 3, 3), (0, 2, 1)),
    "the same twice": (lambda m, x: m.conv(F.pad(F.pad(x, (1, 1)), (1, 1))), None, IMAGE, (0, 2)),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDED)
def test_folds(case: str) -> None:
    forward, layer, shape, padding = FOLDED[case]
    given = model(forward, layer)
    x = torch.randn(shape, dtype=torch.float64)

    fast = optimized_by(NAME, given, x)

    (conv,) = [module_of(node) for node in fast.graph.nodes if node.op == "call_module"]
    assert callees(fast) == [type(given.conv)]
    assert conv.padding == padding
    assert address(conv.weight) == address(given.conv.weight)  # type: ignore[union-attr]
    for later in (x, torch.randn(*shape[:-1], 11, dtype=torch.float64)):
        assert_equivalent(given, fast, (later,))


def test_a_layer_that_is_called_twice_keeps_its_weights_and_its_other_call() -> None:
    given = model(lambda m, x: m.conv(F.pad(x, (1, 1))) + m.conv(F.pad(x, (1, 1), value=2.0)))
    x = torch.randn(IMAGE, dtype=torch.float64)

    fast = optimized_by(NAME, given, x)

    assert fast.report.counts() == {NAME: 1}
    assert_equivalent(given, fast, (x,))


def test_what_is_folded_into_it_later_sees_the_padding() -> None:
    layers = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3))
    given = randomize(layers.double().eval())
    x = torch.randn(IMAGE, dtype=torch.float64)

    fast = optimizer.optimize(given, x, level=1)

    assert fast.report.counts() == {NAME: 1, "fold_affine": 1}
    assert_equivalent(given, fast, (x,))


def written(m: Any, x: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1))
    x.mul_(2.0)
    return m.conv(padded)  # type: ignore[no-any-return]


def read(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    padded = F.pad(x, (1, 1))
    return m.conv(padded), padded


OTHER = "it pads with something else than a constant number of zeros"
DIFFERENTLY = "the convolution pads in another way"
SAME, ROUND = nn.Conv2d(4, 3, 3, padding="same"), nn.Conv2d(4, 3, 3, padding_mode="circular")
# name: forward, layer, reason
REFUSALS: dict[str, tuple[Callable[..., Any], nn.Module | None, str]] = {
    "another number": (lambda m, x: m.conv(F.pad(x, (1, 1), value=0.5)), None, OTHER),
    "a layer of another number": (after(nn.ConstantPad2d(1, -1.0)), None, OTHER),
    "by reflection": (lambda m, x: m.conv(F.pad(x, (1, 1, 1, 1), mode="reflect")), None, OTHER),
    "less than nothing": (lambda m, x: m.conv(F.pad(x, (-1, -1))), None, OTHER),
    "as many as there are": (lambda m, x: m.conv(F.pad(x, (x.shape[2], 7))), None, OTHER),
    "one side": (
        lambda m, x: m.conv(F.pad(x, (1, 0))),
        None,
        "it pads the two sides of a dimension differently",
    ),
    "channels": (
        lambda m, x: m.conv(F.pad(x[:, 1:3], (0, 0, 0, 0, 1, 1))),
        None,
        "it pads the channels or the batch",
    ),
    "a convolution that pads as it likes": (after(nn.ZeroPad2d(1)), SAME, DIFFERENTLY),
    "a convolution of a ring": (after(nn.ZeroPad2d(1)), ROUND, DIFFERENTLY),
    "a second reader": (read, None, "the layer's output is read elsewhere"),
    "a write between": (written, None, "what is padded is written later"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    forward, layer, reason = REFUSALS[case]
    given = model(forward, layer)
    x = torch.randn(IMAGE, dtype=torch.float64)

    fast = optimized_by(NAME, given, x)

    assert_left_alone(given, fast, (x,), reason)


def test_refuses_what_is_empty_but_for_the_zeros() -> None:
    given, x = model(lambda m, x: m.conv(F.pad(x, (2, 2)))), torch.ones(2, 4, 5, 0).double()

    fast = optimized_by(NAME, given, x)

    assert_left_alone(given, fast, (x,), "it is empty, which a convolution may not read")


def test_leaves_alone_what_stands_between() -> None:
    given = model(lambda m, x: m.conv(torch.relu(F.pad(x, (1, 1)))))

    fast = optimized_by(NAME, given, torch.randn(IMAGE, dtype=torch.float64))

    assert (fast.report.fired, fast.report.refused) == ((), ())


def test_refuses_a_layer_with_a_plain_tensor() -> None:
    given, x = model(lambda m, x: m.conv(F.pad(x, (1, 1)))), torch.randn(IMAGE).double()
    weight = given.conv.weight.detach().clone()
    del given.conv.weight
    given.conv.weight = weight

    fast = optimized_by(NAME, given, x)

    assert_left_alone(given, fast, (x,), "the layer has tensors that no cast of it reaches")
