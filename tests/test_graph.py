"""How nodes and modules are looked at."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx, nn

from optimizer.core.node import fresh_name, overrides_call


class Called(nn.Module):
    def __call__(self, *args: Any) -> Any:
        return args


class Inherits(Called):
    pass


@pytest.mark.parametrize(
    ("kind", "does"),
    [
        (Called, True),
        (Inherits, True),
        (nn.Linear, False),
        (type(fx.symbolic_trace(nn.ReLU())), False),  # torch's own
    ],
)
def test_who_has_a_call_of_its_own(kind: type[nn.Module], does: bool) -> None:
    assert overrides_call(kind) is does


def test_a_fresh_name_is_the_first_that_is_free() -> None:
    root = nn.Module()
    for _ in range(40):
        setattr(root, fresh_name(root, "linear"), None)

    names = [name for name in vars(root) if name.startswith("linear")]
    assert names == ["linear", *(f"linear_{number}" for number in range(1, 40))]
