"""Arguments whose repr is no code: a graph holds what they stand for, or the model says why not."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import toolkit
from optimizer.core.errors import Refused
from optimizer.frontend.names import literal
from optimizer.rewrite.edit import insert_function
from tests.single_pass import Forward, ForwardOfTwo, texts

LEVELS = pytest.mark.parametrize("level", [0, 1, 2])


class Number(float):
    """One whose repr names a class of its own."""

    def __repr__(self) -> str:
        return f"Number({float(self)})"


class Choice(enum.IntEnum):
    TWO = 2


class Flags(enum.IntFlag):
    ONE = 1
    TWO = 2


def calling(text: str) -> nn.Module:
    """Computes an expression of what a linear layer gives, y, and of what is given, x."""
    function = eval(f"lambda y, x: {text}")
    return Forward(lambda m, x: function(m.linear(x), x), linear=nn.Linear(8, 8)).eval()


CALLS = """
    y * np.float64(0.5); np.float64(0.5) * y; y * np.float32(0.5) + np.float16(2);
    np.int64(2) * y - np.uint8(1); y * np.bool_(True); y / np.sqrt(8); y ** np.float64(2);
    y.sum(np.int64(1)); y.sum(dim=(np.int64(0), np.int64(1))); y[np.int64(0), np.int64(1)];
    y.reshape([np.int64(4), np.int64(16)]); y[np.int64(0) : np.int64(4) : np.int64(2), ...];
    torch.add(y, x, alpha=np.float64(0.5)); torch.clamp(y, np.float32(-1), np.float64(math.inf));
    F.leaky_relu(y, np.float64(0.1)); torch.full((8,), np.float64(0.5)) * y;
    F.gelu(y, approximate=np.str_("tanh")); F.pad(y, (np.int64(1), 0), value=np.float64(2));
    F.interpolate(y[None], scale_factor=np.float64(2)); y.reshape(Choice.TWO, -1) * Choice.TWO;
    y.expand(torch.Size([8, 8])).to(torch.float64); y * math.nan; y.permute(*range(1, -1, -1));
    y.clamp(max=math.inf).masked_fill(x > 0, -math.inf)
"""
UNNAMED = """
    (y, np.float64(0.5)); (y, {"a": np.int64(2)}); y * np.longdouble(0.5); y * Number(0.5);
    y.sum(Flags.ONE & Flags.TWO); y * complex(0, math.inf)
"""


@LEVELS
@pytest.mark.parametrize("text", texts(CALLS))
def test_numbers_of_numpy_are_recorded_as_numbers(text: str, level: int) -> None:
    model, x = calling(text), torch.randn(8, 8)
    fast = optimizer.optimize(model, x, level=level)

    assert isinstance(fast, fx.GraphModule), fast.report.remarks
    assert "numpy" not in fast.code
    torch.testing.assert_close(fast(x), model(x), equal_nan=True)


@pytest.mark.parametrize("text", texts(UNNAMED))
def test_what_code_cannot_name_leaves_the_model_as_it_is(text: str) -> None:
    model, x = calling(text), torch.randn(8, 8)
    fast = optimizer.optimize(model, x, check=None)
    expected, actual = model(x), fast(x)

    assert re.search("code cannot name|it reaches Number", str(fast.report))
    torch.testing.assert_close(actual, expected, equal_nan=True)
    for one, other in zip(actual, expected, strict=True) if isinstance(actual, tuple) else ():
        assert type(one) is type(other)


LAYERS = """
    nn.LeakyReLU(np.float64(0.1)); nn.ELU(np.float32(0.5)); nn.Dropout(np.float64(0.5));
    nn.Hardtanh(np.float32(-1), np.float64(1)); nn.Upsample(scale_factor=np.float64(2));
    nn.BatchNorm2d(3, eps=np.float64(1e-3), momentum=np.float32(0.1)); nn.AvgPool2d(np.int64(2));
    nn.Conv2d(3, 3, 3, stride=(np.int64(1), np.int64(2)), padding=np.int64(1));
    nn.ConstantPad2d(1, np.float64(0.0)); nn.GELU(np.str_("tanh"))
