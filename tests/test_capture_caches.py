"""Entries that a forward adds to a dict: what stays in them, and who fills them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import optimizer
from tests.single_pass import Forward

X = torch.linspace(-1, 1, 2 * 4).reshape(2, 4)


def by_device(m: Any, x: Tensor) -> Any:
    key = str(x.device)
    if key not in m.cache:
        m.cache[key] = m.bias[[3, 1, 2, 0]]
    return m.cache[key]


def scaled(m: Any, x: Tensor) -> Any:
    return x * 2 + by_device(m, x)


def model_with(forward: Any) -> Any:
    layer: Any = Forward(forward, bias=nn.Parameter(torch.arange(8.0)))
    layer.cache = {}
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), layer).eval()


def test_an_entry_that_is_there_stays_as_it_is() -> None:
    model = model_with(scaled)
    expected = model(X)  # with gradients, which the entry keeps
    before = dict(model[2].cache)

    fast: Any = optimizer.optimize(model, X, level=1)

    assert "fold_affine" in fast.report.counts()
    assert model[2].cache == before
    torch.testing.assert_close([fast(X), fast(X)], [expected, expected])


def test_an_entry_that_is_returned_is_one_tensor_in_all_calls() -> None:
    model = model_with(lambda m, x: (x + 1, by_device(m, x)))

    fast: Any = optimizer.optimize(model, X, level=1)

    assert fast(X)[1] is fast(X)[1]


def test_an_entry_from_before_the_weights_changed_stays() -> None:
    model = model_with(scaled)
    with torch.no_grad():
        model(X)
        model[2].bias.mul_(3)
        expected = model(X)

    fast: Any = optimizer.optimize(model, X, check=None, level=1)

    torch.testing.assert_close(fast(X), expected)


def test_without_example_inputs_nothing_is_known_of_an_entry() -> None:
    fast: Any = optimizer.optimize(model := model_with(scaled), level=1)

    assert fast.report.remarks[-1].startswith("left as it is: it writes a traced value as text")
    torch.testing.assert_close(fast(X), model(X))
