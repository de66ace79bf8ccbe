"""Gradients are those of the original where its forward enters a mode, or asks for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from tests.single_pass import Forward

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def block(mode: Callable[[], Any]) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        with mode():
            y: Tensor = self.layer(x) * 2
        return y + self.layer(x)

    return forward


def nested_in_a_helper(self: Any, x: Tensor) -> Tensor:
    return without_gradient(self.layer, x) + x


@torch.no_grad()
def without_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


MODES: dict[str, Any] = {
    "no_grad": block(torch.no_grad),
    "inference_mode": block(torch.inference_mode),
    "set_grad_enabled": block(lambda: torch.set_grad_enabled(False)),
    "a decorated helper": nested_in_a_helper,
    "a decorated forward": torch.no_grad()(lambda self, x: self.layer(x) * 2),
    "a constant": "\n with torch.no_grad(): s = m.steps * 2\n return m.layer(x) * s",
    "set and put back": (
        "g = torch.is_grad_enabled(); torch.set_grad_enabled(False); y = m.layer(x)"
        "; torch.set_grad_enabled(g); return y + x"
    ),
}


def entering(function: Any) -> nn.Module:
    return Forward(function, layer=nn.Linear(4, 4), steps=torch.ones(())).eval()


def model_with(name: str, *, child: bool) -> nn.Module:
    torch.manual_seed(0)
    model = entering(MODES[name])
    return (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), model) if child else model).eval()


def gradients(model: nn.Module) -> list[Any]:
    """Of the input and of the weights; none where the answer has none."""
    x = X.clone().requires_grad_()
    y = model(x)
    if not y.requires_grad:
        return [y]
    y.sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("child", [True, False], ids=["child", "model"])
@pytest.mark.parametrize("name", MODES)
def test_gradients_are_those_of_the_original(name: str, child: bool) -> None:
    model = model_with(name, child=child)

    fast = optimizer.optimize(model, X, level=1)

    torch.testing.assert_close(gradients(fast), gradients(model))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(fast(X), model(X))


def test_a_detached_value_is_recorded() -> None:
    model = entering("m.layer(x).detach() + m.layer(x)")

    fast = optimizer.optimize(model, X, level=1)

    assert isinstance(fast, optimizer.OptimizedModule)
    torch.testing.assert_close(gradients(fast), gradients(model))


LEFT_OFF = """
    with torch.autocast("cpu", enabled=False):
        return m.layer(m.layer(x).float())
"""
ASKING = "m.layer(x) * (2 if torch.is_autocast_enabled('cpu') else 3)"
AUTOCAST = torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("text", [LEFT_OFF, ASKING])
def test_code_that_names_autocast_is_called_under_the_same(text: str, level: int) -> None:
    model = entering(text)

    fast = optimizer.optimize(model, X, level=level)

    assert fast.report.front_end == "symbolic"
    torch.testing.assert_close(fast(X), model(X))
    with AUTOCAST, pytest.raises(optimizer.InputError, match="under the autocast you need"):
        fast(X)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_was_optimized_under_autocast_is_called_under_it(level: int) -> None:
    model = entering(ASKING)

    with AUTOCAST:
        fast = optimizer.optimize(model, X, level=level)

        assert torch.equal(fast(X), model(X))
    with pytest.raises(optimizer.InputError, match="bfloat16"):
        fast(X)


def test_without_an_argument_autocast_cannot_be_asked() -> None:
    class NoInput(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(3) * (2 if torch.is_autocast_enabled("cpu") else 3)

    with pytest.raises(optimizer.CaptureError, match="takes no argument and asks for autocast"):
        optimizer.capture(NoInput())
