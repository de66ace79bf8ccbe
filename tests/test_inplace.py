"""What writes over a value, as a call that a graph can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import optimizer
from optimizer.core.ops import where_into


class Called(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_a_choice_is_made_in_place_but_where_a_gradient_is_recorded(
    recorded: bool, learns: bool
) -> None:
    value = torch.ones(3, requires_grad=learns)
    mask, other, out = torch.tensor([True, False, True]), torch.zeros(3), torch.full((3,), 7.0)

    with torch.set_grad_enabled(recorded), Called() as called:
        result = where_into(mask, value, other, out=out)

    assert result is out
    assert out.tolist() == [1, 0, 1]
    assert called.names == (["where", "copy_"] if recorded and learns else ["where"])


class Viewed(nn.Module):
    """A buffer that is a view of a parameter, by which the forward writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("view", self.weight.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = (x + self.weight) * 2
        self.view.add_(1)
        return result


def test_a_view_of_a_parameter_stays_its_view() -> None:
    model, other = Viewed().eval(), Viewed().eval()
    fast = optimizer.optimize(model, torch.ones(4), level=0)

    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(fast(torch.ones(4)), other(torch.ones(4)))
    assert not model.weight.any()