"""


@LEVELS
@pytest.mark.parametrize("layer", texts(LAYERS))
def test_layers_with_settings_of_numpy(layer: str, level: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), eval(layer), nn.Conv2d(3, 3, 1)).eval()
    x = torch.randn(1, 3, 8, 8)
    fast = optimizer.optimize(model, x, level=level, disable=["remove_identities"], tune_seconds=0)

    assert isinstance(fast, fx.GraphModule)
    assert not any("raised" in remark for remark in fast.report.remarks)
    torch.testing.assert_close(fast(x), model(x))


def test_a_setting_that_is_an_object_leaves_the_model_as_it_is() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ELU(Number(0.5))).eval(), torch.ones(1, 3, 8, 8)
    fast = optimizer.optimize(model, x, level=2)

    assert "it reaches alpha, a Number" in fast.report.remarks[0]
    torch.testing.assert_close(fast(x), model(x))


def test_what_is_inserted_is_named_or_refused() -> None:
    module = optimizer.capture(nn.Sequential(nn.ReLU()), torch.ones(2))
    (relu,) = toolkit.find(module, F.relu)
    made = insert_function(relu, torch.mul, (relu.args[0], np.float64(2)))

    assert made.args[1:] == (2.0,)
    assert type(made.args[1]) is float
    with pytest.raises(Refused, match="cannot name a Fraction"):
        insert_function(relu, torch.mul, (relu.args[0], Fraction(1, 2)))


def test_literals_keep_their_types_and_signs() -> None:
    given = [True, 1, 1.0, -0.0, 1j, "text", None, ..., torch.float16, torch.Size([2]), Choice.TWO]
    found = literal((given, {"key": slice(np.int64(1), None)}))

    assert list(map(repr, found[0])) == list(map(repr, [*given[:-2], (2,), Choice.TWO]))
    assert found[1] == {"key": slice(1, None)}
    assert type(found[1]["key"].start) is int
    with pytest.raises(TypeError, match="cannot name a complex64"):
        literal(np.complex64(1j))


def divides(m: Any, x: Tensor, by: Any) -> Tensor:
    """By a number that it is given, in whatever."""
    while isinstance(by, dict | list | tuple):
        by = by["by"] if isinstance(by, dict) else by[0]
    return F.relu(m.conv(x)) / by


NUMBERS = (0.0, -0.0, 0, False, 1.0, 1, True, math.nan, math.inf)
WITHIN: dict[str, Callable[[Any], Any]] = {
    "alone": lambda number: number,
    "in a tuple": lambda number: (number,),
    "in a list in a dict": lambda number: {"by": [number]},
}


@LEVELS
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, math.nan])
@torch.no_grad()
def test_a_number_is_no_other_that_equals_it(number: Any, within: str, level: int) -> None:
    model = ForwardOfTwo(divides, conv=nn.Conv2d(3, 4, 3)).eval()
    x = torch.randn(2, 3, 8, 8)
    example = (x, WITHIN[within](number))

    fast = optimizer.optimize(model, example, level=level, tune_seconds=0, engines=())

    for other in NUMBERS:
        expected = model(x, WITHIN[within](other))
        found = fast(x, WITHIN[within](other))
        torch.testing.assert_close(found, expected, equal_nan=True)
    assert level < 2 or "is not lowered" not in str(fast.report)


def test_a_pattern_with_a_zero_is_none_of_the_other_zero() -> None:
    module = optimizer.capture(Forward("(x.relu() + 0.0) * (x.tanh() + -0.0)"), torch.ones(2))

    edited = toolkit.replace_pattern(module, lambda x: x + -0.0, lambda x: x)

    added = [node.args[1] for node in edited.graph.nodes if node.name.startswith("add")]
    assert repr(added) == "[0.0]"
