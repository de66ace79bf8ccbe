"""How nodes and modules are looked at."""

from __future__ import annotations

from torch import nn

from optimizer._graph import fresh_name


def test_a_fresh_name_is_the_first_that_is_free() -> None:
    root = nn.Module()
    for _ in range(40):
        setattr(root, fresh_name(root, "linear"), None)

    names = [name for name in vars(root) if name.startswith("linear")]
    assert names == ["linear", *(f"linear_{number}" for number in range(1, 40))]
