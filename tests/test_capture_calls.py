"""A forward that can see how it is called is recorded as the example calls it, and held to that."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer import GuardedModule
from tests.single_pass import Forward

X = torch.linspace(-1, 1, 12).reshape(3, 4)
Y = X.flip(0) + 2


def by_name(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Multiplies by a hundred what is called by name."""

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * (100 if "x" in kwargs else 1)

    return wrapper


def by_count(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) + 10 * len(args)

    return wrapper


def unnamed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Lacks functools.wraps, and takes an argument of its own."""

    def wrapper(self: Any, *args: Any, shift: float = 0.0, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) + shift + len(kwargs)

    return wrapper


def scaled(forward: Callable[..., Any], factor: float) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * factor * (1 + len(args))

    return wrapper


DECORATORS: dict[str, Callable[..., Any]] = {
    "names": by_name,
    "a number": by_count,
    "no wraps": unnamed,
    "nested": lambda forward: by_name(by_count(by_name(forward))),
    "partial": functools.partial(scaled, factor=3.0),
}
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one by position": ((X,), {}),
    "one by name": ((), {"x": X}),
    "two by position": ((X, Y), {}),
    "two by name": ((), {"x": X, "mask": Y}),
    "in another order": ((), {"mask": Y, "x": X}),
    "None by position": ((X, None), {}),
    "None by name": ((), {"x": X, "mask": None}),
    "a number by name": ((), {"x": X, "scale": 2.0}),
    "one of each": ((X,), {"mask": Y}),
}


def decorated(decorate: Callable[..., Any]) -> nn.Module:
    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        @decorate
        def forward(self, x: Tensor, mask: Any = None, scale: float = 1.0) -> Tensor:
            y: Tensor = self.norm(self.layer(x)) * scale
            return y if mask is None else y * mask

    torch.manual_seed(0)
    return Decorated().eval()


def answer(module: Any, call: str) -> Any:
    args, kwargs = CALLS[call]
    with torch.no_grad():
        return module(*args, **kwargs)


@pytest.mark.parametrize("name", DECORATORS)
def test_a_decorated_forward_is_right_however_it_is_called(name: str) -> None:
    model = decorated(DECORATORS[name])

    fast: Any = optimizer.optimize(model, (X,), level=1)

    assert isinstance(fast, GuardedModule)
    assert "fold_affine" in fast.report.counts()
    for call in CALLS.keys() - {"one of each"}:
        torch.testing.assert_close(answer(fast, call), answer(model, call), rtol=1e-4, atol=1e-4)


def test_a_forward_of_any_arguments_is_right_however_it_is_called() -> None:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = decorated(lambda forward: forward)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs) + len(args)

    model = Passing().eval()

    fast: Any = optimizer.optimize(model, {"x": X, "mask": Y}, level=1)

    assert isinstance(fast, GuardedModule)
    for call in ("two by name", "two by position"):
        torch.testing.assert_close(answer(fast, call), answer(model, call))


def calling(child: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> Any:
    """Calls a decorated child in the way that it is told."""
    return Forward(lambda m, x: call(m.child, x), child=child).eval()


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda child, x: child(x),
        lambda child, x: child(x=x),
        lambda child, x: child(x, mask=x),
        lambda child, x: child(mask=x, x=x),
        lambda child, x: child(x, None, scale=2.0),
    ],
)
def test_a_child_is_called_as_its_parent_calls_it(
    call: Callable[[Any, Tensor], Tensor], opaque: bool
) -> None:
    model = calling(decorated(by_name), call)
    if opaque:
        model.child.register_forward_hook(lambda module, given, result: result + 1)

    fast: Any = optimizer.optimize(model, X, level=1)

    assert isinstance(fast, optimizer.OptimizedModule)
    torch.testing.assert_close(fast(X + 1), model(X + 1), rtol=1e-4, atol=1e-4)


class Told(nn.Linear):
    """Sees how it is called, and cannot be recorded."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (given,) = (*args, *kwargs.values())
        factor = 2.0 if kwargs else 1.0
        return super().forward(given) * (factor if given.isfinite().all() else 0.0)


def test_a_child_that_cannot_be_recorded_is_called_by_name() -> None:
    model = calling(Told(4, 4), lambda child, x: child(input=x))

    fast: Any = optimizer.optimize(model, X, level=1)

    torch.testing.assert_close(fast(X), model(X))


def test_an_ordinary_forward_takes_its_arguments_in_any_way() -> None:
    model = decorated(lambda forward: forward)

    fast: Any = optimizer.optimize(model, {"mask": Y, "x": X}, level=1)

    for call in ("two by name", "two by position", "one of each", "in another order"):
        torch.testing.assert_close(answer(fast, call), answer(model, call))


def test_without_example_inputs_nothing_is_known_of_how_it_is_called() -> None:
    model = decorated(by_name)

    fast = optimizer.optimize(model, level=1)

    assert "can tell how its arguments" in fast.report.remarks[1]
    for call in CALLS:
        torch.testing.assert_close(answer(fast, call), answer(model, call))


def test_the_first_value_to_differ_is_found_in_a_call_by_name() -> None:
    model = decorated(lambda forward: forward)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layer.bias.add_(1)  # type: ignore[union-attr, operator]
    fast = optimizer.optimize(other, {"x": X, "mask": Y}, level=0)

    with pytest.raises(optimizer.EquivalenceError, match=r"the first value to differ is .layer"):
        optimizer.check(model, fast, {"x": X, "mask": Y})
