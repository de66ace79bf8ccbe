"""Names of a model's own in the code that is made of it, and values that code cannot write."""

from __future__ import annotations

import collections
import copy
import enum
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import InputError, toolkit
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
        self.names, self.kind = names, kind
        for name in names:
            if kind == "parameter":
                self.register_parameter(name, nn.Parameter(torch.randn(4)))
            elif kind == "buffer":
                self.register_buffer(name, torch.randn(4))
            elif kind != "inner":
                layer = nn.Conv2d(2, 2, 1)
                self.add_module(name, nn.Sequential(layer) if kind == "outer" else layer)
        self.sub = nn.ModuleDict({name: nn.Conv2d(2, 2, 1) for name in names if kind == "inner"})
        self.last = nn.Conv2d(2, 3, 3)

    def forward(self, x: Tensor) -> Any:
        for name in self.names:
            held = self.sub[name] if self.kind == "inner" else getattr(self, name)
            x = x * held if self.kind in ("parameter", "buffer") else held(x)
        return self.last(x)


def optimized(model: nn.Module, *args: Any, **options: Any) -> Any:
    return optimizer.optimize(model, args, tune_seconds=0, engines=(), **options)


@torch.no_grad()
def assert_lives(model: nn.Module, fast: Any, *args: Any) -> None:
    """The result computes what the model does, whatever an owner does to it."""
    expected = model(*args)
    again = saved_and_loaded(fast)
    again.load_state_dict(fast.state_dict())
    for each in (fast, copy.copy(fast), copy.deepcopy(fast), again):
        torch.testing.assert_close(each(*args), expected, equal_nan=True)
    torch.testing.assert_close(fast.refit(model.state_dict())(*args), expected, equal_nan=True)
    assert isinstance(fast.report, optimizer.Report)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["parameter", "buffer", "layer", "outer", "inner"])
def test_a_model_may_call_its_own_what_it_likes(kind: str, level: int) -> None:
    model = Held(kind, *NAMES).eval()

    fast = optimized(model, ROWS, level=level)

    assert isinstance(fast, optimizer.OptimizedModule)
    assert "is not lowered" not in str(fast.report)
    assert_lives(model, fast, ROWS)


@pytest.mark.parametrize("kind", ["parameter", "layer", "inner"])
def test_what_it_calls_so_can_be_exported_and_optimized_again(kind: str) -> None:
    model = Held(kind, "report", "class", "code", 'a"b').eval()
    fast = optimized(model, ROWS, level=1)

    exported = torch.export.export(fast, (ROWS,)).module()

    torch.testing.assert_close(exported(ROWS), model(ROWS))
    assert_lives(model, optimized(fast, ROWS), ROWS)
    torch.testing.assert_close(optimizer.capture(model, ROWS)(ROWS), model(ROWS))


