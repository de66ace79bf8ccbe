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
from tests.single_pass import Forward


class Number(float):
    """One whose repr names a class of its own."""

    def __repr__(self) -> str:
        return f"Number({float(self)})"


class Choice(enum.IntEnum):
    TWO = 2


class Flags(enum.IntFlag):
    ONE = 1
    TWO = 2


def calling(function: Callable[[Any, Tensor], Any]) -> nn.Module:
    """Calls a function with what a linear layer gives, and with what is given."""
    return Forward(lambda m, x: function(m.linear(x), x), linear=nn.Linear(8, 8)).eval()


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a factor": lambda y, x: y * np.float64(0.5),
    "a factor before": lambda y, x: np.float64(0.5) * y,
    "a narrow factor": lambda y, x: y * np.float32(0.5) + np.float16(2),
    "a whole factor": lambda y, x: np.int64(2) * y - np.uint8(1),
    "a truth": lambda y, x: y * np.bool_(True),
    "a square root": lambda y, x: y / np.sqrt(8),
    "a power": lambda y, x: y ** np.float64(2),
    "a dimension": lambda y, x: y.sum(np.int64(1)),
    "dimensions": lambda y, x: y.sum(dim=(np.int64(0), np.int64(1))),
    "a size": lambda y, x: y.reshape([np.int64(4), np.int64(16)]),
    "an index": lambda y, x: y[np.int64(0), np.int64(1)],
    "a slice": lambda y, x: y[np.int64(0) : np.int64(4) : np.int64(2), ...],
    "a keyword": lambda y, x: torch.add(y, x, alpha=np.float64(0.5)),
    "a bound": lambda y, x: torch.clamp(y, np.float32(-1), np.float64(math.inf)),
    "a slope": lambda y, x: F.leaky_relu(y, np.float64(0.1)),
    "a factory's": lambda y, x: torch.full((8,), np.float64(0.5)) * y,
    "a text": lambda y, x: F.gelu(y, approximate=np.str_("tanh")),
    "padding": lambda y, x: F.pad(y, (np.int64(1), 0), value=np.float64(2)),
    "a scale": lambda y, x: F.interpolate(y[None], scale_factor=np.float64(2)),
    "an enumeration": lambda y, x: y.reshape(Choice.TWO, -1) * Choice.TWO,
    "torch's own": lambda y, x: y.expand(torch.Size([8, 8])).to(torch.float64),
    "an infinity": lambda y, x: y.clamp(max=math.inf).masked_fill(x > 0, -math.inf),
    "no number": lambda y, x: y * math.nan,
    "a range": lambda y, x: y.permute(*range(1, -1, -1)),
}


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_numpy_are_recorded_as_numbers(name: str, level: int) -> None:
    model, x = calling(CALLS[name]), torch.randn(8, 8)
    fast = optimizer.optimize(model, x, level=level)

    assert isinstance(fast, fx.GraphModule), fast.report.remarks
    assert "numpy" not in fast.code
    torch.testing.assert_close(fast(x), model(x), equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, x: (y, np.float64(0.5)),  # the caller gets one of numpy's
        lambda y, x: (y, {"a": np.int64(2)}),
        lambda y, x: y * np.longdouble(0.5),
        lambda y, x: y * Number(0.5),
        lambda y, x: y.sum(Flags.ONE & Flags.TWO),
        lambda y, x: y * complex(0, math.inf),
    ],
)
def test_what_code_cannot_name_leaves_the_model_as_it_is(function: Any) -> None:
    model, x = calling(function), torch.randn(8, 8)
    fast = optimizer.optimize(model, x, check=None)
    expected, actual = model(x), fast(x)

    assert re.search("code cannot name|it reaches Number", str(fast.report))
    torch.testing.assert_close(actual, expected, equal_nan=True)
    for one, other in zip(actual, expected, strict=True) if isinstance(actual, tuple) else ():
        assert type(one) is type(other)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LeakyReLU(np.float64(0.1)),  # type: ignore[arg-type]
        lambda: nn.ELU(np.float32(0.5)),  # type: ignore[arg-type]
        lambda: nn.Dropout(np.float64(0.5)),  # type: ignore[arg-type]
        lambda: nn.Hardtanh(np.float32(-1), np.float64(1)),  # type: ignore[arg-type]
        lambda: nn.Upsample(scale_factor=np.float64(2)),  # type: ignore[arg-type]
        lambda: nn.BatchNorm2d(3, eps=np.float64(1e-3), momentum=np.float32(0.1)),  # type: ignore[arg-type]
        lambda: nn.AvgPool2d(np.int64(2)),  # type: ignore[arg-type]
        lambda: nn.Conv2d(3, 3, 3, stride=(np.int64(1), np.int64(2)), padding=np.int64(1)),  # type: ignore[arg-type]
        lambda: nn.ConstantPad2d(1, np.float64(0.0)),  # type: ignore[arg-type]
        lambda: nn.GELU(np.str_("tanh")),
    ],
)
def test_layers_with_settings_of_numpy(make: Callable[[], nn.Module], level: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), make(), nn.Conv2d(3, 3, 1)).eval()
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


class Divides(nn.Module):
    """By a number that it is given, in whatever."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, by: Any) -> Any:
        while isinstance(by, dict | list | tuple):
            by = by["by"] if isinstance(by, dict) else by[0]
        return F.relu(self.conv(x)) / by


NUMBERS = (0.0, -0.0, 0, False, 1.0, 1, True, math.nan, math.inf)
WITHIN: dict[str, Callable[[Any], Any]] = {
    "alone": lambda number: number,
    "in a tuple": lambda number: (number,),
    "in a list in a dict": lambda number: {"by": [number]},
}


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, math.nan])
@torch.no_grad()
def test_a_number_is_no_other_that_equals_it(number: Any, within: str, level: int) -> None:
    model, x = Divides().eval(), torch.randn(2, 3, 8, 8)
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
