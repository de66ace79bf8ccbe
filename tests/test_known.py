"""What code may be recorded with stand-ins, and what is an obstacle, told with its line."""

from __future__ import annotations

import functools
import math
import operator
import random
import types
import warnings
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.backends.cuda import flash_sdp_enabled
from torch.nn import functional as F

import models
import optimizer
from models._torchvision_import import import_torchvision
from optimizer.frontend.known import Code

X = torch.linspace(-1, 1, 12).reshape(3, 4)
NAMES, TABLE, HISTORY = ["a", "b"], {"relu": torch.relu, "scale": 2.0}, list[Any]()
COUNT = 0


class Mode(Enum):
    """A choice between two things."""

    ONE = 1
    TWO = 2


class Settings:
    """An object of a class that is not known."""

    scale = 2.0


SETTINGS = Settings()


class Counter:
    """Counts in its class."""

    calls = 0

    @classmethod
    def step(cls) -> int:
        cls.calls += 1
        return cls.calls


class Inherits(Counter):
    """Reaches what its base does."""


class Holding(nn.Module):
    """Runs a function, which finds what the module holds."""

    def __init__(self, function: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)

    def helper(self, x: Tensor) -> Tensor:
        return x * 2

    @property
    def factor(self) -> float:
        return self.scale * 3


def counted(m: Any, x: Tensor) -> Any:
    global COUNT
    COUNT += 1
    return x * COUNT


def closure() -> Callable[..., Any]:
    calls = 0

    def step(m: Any, x: Tensor) -> Any:
        nonlocal calls
        calls += 1
        return x * calls

    return step


def sets(m: Any, x: Tensor) -> Any:
    m.kept = x
    return x


def tries(m: Any, x: Tensor) -> Any:
    try:
        return x.view(2, 6)
    except RuntimeError:
        return x


def imports(m: Any, x: Tensor) -> Any:
    import time

    return x * time.time()


@torch.no_grad()
def decorated(m: Any, x: Tensor) -> Any:
    return x * 2