class Iterated(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        scale = 1 if bool((x > 100).any()) else len(self)  # chosen by data
        for layer in self.values():
            x = layer(x) * scale
        return x


def test_a_layer_that_is_called_as_it_is_keeps_its_names() -> None:
    child = Iterated({"class": nn.Linear(4, 4)})
    model = Holding("m.last(m.refit(x) + m.refit['class'](x))", refit=child, last=nn.Linear(4, 3))

    fast = optimized(model.eval(), ROWS, level=2)

    assert isinstance(fast, optimizer.GuardedModule)
    assert_lives(model, fast, ROWS)


class Holding(nn.Module):
    """Runs a text, which is compiled where it is called: so the module can be pickled."""

    def __init__(self, text: str, arguments: str = "x", **held: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        for each, value in held.items():
            setattr(self, each, value)
        forward = function_of(f"m, {arguments}", text)
        name = f"Holding {text.replace('.', '')}"  # as pickle finds it
        self.__class__ = type(name, (Holding,), {"forward": forward})
        globals()[name] = type(self)


NAMED = {
    "nan": "torch.where(nan > 0, float('nan'), x)",
    "torch": "F.gelu(x) + torch",
    "slice": "x[..., 1:] + slice[..., 1:]",
    "self": "m.layer(x) + self",
}


@pytest.mark.parametrize(("level", "check"), [(0, "each"), (2, None)])
@pytest.mark.parametrize("name", NAMED)
def test_an_argument_may_be_called_as_what_code_names(name: str, check: Any, level: int) -> None:
    model = Holding(NAMED[name], f"x, {name}").eval()

    fast = optimized(model, ROWS, ROWS, level=level, check=check)

    assert f": its argument '{name}'" in str(fast.report)
    assert_lives(model, fast, ROWS, ROWS)


class Color(enum.Enum):
    RED = 1


class Pair(collections.namedtuple("Pair", "first second")):
    """A tuple that code names by its class."""


class Number(float):
    """One whose repr names a class of its own."""

    def __repr__(self) -> str:
        return f"Number({float(self)})"


class Choice(enum.IntEnum):
    TWO = 2


def then(function: Callable[[Tensor, Any], Any], default: Any) -> nn.Module:
    class Model(Forward):
        def forward(self, x: Tensor, given: Any = default) -> Any:
            return function(self.layer(x), given)

    return Model("m", layer=nn.Linear(4, 4)).eval()


LITERALS = (
    *(2.0, -0.0, float("nan"), "it's", ..., [1.0, [2]], {"a": [float("inf")]}, Color.RED),
    *(Pair(1.0, 2), torch.float32, torch.device("cpu"), slice(1, None), 2 + 1j),
)
WITHOUT_LITERAL = (
    *(F.relu, nn.ReLU(), np.float32(0.1), np.int64(3), np.ones(4), {1}, b"1", {Color.RED: 1.0}),
    *(complex(-0.0, 0.0), {"a": Pair(1, 2)}),
)


def named(value: Any) -> str:
    """The same in each process."""
    return str(getattr(value, "__name__", value))


@LEVELS
@pytest.mark.parametrize("default", [*LITERALS, *WITHOUT_LITERAL], ids=named)
@torch.no_grad()
def test_a_default_is_returned_as_in_eager(default: Any, level: int) -> None:
    model = then(lambda y, given: (y.relu(), given), default)

    fast = optimized(model, ROWS, level=level, check=None)

    written = any(default is each for each in LITERALS)
    for each in (fast, copy.deepcopy(fast)) if written else (fast,):
        assert isinstance(each, optimizer.OptimizedModule) or not written
        torch.testing.assert_close(each(ROWS)[0], model(ROWS)[0])
        assert type(each(ROWS)[1]) is type(default)
        assert repr(each(ROWS)[1]) == repr(default)


BOUND: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any, Any]] = {
    "a function": (lambda y, given: given(y), F.relu, torch.tanh),
    "a number of numpy": (lambda y, given: y * given, np.float32(0.5), 0.25),
}


@LEVELS
@rows("function default other", BOUND)
@torch.no_grad()
def test_a_default_without_a_literal_is_bound(
    function: Any, default: Any, other: Any, level: int
) -> None:
    model = then(function, default)

    fast = optimized(model, ROWS, level=level)

    assert "left as it is" not in str(fast.report)
    torch.testing.assert_close(fast(ROWS), model(ROWS))
    with pytest.raises(InputError, match="optimized for given="):
        fast(ROWS, other)
    again = optimized(model, ROWS, other, level=level)
    torch.testing.assert_close(again(ROWS, other), model(ROWS, other))


RETURNED: dict[str, tuple[Callable[[Tensor], Any]]] = {
    "a key": (lambda y: {("a", Color.RED): y},),
    "an operator": (lambda y: {"a": torch.ops.aten.relu.default, "y": y},),
    "a dict in a list": (lambda y: [{"a": {"b": Color.RED}}, y],),
    "complex zeros": (lambda y: [y, complex(-0.0, 0.0), complex(0.0, -0.0)],),
    "a device": (lambda y: {"a": torch.device("cpu"), "y": y, "nan": float("nan")},),
    "a slice": (lambda y: {"a": slice(1, 2), "y": y},),
}


