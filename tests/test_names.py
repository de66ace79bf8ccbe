"""Names of a model's own in the code that is made of it, and values that code cannot write."""

from __future__ import annotations

import collections
import copy
import enum
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import InputError
from tests.single_pass import Forward, ForwardOfTwo, function_of, rows, texts
from tests.test_snapshot import saved_and_loaded

ROWS = torch.linspace(-2, 2, 32).reshape(1, 2, 4, 4)
LEVELS = pytest.mark.parametrize("level", [0, 2])

# Of the results' own API, of the GraphModule that they are, of Python, and of generated code.
NAMES = (
    *("report", "refit", "lower", "prepare", "_plans", "_prepared_plans", "_class"),
    *("code", "graph", "meta", "recompile", "_code", "None", "class", 'a"b', "a\\b", "\ufb01"),
    *("self", "torch", "nan", "0"),
)


class Held(nn.Module):
    """Weights, buffers or layers by these names; or layers in layers by them, or so named."""

    def __init__(self, kind: str, *names: str) -> None:
        super().__init__()
        self.kind, self.names, self.last = kind, names, nn.Conv2d(2, 3, 3)
        for name in names:
            if kind == "parameter":
                self.register_parameter(name, nn.Parameter(torch.randn(4)))
            elif kind == "buffer":
                self.register_buffer(name, torch.randn(4))
            elif kind == "outer":
                self.add_module(name, nn.ModuleDict({"in": nn.Conv2d(2, 2, 1)}))
        self.sub = nn.ModuleDict({name: nn.Conv2d(2, 2, 1) for name in names if kind == "inner"})

    def forward(self, x: Tensor) -> Any:
        for name in self.names:
            held = self.sub[name] if self.kind == "inner" else getattr(self, name)
            held = held["in"] if self.kind == "outer" else held
            x = x * held if isinstance(held, Tensor) else held(x)
        return self.last(x)


def optimized(model, *args, **options):
    return optimizer.optimize(model, args, tune_seconds=0, engines=(), **options)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "outer", "inner"])
@torch.no_grad()
def test_a_model_may_call_its_own_what_it_likes(kind, level):
    """Copied, saved, refitted and optimized again, too."""
    model = Held(kind, *NAMES).eval()

    fast = optimized(model, ROWS, level=level)
    again = saved_and_loaded(fast)
    again.load_state_dict(fast.state_dict())

    assert isinstance(fast, optimizer.OptimizedModule)
    assert not any("is not lowered" in each for each in fast.report.remarks)
    others = copy.copy(fast), copy.deepcopy(fast), fast.refit(model.state_dict())
    for each in (fast, again, *others, optimized(fast, ROWS)):
        torch.testing.assert_close(each(ROWS), model(ROWS))
    if (kind, level) == ("inner", 1):
        exported = torch.export.export(fast, (ROWS,)).module()
        torch.testing.assert_close(exported(ROWS), model(ROWS))


NAMED = {
    "nan": "torch.where(nan > 0, float('nan'), x)",
    "torch": "F.gelu(x) + torch",
    "slice": "x[..., 1:] + slice[..., 1:]",
    "self": "m.layer(x) + self",
}


@pytest.mark.parametrize(("level", "check"), [(0, "each"), (2, None)])
@pytest.mark.parametrize("name", NAMED)
def test_an_argument_may_be_called_as_what_code_names(name, check, level):
    forward = function_of(f"m, x, {name}", NAMED[name])
    model = type("Named", (Forward,), {"forward": forward})("x", layer=nn.Linear(4, 4)).eval()

    fast = optimized(model, ROWS, ROWS, level=level, check=check)

    assert f": its argument '{name}'" in str(fast.report)
    for each in (fast, copy.deepcopy(fast)):
        torch.testing.assert_close(each(ROWS, ROWS), model(ROWS, ROWS), equal_nan=True)


class Color(enum.Enum):
    RED = 1


class Pair(collections.namedtuple("Pair", "first second")):
    """A tuple that code names by its class."""


class Choice(enum.IntEnum):
    TWO = 2


def then(text, default=None):
    """Computes an expression of what a linear layer gives, `y`, and of an argument."""
    function = function_of("y, x, given", text, np=np, Color=Color, Choice=Choice)

    class Model(Forward):
        def forward(self, x, given=default):
            return function(self.layer(x), x, given)

    return Model("m", layer=nn.Linear(4, 4)).eval()