def with_gradients(m: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        return m.layer(x)


@functools.lru_cache
def kept(number: int) -> int:
    return number + 1


def matches(m: Any, x: Any) -> Any:
    match x:
        case torch.Tensor():
            return x * 2
    return x


KNOWN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "layers and functions": (lambda m, x: F.relu(m.layer(x)) + torch.tanh(x).mean(), {}),
    "a helper": (lambda m, x: m.helper(x) * m.factor, {"scale": 2.0}),
    "a loop over what is held": (lambda m, x: sum(s * x for s in m.scales), {"scales": [1.0, 2.0]}),
    "tables": (lambda m, x: TABLE["relu"](x) * TABLE["scale"] * len(NAMES), {}),
    "an enumeration": (lambda m, x: x if m.mode == Mode.ONE else -x, {"mode": Mode.TWO}),
    "a partial function": (lambda m, x: m.act(x), {"act": functools.partial(F.gelu)}),
    "pure functions": (lambda m, x: x * math.sqrt(4) * functools.reduce(operator.mul, [1, 2]), {}),
    "a choice by name": (lambda m, x: m.layer(x) * F.relu(x), {}),
    "a name that is computed": (lambda m, x: getattr(m, f"{'lay'}er")(x), {}),
    "a list of its own": (lambda m, x: torch.cat([x, *[x.exp()]], 1), {}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_listed_is_recorded(name: str) -> None:
    function, held = KNOWN[name]
    model = Holding(function, **held).eval()

    assert next(Code(model).obstacles(), "") == ""
    torch.testing.assert_close(optimizer.capture(model, X)(X), model(X))


UNKNOWN: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "a global": (counted, {}, "it sets the global 'COUNT' (test_known.py:"),
    "an enclosing function": (closure(), {}, "it sets 'calls' of an enclosing function"),
    "an attribute": (sets, {}, "it sets the attribute 'kept'"),
    "a try": (tries, {}, "it has a try statement"),
    "an import": (imports, {}, "it imports time"),
    "a class counter": (lambda m, x: x * Counter.step(), {}, "it reaches Counter, a type"),
    "an inherited one": (lambda m, x: x * Inherits.step(), {}, "it reaches Inherits, a type"),
    "an object": (lambda m, x: x * SETTINGS.scale, {}, "it reaches SETTINGS, a Settings"),
    "a held object": (lambda m, x: x * m.cfg.scale, {"cfg": SETTINGS}, "cfg, a Settings"),
    "Python's random numbers": (lambda m, x: x * random.random(), {}, "random.random"),
    "a generator": (lambda m, x: x * m.dice.random(), {"dice": random.Random(0)}, "dice, a Random"),
    "a seed": (lambda m, x: (torch.manual_seed(0), x)[1], {}, "manual_seed()"),
    "a mode that is asked for": (lambda m, x: x * torch.is_grad_enabled(), {}, "is_grad_enabled"),
    "a backend": (lambda m, x: x * torch.backends.cudnn.enabled, {}, "process for torch.backends"),
    "a decorator of torch": (decorated, {}, "decorated() is decorated by"),
    "a cached function": (lambda m, x: x * kept(2), {}, "it reaches kept, a _lru_cache_wrapper"),
    "setattr": (lambda m, x: setattr(m, "n", 1) or x, {}, "it uses setattr()"),
    "globals": (lambda m, x: x * globals()["COUNT"], {}, "it uses globals()"),
    "print": (lambda m, x: print("here") or x, {}, "it uses print()"),
    "a type that is asked for": (matches, {}, "its code has MATCH_CLASS"),
    "a __dict__": (lambda m, x: x * len(m.__dict__), {}, "it uses '__dict__'"),
    "a layer that is changed": (lambda m, x: m.train().layer(x), {}, "it uses 'train'"),
    "a module outside": (
        lambda m, x: m.others[0](x), {"others": [nn.Linear(4, 4)]}, "a module outside the model"
    ),
    "many values": (
        lambda m, x: x * len(m.words), {"words": dict.fromkeys(range(9999), 0)}, "9999 values"
    ),
    "attrgetter": (lambda m, x: operator.attrgetter("layer")(m)(x), {}, "operator.attrgetter"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_listed_is_an_obstacle(name: str) -> None:
    function, held, told = UNKNOWN[name]
    model = Holding(function, **held).eval()

    assert told in next(Code(model).obstacles(), "")
    with pytest.raises(optimizer.CaptureError, match=r"it |its |decorated"):
        optimizer.capture(model, X)


class Meta(type):
    """May do anything where its classes are called."""


class Metered(Holding, metaclass=Meta):
    """Of a class that is no plain one."""


class Indexed(Holding):
    """Runs a method that its code does not name."""

    def __getitem__(self, index: int) -> int:
        self.last = index
        return index


def test_what_python_calls_by_itself_is_looked_at() -> None:
    assert "Metered has a metaclass" in next(Code(Metered(lambda m, x: x).eval()).obstacles(), "")
    indexed = Indexed(lambda m, x: x * m[2]).eval()
    assert "it sets the attribute 'last'" in next(Code(indexed).obstacles(), "")


def steps() -> int:
    """Answers otherwise from the tenth call on, beyond what any check sees."""
    HISTORY.append(1)
    return 1 if len(HISTORY) < 10 else 5


class Helper(nn.Module):
    """Reaches state by a classmethod of its own."""

    @classmethod
    def run(cls, x: Tensor) -> Tensor:
        return cls.count() * x

    @classmethod
    def count(cls) -> int:
        return steps()


def counting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def apply(*args: Any) -> Any:
        return function(*args) * steps()

    return apply


class Model(Helper):
    """Another, to choose from."""


class Pair(NamedTuple):
    """Holds what can change."""

    values: list[Any]
    function: Callable[..., Any]


def tries_all(m: Any, x: Tensor) -> Any:
    try:
        return x.view(2, 6)
    except:  # noqa: E722
        return x


def tries_two(m: Any, x: Tensor) -> Any:
    try:
        return x.view(2, 6)
    except AttributeError:
        return x
    except RuntimeError:
        return -x


def asks_for_a_bound(m: Any, x: Tensor) -> Any:
    try:
        highest = torch.finfo(x.dtype).max
    except TypeError:
        highest = 0.5
    return x.clamp(max=highest)


def listening(layer: nn.Module) -> nn.Module:
    layer.log = []  # type: ignore[assignment]
    return layer


my_relu, PAIR, PRIOR = (
    counting(F.relu),
    Pair([], steps),
    torch.distributions.Bernoulli(torch.ones(4)),
)
STEPS_BY_NAME = types.MappingProxyType({"f": steps})
ITEMS = {"items": 3, "f": steps}

# Each answers otherwise in a later call, or leaves a trace, if it is recorded.
HOSTILE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "text of a dtype": (lambda m, x: x * 2 if str(x.dtype) == "torch.float64" else x, {}),
    "text of a size": (lambda m, x: x * 2 if f"{x.shape[0]}" == "2" else x, {}),
    "a key of text": (lambda m, x: x * m.table.get(f"k{x.shape[0]}", 1.0), {"table": {"k2": 2.0}}),
    "a type": (lambda m, x: x * 2 if type(x) == nn.Parameter else x, {}),  # noqa: E721
    "a name of a type": (lambda m, x: x * 2 if type(x).__name__ == "Parameter" else x, {}),
    "a subclass of tensors": (lambda m, x: x * 2 if isinstance(x, nn.Parameter) else x, {}),
    "a class of a dtype": (lambda m, x: x * 2 if isinstance(x, torch.HalfTensor) else x, {}),
    "a private attribute": (lambda m, x: x * getattr(x, "_scale", 1.0), {}),
    "an attribute that may be": (lambda m, x: x * 2 if hasattr(x, "_scale") else x, {}),
    "any error": (tries_all, {}),
    "a second error": (tries_two, {}),
    "an error of a dtype": (asks_for_a_bound, {}),
    "a classmethod": (lambda m, x: Helper.run(x), {}),
    "a wrapped function": (lambda m, x: my_relu(x), {}),
    "a list on a layer": (
        lambda m, x: (m.own.log.append(1), m.own(x) * len(m.own.log))[1],
        {"own": listening(nn.Linear(4, 4))},
    ),
    "a list in a tuple": (lambda m, x: (PAIR.values.append(1), x * len(PAIR.values))[1], {}),
    "a function in a tuple": (lambda m, x: x * PAIR.function(), {}),
    "a function in a proxy": (lambda m, x: x * STEPS_BY_NAME["f"](), {}),
    "a key that is a method": (lambda m, x: x * list(ITEMS.items())[1][1](), {}),
    "a choice of classes": (lambda m, x: (Helper if m.training else Model).run(x), {}),
    "a random operator": (lambda m, x: x + torch.ops.aten.rand([4]), {}),
    "a lazy attribute": (lambda m, x: x * PRIOR.probs, {}),
    "a bound append": (lambda m, x: (m.push(1), x)[1], {"push": HISTORY.append}),
    "numpy's options": (lambda m, x: (np.seterr(all="ignore"), x)[1], {}),
    "filters of warnings": (lambda m, x: (warnings.simplefilter("ignore"), x)[1], {}),
    "a backend's function": (lambda m, x: x * flash_sdp_enabled(), {}),
    "gradients that are turned on": (with_gradients, {}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_answer_otherwise_later_is_not_recorded(name: str) -> None:
    function, held = HOSTILE[name]
    HISTORY.clear()
    model = Holding(function, **held).eval()

    if name == "a random operator":
        captured = optimizer.capture(model, X)
        assert not torch.equal(captured(X), captured(X))
        return
    with pytest.raises(optimizer.CaptureError):
        optimizer.capture(model, X)
    assert (HISTORY, PAIR.values) == ([], [])
    assert isinstance(PRIOR.probs, Tensor)


def test_a_message_may_tell_of_a_traced_value() -> None:
    def told(m: Any, x: Tensor) -> Any:
        torch._assert(x.dim() == 2, f"expected a matrix, and got {x.shape}")
        return m.layer(x)

    captured = optimizer.capture(Holding(told).eval(), X)

    assert captured(X).shape == (3, 4)


def hidden(m: Any, x: Tensor) -> Any:
    return getattr(m, "st" + "ep")(x)


class Stepping(Holding):
    """Counts in a method that its code does not name."""

    def step(self, x: Tensor) -> Tensor:
        HISTORY.append(1)
        return x * len(HISTORY)


def hidden_container(m: Any, x: Tensor) -> Any:
    getattr(m, "hist" + "ory").append(1)
    return x * len(m.history)


@pytest.mark.parametrize("model", [Stepping(hidden), Holding(hidden_container, history=[])])
def test_getattr_finds_no_code_that_was_not_looked_at(model: nn.Module) -> None:
    with pytest.raises(optimizer.CaptureError, match=r"getattr|it changes"):
        optimizer.capture(model.eval(), X)
    assert HISTORY == []


def appends(m: Any, x: Tensor) -> Any:
    NAMES.append("c")
    return x * len(NAMES)


def test_a_container_that_a_recording_changes_is_put_back() -> None:
    with pytest.raises(optimizer.CaptureError, match="it changes what its code finds"):
        optimizer.capture(Holding(appends).eval(), X)
    assert NAMES == ["a", "b"]


def test_a_layer_that_is_made_in_a_forward_draws_nothing_of_the_processs() -> None:
    model = Holding(lambda m, x: nn.Linear(4, 4)(x)).eval()
    state = torch.get_rng_state()

    with pytest.raises(optimizer.CaptureError):
        optimizer.capture(model, X)

    assert torch.equal(torch.get_rng_state(), state)


def test_a_bound_method_of_another_model_is_an_obstacle() -> None:
    other = Holding(lambda m, x: x)
    plain = other.helper
    model = nn.Sequential(nn.ReLU(), Holding(lambda m, x: plain(x) + 1)).eval()

    assert "a module outside the model" in next(Code(model).obstacles(), "")


def test_generated_code_is_looked_at_too() -> None:
    graph = torch.fx.Graph()
    called = graph.call_function(appends, (None, graph.placeholder("x")))
    graph.output(called)

    with pytest.raises(optimizer.CaptureError, match="it changes what its code finds"):
        optimizer.capture(torch.fx.GraphModule(nn.Module(), graph), X)
    assert NAMES == ["a", "b"]


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [name for family in ("seeds", "torchvision", "synthetic") for name in models.names(family)],
)
def test_all_workloads_pass_the_list(name: str) -> None:
    assert next(Code(models.load(name).module).obstacles(), "") == ""


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")  # of what makes them
def test_nearly_all_models_of_classification_pass_the_list() -> None:
    vision = import_torchvision().models
    timm = pytest.importorskip("timm")
    modules = {timm.models.model_entrypoint(n).__module__: n for n in timm.list_models()}
    makers = [functools.partial(timm.create_model, name) for name in modules.values()]
    # A RegNet cannot be made without data; one of them is a workload.
    names = [name for name in vision.list_models(vision) if not name.startswith("regnet")]
    makers += [functools.partial(vision.get_model, name, weights=None) for name in names]
    with torch.device("meta"):
        found = [next(Code(make().eval()).obstacles(), "") for make in makers]

    told = [each for each in found if each]
    assert len(found) > 100
    assert len(told) <= 0.05 * len(found), told


def test_a_class_of_torch_that_is_not_there_is_no_error() -> None:
    class Extended(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x if x.shape[0] else torch.classes.an_extension.Kernel(x)

    assert [*Code(Extended().eval()).obstacles()] == []