@LEVELS
@rows("returned", RETURNED)
@torch.no_grad()
def test_what_is_returned_is_written_down_or_left(returned: Any, level: int) -> None:
    model = Forward(lambda m, x: returned(m.layer(x)), layer=nn.Linear(4, 4)).eval()

    fast = optimized(model, ROWS, level=level, check="final" if level else None)

    assert repr(fast(ROWS)) == repr(model(ROWS))


def calling(text: str) -> nn.Module:
    """Computes an expression of what a linear layer gives, y, and of what is given, x."""
    function = eval(f"lambda y, x: {text}")
    return Forward(lambda m, x: function(m.linear(x), x), linear=nn.Linear(8, 8)).eval()


CALLS = """
    np.float64(0.5) * y; y * np.float32(0.5) + np.float16(2); np.int64(2) * y - np.uint8(1);
    y * np.bool_(True); y.sum(dim=(np.int64(0), np.int64(1)));
    y[np.int64(0) : np.int64(4) : np.int64(2), ...]; torch.add(y, x, alpha=np.float64(0.5));
    torch.clamp(y, np.float32(-1), np.float64(math.inf)); torch.full((8,), np.float64(0.5)) * y;
    F.gelu(y, approximate=np.str_("tanh")); y.reshape(Choice.TWO, -1) * Choice.TWO;
    y.expand(torch.Size([8, 8])).to(torch.float64); y.permute(*range(1, -1, -1)) * math.nan
"""
UNNAMED = """
    (y, np.float64(0.5)); (y, {"a": np.int64(2)}); y * np.longdouble(0.5); y * Number(0.5);
    y * complex(0, math.inf)
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


@LEVELS
def test_layers_with_settings_of_numpy(level: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 3, 3, stride=(np.int64(1), np.int64(2)), padding=np.int64(1)),
        nn.BatchNorm2d(3, eps=np.float64(1e-3), momentum=np.float32(0.1)),
        nn.Hardtanh(np.float32(-1), np.float64(1)),
        nn.ConstantPad2d(1, np.float64(0.0)),
        nn.LeakyReLU(np.float64(0.1)),
        nn.GELU(np.str_("tanh")),
        nn.AvgPool2d(np.int64(2)),
        nn.Dropout(np.float64(0.5)),
    ).eval()
    x = torch.randn(1, 3, 8, 8)
    fast = optimized(model, x, level=level, disable=["remove_identities"])

    assert isinstance(fast, fx.GraphModule)
    assert not any("raised" in remark for remark in fast.report.remarks)
    torch.testing.assert_close(fast(x), model(x))


def divides(m: Any, x: Tensor, by: Any) -> Tensor:
    """By a number that it is given, in whatever."""
    while isinstance(by, dict | list):
        by = by["by"] if isinstance(by, dict) else by[0]
    return F.relu(m.conv(x)) / by


NUMBERS = (0.0, -0.0, 0, False, 1.0, 1, True, math.nan, math.inf)
WITHIN: dict[str, tuple[Callable[[Any], Any]]] = {
    "alone": (lambda number: number,),
    "in a list in a dict": (lambda number: {"by": [number]},),
}


@LEVELS
@rows("within", WITHIN)
@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, math.nan])
@torch.no_grad()
def test_a_number_is_no_other_that_equals_it(number: Any, within: Any, level: int) -> None:
    model = ForwardOfTwo(divides, conv=nn.Conv2d(3, 4, 3)).eval()
    x = torch.randn(2, 3, 8, 8)

    fast = optimized(model, x, within(number), level=level)

    for other in NUMBERS:
        expected = model(x, within(other))
        torch.testing.assert_close(fast(x, within(other)), expected, equal_nan=True)
    assert level < 2 or "is not lowered" not in str(fast.report)


def test_a_pattern_with_a_zero_is_none_of_the_other_zero() -> None:
    module = optimizer.capture(Forward("(x.relu() + 0.0) * (x.tanh() + -0.0)"), torch.ones(2))

    edited = toolkit.replace_pattern(module, lambda x: x + -0.0, lambda x: x)

    added = [node.args[1] for node in edited.graph.nodes if node.name.startswith("add")]
    assert repr(added) == "[0.0]"