LITERALS = (
    *(2.0, -0.0, float("nan"), "it's", ..., [1.0, [2]], {"a": [float("inf")]}, Color.RED),
    *(Pair(1.0, 2), torch.float32, torch.device("cpu"), slice(1, None), 2 + 1j),
)
WITHOUT_LITERAL = (
    *(F.relu, np.float32(0.1), np.ones(4), {1}, {Color.RED: 1.0}, complex(-0.0, 0.0)),
)
RETURNED = """
    {("a", Color.RED): y}; {"a": torch.ops.aten.relu.default, "y": y};
    [y, complex(-0.0, 0.0), complex(0.0, -0.0)]; {"a": slice(1, 2), "y": y, "nan": float("nan")};
    (y, {"a": np.int64(2)}); [y * np.longdouble(0.5)]
"""


def named(value):
    """The same in each process."""
    return str(getattr(value, "__name__", value))


@LEVELS
@rows(
    "text default",
    {named(each): ("y.relu(), given", each) for each in (*LITERALS, *WITHOUT_LITERAL)},
    {text: (text, None) for text in texts(RETURNED)},
)
@torch.no_grad()
def test_a_default_and_what_is_returned_is_written_down_or_left(text, default, level):
    model, written = then(text, default), any(default is each for each in LITERALS)

    fast = optimized(model, ROWS, level=level, check="final" if level else None)

    assert isinstance(fast, optimizer.OptimizedModule) or not written
    assert "np." not in text or "code cannot name" in str(fast.report)
    for each in (fast, copy.deepcopy(fast)) if written else (fast,):
        assert repr(each(ROWS)) == repr(model(ROWS))


@LEVELS
@rows("text default other",
    {"a function": ("given(y)", F.relu, torch.tanh),
     "a number of numpy": ("y * given", np.float32(0.5), 0.25)},
)  # fmt: skip
@torch.no_grad()
def test_a_default_without_a_literal_is_bound(text, default, other, level):
    model = then(text, default)

    fast = optimized(model, ROWS, level=level)

    assert "left as it is" not in str(fast.report)
    torch.testing.assert_close(fast(ROWS), model(ROWS))
    with pytest.raises(InputError, match="optimized for given="):
        fast(ROWS, other)
    again = optimized(model, ROWS, other, level=level)
    torch.testing.assert_close(again(ROWS, other), model(ROWS, other))


CALLS = """
    y * np.float32(0.5) + np.float64(2); np.int64(2) * y - np.uint8(1); y * np.bool_(True);
    y.sum(dim=(np.int64(0), np.int64(1))); y[np.int64(0) : np.int64(4), ...];
    torch.clamp(y, np.float32(-1), np.float64(math.inf)); F.gelu(y, approximate=np.str_("tanh"));
    y.reshape(Choice.TWO, -1) * Choice.TWO; y.expand(torch.Size([1, 2, 4, 4])).double()
"""
LAYERS = nn.Sequential(
    nn.Conv2d(2, 3, 3, stride=(np.int64(1), np.int64(2)), padding=np.int64(1)),
    nn.BatchNorm2d(3, eps=np.float64(1e-3), momentum=np.float32(0.1)),
    *(nn.LeakyReLU(np.float64(0.1)), nn.GELU(np.str_("tanh")), nn.AvgPool2d(np.int64(2))),
)


@rows("model", {text: (then(text),) for text in texts(CALLS)}, {"layers": (LAYERS.eval(),)})
def test_numbers_of_numpy_are_recorded_as_numbers(model):
    fast = optimizer.optimize(model, ROWS)

    assert isinstance(fast, fx.GraphModule), fast.report.remarks
    assert "numpy" not in fast.code
    assert not any("raised" in remark for remark in fast.report.remarks)
    torch.testing.assert_close(fast(ROWS), model(ROWS), equal_nan=True)


NUMBERS = (0.0, -0.0, 0, False, 1.0, 1, True, math.nan, math.inf)


@pytest.mark.parametrize(("text", "level"), [("z", 0), ("z['by'][0]", 0), ("z['by'][0]", 2)])
@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, math.nan])
@torch.no_grad()
def test_a_number_is_no_other_that_equals_it(number, text, level):
    model = ForwardOfTwo(f"F.relu(m.conv(x)) / {text}", conv=nn.Conv2d(2, 4, 3)).eval()

    def given(number):
        return number if text == "z" else {"by": [number]}

    fast = optimized(model, ROWS, given(number), level=level)

    for other in NUMBERS:
        expected = model(ROWS, given(other))
        torch.testing.assert_close(fast(ROWS, given(other)), expected, equal_nan=True)
    assert level < 2 or "is not lowered" not in str(fast.report)
