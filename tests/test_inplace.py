"""What writes over a value, as a call that a graph can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
