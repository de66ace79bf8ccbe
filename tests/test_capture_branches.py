"""What a recorded branch rests on: None that is not given, modes and settings that change."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer.core.guards import GUARDS
from tests.single_pass import Forward, ForwardOfTwo, rows

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
IMAGES = torch.linspace(-1.0, 1.0, 8 * 3 * 6 * 6).reshape(8, 3, 6, 6)


def is_none(mask: Any) -> bool:
    return mask is None


helpers: Any = ModuleType("helpers")
helpers.lacks = is_none


def asks_a_helper(mask: Any) -> bool:
    return is_none(mask)


@functools.wraps(is_none)
def decorated(mask: Any) -> bool:
    return is_none(mask)


def closure() -> Callable[[Any], bool]:
    inner = is_none
    return lambda mask: inner(mask)


def asks_in_a_comprehension(mask: Any) -> bool:
    return any(each is None for each in (mask,))


def matches(mask: Any) -> bool:
    match mask:
        case None:
            return True
    return False


ASKS: dict[str, Callable[[Any], Any]] = {
    "is None": lambda mask: mask is None,
    "is not None": lambda mask: not (mask is not None),
    "a branch": lambda mask: 1 if mask is None else 0,
    "a helper": asks_a_helper,
    "a decorated helper": decorated,
    "a closure": closure(),
    "a namespace": lambda mask: bool(helpers.lacks(mask)),
    "a comprehension": asks_in_a_comprehension,
    "a match": matches,
}


@pytest.mark.parametrize("example", [True, False], ids=["example", "no example"])
@pytest.mark.parametrize("name", ASKS)
def test_none_where_a_tensor_was_given_is_an_error(name: str, example: bool) -> None:
    asks = ASKS[name]
    model = ForwardOfTwo(lambda m, x, mask: x if asks(mask) else x + 1).eval()
    fast = optimizer.optimize(model, (ROWS, ROWS) if example else None, check=None, level=1)

    assert torch.equal(fast(ROWS, ROWS), model(ROWS, ROWS))
    with pytest.raises(optimizer.InputError, match=r"an argument z|a tensor z"):
        fast(ROWS, None)


BY_TYPE = ForwardOfTwo("x * 2 if isinstance(z, torch.Tensor) else x").eval()


def test_another_type_where_a_tensor_was_given_is_an_error() -> None:
    fast = optimizer.optimize(BY_TYPE, (ROWS, ROWS), check=None, level=1)

    assert torch.equal(fast(ROWS, ROWS), ROWS * 2)
    with pytest.raises(optimizer.InputError, match="a tensor z and got 3"):
        fast(ROWS, 3)


PAIRED = Forward("x[0] * 2 if x[1] is None else x[0] * x[1]").eval()


@pytest.mark.parametrize("example", [((ROWS, ROWS),), None], ids=["example", "no example"])
def test_none_inside_an_argument_is_an_error(example: Any) -> None:
    fast = optimizer.optimize(PAIRED, example, check=None, level=1)

    assert torch.equal(fast((ROWS, ROWS)), ROWS * ROWS)
    with pytest.raises(optimizer.InputError, match="an argument x that holds no None"):
        fast((ROWS, None))


class OptionalMask(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x if mask is None else x + mask


def test_a_default_of_none_is_held_to_what_was_given() -> None:
    fast = optimizer.optimize(OptionalMask().eval(), (ROWS, ROWS), check=None, level=1)

    assert torch.equal(fast(ROWS, ROWS), ROWS + ROWS)
    with pytest.raises(optimizer.InputError):
        fast(ROWS)


# The second asks, but of an attribute of its own; its input goes where None is an error.
ASKING = "y = m.layer(x); return y if m.extra is None else y + m.extra"
UNASKED = {
    "no": (ForwardOfTwo("torch.add(x, z)"), (ROWS, ROWS)),
    "rejects": (Forward(ASKING, layer=nn.Linear(4, 4), extra=None), (ROWS,)),
}


@rows("model inputs", UNASKED)
@pytest.mark.parametrize("example", [True, False], ids=["example", "no example"])
def test_a_model_that_cannot_tell_has_no_guard(model: Any, inputs: Any, example: bool) -> None:
    fast = optimizer.optimize(model.eval(), inputs if example else None, level=1)

    assert [node for node in fast.graph.nodes if node.target in GUARDS] == []


def test_none_from_inside_is_not_taken_for_a_tensor() -> None:
    pair = Forward("x * 2, None if x.shape[0] > 0 else x")
    text = "y, mask = m.child(x); return y if mask is None else y + 1"
    model = Forward(text, child=pair).eval()

    fast = optimizer.optimize(model, ROWS, check=None, level=1)

    assert torch.equal(fast(ROWS), model(ROWS))


class Toggled(nn.Module):
    """Changes a layer for the length of one call, and puts everything back."""

    def __init__(self, change: Callable[[Any], None], restore: Callable[[Any], None]) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.other, self.shift = nn.Parameter(torch.full((4,), 3.0)), self.norm.bias
        self.change, self.restore = change, restore

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        y: Tensor = self.norm(self.layer(x))
        self.restore(self)
        return y


def swap(m: Any) -> None:
    m.norm._parameters.update(weight=m._parameters["other"], bias=m.norm._parameters["weight"])


def swap_back(m: Any) -> None:
    m.norm._parameters.update(weight=m.norm._parameters["bias"], bias=m._parameters["shift"])


TOGGLES: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    "the mode": (lambda m: m.norm.train(), lambda m: m.norm.eval()),
    "a stride": (
        lambda m: setattr(m.layer, "stride", (2, 2)),
        lambda m: setattr(m.layer, "stride", (1, 1)),
    ),
    "a parameter": (swap, swap_back),
}


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("name", TOGGLES)
def test_a_layer_that_is_changed_for_one_call_answers_as_in_eager(name: str, example: bool) -> None:
    torch.manual_seed(0)
    model = Toggled(*TOGGLES[name]).eval()
    eager = copy.deepcopy(model)

    fast = optimizer.optimize(model, IMAGES if example else None, check=None, level=1)

    for _ in range(2):
        torch.testing.assert_close(fast(IMAGES), eager(IMAGES))
    assert all(not module.training for module in model.modules())


@pytest.mark.parametrize("name", TOGGLES)
def test_the_rest_of_a_model_is_optimized_around_it(name: str) -> None:
    torch.manual_seed(0)
    tail = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model = nn.Sequential(Toggled(*TOGGLES[name]), tail).eval()
    eager = copy.deepcopy(model)

    fast = optimizer.optimize(model, IMAGES, check=None, level=1)

    assert fast.report.counts()["fold_affine"] >= 1
    for _ in range(2):
        torch.testing.assert_close(fast(IMAGES), eager(IMAGES))


def test_a_recording_that_fails_half_way_leaves_no_half_of_it_done() -> None:
    torch.manual_seed(0)
    text = "m.n.train(); y = m.n(x) if x.sum() < 1e9 else x; m.n.eval(); return y"
    head = Forward(text, n=nn.BatchNorm2d(3))
    model = nn.Sequential(head, nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    eager = copy.deepcopy(model)

    fast = optimizer.optimize(model, IMAGES, check=None, level=1)

    for _ in range(2):
        torch.testing.assert_close(fast(IMAGES), eager(IMAGES))


def test_a_guard_that_asks_more_serves_one_that_asks_less() -> None:
    class Turned(OptionalMask):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x, mask).transpose(-1, -2).transpose(0, 1).relu()

    once = optimizer.optimize(Turned().eval(), torch.ones(2, 3), level=1)
    twice = optimizer.optimize(once, torch.ones(2, 3), level=1)

    assert len(twice.graph.nodes) == len(once.graph.nodes)
    with pytest.raises(optimizer.InputError, match="2 dimensions"):
        twice(torch.ones(1, 2, 3))
