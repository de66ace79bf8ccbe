"""Names of a model's own, in the code and the module that are made of it, and what has no name."""

from __future__ import annotations

import collections
import copy
import enum
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer import InputError
from optimizer.frontend.dynamo import GuardedModule
from optimizer.frontend.module import OptimizedModule, Unchanged
from tests.single_pass import Forward

ROWS = torch.linspace(-2, 2, 32).reshape(1, 2, 4, 4)
LEVELS = pytest.mark.parametrize("level", [1, 2])

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


def reloaded(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def optimized(model: nn.Module, *args: Any, **options: Any) -> OptimizedModule | Unchanged:
    return optimizer.optimize(model, args, tune_seconds=0, engines=(), **options)


def assert_lives(model: nn.Module, fast: Any, *args: Any) -> None:
    """The result computes what the model does, whatever an owner does to it."""
    expected = model(*args)
    again = reloaded(fast)
    again.load_state_dict(fast.state_dict())
    for each in (fast, copy.copy(fast), copy.deepcopy(fast), again):
        torch.testing.assert_close(each(*args), expected, equal_nan=True)
    torch.testing.assert_close(fast.refit(model.state_dict())(*args), expected, equal_nan=True)
    assert isinstance(fast.report, optimizer.Report)


@LEVELS
@pytest.mark.parametrize("kind", ["parameter", "buffer", "layer", "outer", "inner"])
@torch.no_grad()
def test_a_model_may_call_its_own_what_it_likes(kind: str, level: int) -> None:
    model = Held(kind, *NAMES).eval()

    fast = optimized(model, ROWS, level=level)

    assert isinstance(fast, OptimizedModule)
    assert level < 2 or "is not lowered" not in str(fast.report)
    assert_lives(model, fast, ROWS)


@LEVELS
@pytest.mark.parametrize("name", ["report", "class", "self"])
@torch.no_grad()
def test_it_may_do_so_where_no_pass_runs_and_nothing_is_checked(name: str, level: int) -> None:
    model = Held("layer", name).eval()

    assert_lives(model, optimized(model, ROWS, level=level, only=(), check=None), ROWS)


@pytest.mark.parametrize("kind", ["parameter", "layer", "inner"])
@pytest.mark.parametrize("name", ["report", "class", "code", 'a"b'])
@torch.no_grad()
def test_what_it_calls_so_can_be_exported_and_optimized_again(name: str, kind: str) -> None:
    model = Held(kind, name).eval()
    fast = optimized(model, ROWS, level=1)

    exported = torch.export.export(fast, (ROWS,)).module()

    torch.testing.assert_close(exported(ROWS), model(ROWS))
    assert_lives(model, optimized(fast, ROWS), ROWS)
    torch.testing.assert_close(optimizer.capture(model, ROWS)(ROWS), model(ROWS))


class Opaque(Held):
    """A layer that is called as it is keeps its names; what the model reads of it has others."""

    def __init__(self) -> None:
        super().__init__("sub", "layer")
        self.sub = Iterated()

    def forward(self, x: Tensor) -> Any:
        return self.last(self.sub(x) + self.sub["class"](x))


class Iterated(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({"class": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 if bool((x > 100).any()) else len(self)  # chosen by data
        for layer in self.values():
            x = layer(x) * scale
        return x


@LEVELS
@torch.no_grad()
def test_a_layer_that_is_called_as_it_is_keeps_its_names(level: int) -> None:
    model = Opaque().eval()

    fast = optimized(model, ROWS, level=level)

    assert level == 0 or isinstance(fast, GuardedModule)
    assert_lives(model, fast, ROWS)


def called_refit() -> nn.Module:
    """Left as it is: its branch is chosen by data."""
    text = "m.refit(x) if x.sum() > 100 else m.refit(x) * 2"
    return Forward(text, refit=nn.Linear(4, 4)).eval()


@torch.no_grad()
def test_a_layer_called_refit_is_not_called_to_refit() -> None:
    model, other = called_refit(), called_refit()
    fast = optimized(model, ROWS)

    fast.refit(other.state_dict())

    assert isinstance(fast, Unchanged | GuardedModule)
    torch.testing.assert_close(fast(ROWS), other(ROWS))


class Nan(nn.Module):
    def forward(self, x: Tensor, nan: Tensor) -> Tensor:
        return torch.where(nan > 0, float("nan"), x)


class Inf(nn.Module):
    def forward(self, x: Tensor, inf: Tensor) -> Tensor:
        return x.clamp(max=float("inf")).masked_fill(inf > 0, float("-inf"))


class Device(nn.Module):
    def forward(self, x: Tensor, device: Tensor) -> Tensor:
        return x.relu().to(torch.device("cpu")) + device


class Torch(nn.Module):
    def forward(self, x: Tensor, torch: Tensor) -> Tensor:
        return F.gelu(x) + torch


class Slice(nn.Module):
    def forward(self, x: Tensor, slice: Tensor) -> Tensor:  # noqa: A002
        return x[..., 1:] + slice[..., 1:]


class Getattr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor, getattr: Tensor) -> Any:  # noqa: A002
        return self.layers(x) + getattr


class Self(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(this, x: Tensor, self: Tensor) -> Any:  # noqa: N805
        return this.layer(x) + self


@pytest.mark.parametrize(("level", "check"), [(0, "each"), (1, "final"), (2, None)])
@pytest.mark.parametrize("kind", [Nan, Inf, Device, Torch, Slice, Getattr, Self])
@torch.no_grad()
def test_an_argument_may_be_called_as_what_code_names(
    kind: Callable[[], nn.Module], check: Any, level: int
) -> None:
    model, name = kind().eval(), kind.__name__.lower()

    fast = optimized(model, ROWS, ROWS, level=level, check=check)

    assert isinstance(fast, Unchanged | GuardedModule)
    assert f": its argument '{name}'" in str(fast.report)
    assert_lives(model, fast, ROWS, ROWS)


class Harmless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, input: Tensor, nan: float = float("nan")) -> Tensor:  # noqa: A002
        return F.relu(self.layer(input)) * nan


@LEVELS
@torch.no_grad()
def test_an_argument_hides_no_name_that_is_not_needed(level: int) -> None:
    model = Harmless().eval()

    fast = optimized(model, ROWS, level=level)

    assert isinstance(fast, OptimizedModule)
    assert_lives(model, fast, ROWS)
    torch.testing.assert_close(fast(input=ROWS, nan=2.0), model(ROWS, 2.0))


class Color(enum.Enum):
    RED = 1


class Pair(collections.namedtuple("Pair", "first second")):
    """A tuple that code names by its class."""


def then(function: Callable[[Tensor, Any], Any], default: Any) -> nn.Module:
    class Model(Forward):
        def forward(self, x: Tensor, given: Any = default) -> Any:
            return function(self.layer(x), given)

    return Model("m", layer=nn.Linear(4, 4)).eval()


def with_default(default: Any) -> nn.Module:
    return then(lambda y, given: (y.relu(), given), default)


WITHOUT_LITERAL = (
    *(F.relu, lambda x: x, nn.ReLU(), nn.ReLU, object(), np.float64(2), np.float32(0.1)),
    *(np.int64(3), np.ones(4), {1}, b"1", {"a": Color.RED}, {Color.RED: 1.0}, complex(-0.0, 0.0)),
    {"a": Pair(1, 2)},
)


@LEVELS
@pytest.mark.parametrize("default", WITHOUT_LITERAL, ids=lambda each: str(type(each)))
@torch.no_grad()
def test_a_default_without_a_literal_is_returned_as_in_eager(default: Any, level: int) -> None:
    model = with_default(default)

    fast = optimized(model, ROWS, level=level, check=None)

    torch.testing.assert_close(fast(ROWS)[0], model(ROWS)[0])
    assert type(fast(ROWS)[1]) is type(default)


BOUND: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any, Any]] = {
    "a function": (lambda y, given: given(y), F.relu, torch.tanh),
    "a lambda": (lambda y, given: given(y), lambda y: y * 2, torch.tanh),
    "a number of numpy": (lambda y, given: y * given, np.float32(0.5), 0.25),
}


@LEVELS
@pytest.mark.parametrize("name", BOUND)
@torch.no_grad()
def test_a_default_without_a_literal_is_bound(name: str, level: int) -> None:
    function, default, other = BOUND[name]
    model = then(function, default)

    fast = optimized(model, ROWS, level=level)

    assert "left as it is" not in str(fast.report)
    torch.testing.assert_close(fast(ROWS), model(ROWS))
    with pytest.raises(InputError, match="optimized for given="):
        fast(ROWS, other)
    again = optimizer.optimize(model, (ROWS, other), level=level, tune_seconds=0)
    torch.testing.assert_close(again(ROWS, other), model(ROWS, other))


LITERALS = (
    *(2.0, -0.0, float("nan"), "it's", None, ..., [1.0, [2]], (1,), {"a": [float("inf")]}),
    *(Color.RED, Pair(1.0, 2), torch.float32, torch.device("cpu"), slice(1, None), 2 + 1j),
)


@LEVELS
@pytest.mark.parametrize("default", LITERALS, ids=str)
@torch.no_grad()
def test_a_default_that_has_a_literal_is_kept(default: Any, level: int) -> None:
    model = with_default(default)

    fast = optimized(model, ROWS, level=level, check=None)

    again = copy.deepcopy(fast)
    for each in (fast, again):
        assert isinstance(each, OptimizedModule)
        torch.testing.assert_close(each(ROWS)[0], model(ROWS)[0])
        assert repr(each(ROWS)[1]) == repr(default)


RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "an enumerated value in a dict": lambda y: {"a": Color.RED, "y": y},
    "an enumerated key": lambda y: {Color.RED: y},
    "a tuple with one as key": lambda y: {("a", Color.RED): y},
    "an operator in a dict": lambda y: {"a": torch.ops.aten.relu.default, "y": y},
    "a dict in a list": lambda y: [{"a": {"b": Color.RED}}, y],
    "a complex zero": lambda y: [y, complex(-0.0, 0.0), complex(0.0, -0.0)],
    "a device in a dict": lambda y: {"a": torch.device("cpu"), "y": y, "nan": float("nan")},
    "a slice in a dict": lambda y: {"a": slice(1, 2), "y": y},
}


@LEVELS
@pytest.mark.parametrize("check", ["final", None])
@pytest.mark.parametrize("case", RETURNED)
@torch.no_grad()
def test_what_is_returned_is_written_down_or_left(case: str, check: Any, level: int) -> None:
    model = Forward(lambda m, x: RETURNED[case](m.layer(x)), layer=nn.Linear(4, 4)).eval()

    fast = optimized(model, ROWS, level=level, check=check)

    assert repr(fast(ROWS)) == repr(model(ROWS))
