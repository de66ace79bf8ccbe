"""`y[m] = f(v[m])` is computed everywhere and chosen from, where that is the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import optimizer
from optimizer.core.node import callee
from optimizer.testing import assert_equivalent
from tests.single_pass import Forward, optimized_by

NAME = "lower_masked_update"
optimized = partial(optimized_by, NAME)


class Model(Forward):
    """Runs a forward of a case on values, other values of the same shape, and a mask."""

    def forward(self, x: Tensor, v: Tensor, m: Tensor) -> Any:
        return self.function(x, v, m)


def inputs(*shape: int, kind: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    count = torch.Size(shape).numel()
    x = torch.linspace(-3.0, 3.0, count, dtype=torch.float64).reshape(shape)
    specials = torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
    v = specials.repeat(count)[:count].reshape(shape) if kind.is_floating_point else x * 5
    return x.to(kind), v.to(kind), (torch.arange(count) % 3 != 1).reshape(shape)


def update(statement: str) -> Callable[..., Any]:
    """A forward with a statement on `y`, which is `x * 2`."""
    names: dict[str, Any] = {"torch": torch}
    exec(f"def forward(x, v, m):\n    y = x * 2; {statement}\n    return y", names)
    return names["forward"]  # type: ignore[no-any-return]


FIRES = [
    "y[m] = v[m]",
    "y[m] = y[m]",
    "y[m] += 1.5",
    "y[m] -= 2",
    "y[m] *= -3.0",
    "y[m] /= 7",
    "y[m] = v[m] * 0.1 + 3",
    "y[m] = v[m] / 3.0 - 1",
    "y[m] = x[m]",
    "y[m] = v.t().contiguous().t()[m]",
    "y[m] = v[m]; y[y > 1] += 1.0; y = y * 2",
    "z = y[0].sum(); y[m] += 1.0; y = y + z",
    "y[m] += 1.0; w = y[0]; w.mul_(2.0)",
]


@pytest.mark.parametrize("shape", [(4, 3), (2, 2), (1, 1)])
@pytest.mark.parametrize("statement", FIRES)
def test_fires_on_every_form(statement: str, shape: tuple[int, ...]) -> None:
    model = Model(update(statement)).eval()

    fast = optimized(model, *inputs(*shape))

    assert set(fast.report.counts()) == {NAME}
    assert not [n for n in fast.graph.nodes if "setitem" in n.name or n.name.startswith("iadd")]
    for other in (shape, (5, 3), (2, 0)):
        assert_equivalent(model, fast, inputs(*other), exact=True)


@pytest.mark.parametrize(
    ("kind", "statement"),
    [
        (torch.int64, "y[m] += 3"),
        (torch.int8, "y[m] *= 77"),
        (torch.float16, "y[m] = v[m] * 0.1"),
        (torch.bfloat16, "y[m] += 0.1"),
    ],
)
def test_keeps_the_bits_in_every_dtype(kind: torch.dtype, statement: str) -> None:
    model = Model(update(statement)).eval()

    fast = optimized(model, *inputs(4, 3, kind=kind))

    assert set(fast.report.counts()) == {NAME}
    assert_equivalent(model, fast, inputs(4, 3, kind=kind), exact=True)


ROWS = "a mask of rows touches fewer of them"
BETWEEN = "what the value is chosen from or by is written in between"
OUTER = "an input, an attribute or a view would see the write"
REFUSALS = {
    "y[m[:, 0]] = v[m[:, 0]]": None,
    "r = m[:, 0]; y[r] = v[r]": ROWS,
    "r = m[:, 0]; y[r] += 1.0": ROWS,
    "m = m[:, 0].nonzero()[:, 0]; y[m] += 1.0": "it is indexed by numbers",
    "g = v[m]; v.add_(1.0); y[m] = g": BETWEEN,
    "m = m.clone(); g = v[m]; m.logical_not_(); y[m] = g": BETWEEN,
    "g = v[m]; x.add_(1.0); y[m] = g": BETWEEN,
    "x[m] += 1.0; y = x * 1.5": OUTER,
    "z = y.t(); n = m.t(); z[n] += 1.0": OUTER,
    "w = y[1:]; n = m[1:]; w[n] = y[:-1][n]": OUTER,
    "w = y[1:]; n = m[1:]; y = y[:-1]; y[n] = w[n]": OUTER,
    "y[m] = (v + 1j)[m]": "the value has another dtype",
    "y = y.float(); y[m] = v[m] * 1": "the value has another dtype",
    "w = v[m]; y[m] = w; y = y * w.sum()": None,
    "y[m] = v[m] + v[m]": None,
    "y[m] = v[m].exp()": None,
    "y[~m] = v[m].flip(0)[:1]": None,
    "y[m] += 1.0; y = y.view(torch.zeros(x.numel(), device=torch.device('meta')).shape)": (
        "the tensors may live on different devices"
    ),
}


@pytest.mark.parametrize("statement", REFUSALS)
def test_leaves_alone(statement: str) -> None:
    model, given = Model(update(statement)).eval(), inputs(4, 3, kind=torch.int64)
    given = (given[0].double(), given[1].double(), given[2])

    fast = optimized(model, *given)

    reason = REFUSALS[statement]
    assert [each.reason for each in fast.report.refused] == ([reason] if reason else [])
    assert fast.report.fired == ()
    one, other = [t.clone() for t in given], [t.clone() for t in given]
    try:
        expected = model(*one)
    except (RuntimeError, IndexError):
        return
    assert torch.equal(fast(*other), expected)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_a_value_that_overlaps_what_is_written_is_left_alone() -> None:
    model = Model(update("w = y.t(); y[m] = w[m]")).eval()

    fast = optimized(model, *inputs(3, 3))

    reasons = [each.reason for each in fast.report.refused]
    assert reasons == ["the value overlaps what is written"]
    assert_equivalent(model, fast, inputs(3, 3), exact=True)


def test_refuses_without_example_inputs() -> None:
    fast = optimized(Model(update("y[m] = v[m]")).eval())

    reasons = [each.reason for each in fast.report.refused]
    assert reasons == ["the graph was captured without example inputs"]


def test_another_kind_of_mask_than_the_example_is_an_error() -> None:
    fast = optimized(Model(update("y[m] += 1.0")).eval(), *inputs(3, 3))
    x, v, m = inputs(3, 3)

    with pytest.raises(optimizer.InputError):
        fast(x, v, m[0])
    with pytest.raises(optimizer.InputError):
        fast(x, v, torch.tensor([[0, 1, 2], [0, 0, 1], [1, 1, 1]]))


def test_it_gathers_and_scatters_nothing() -> None:
    fast = optimized(Model(update("y[m] += 1.0")).eval(), *inputs(4, 3))

    called = [callee(node) for node in fast.graph.nodes if node.op == "call_function"]
    assert [each.__name__ for each in called[-3:]] == ["mul", "add", "where_into"]


def test_gradients_flow_as_in_eager() -> None:
    model = Model(update("y[m] = v[m] * 3.0 + 1")).eval()
    x, v, m = inputs(4, 3)
    fast = optimized(model, x, v, m)

    given = [t.nan_to_num(2.0, 3.0, 4.0).requires_grad_() for t in (x, v)]
    expected, actual = (torch.autograd.grad(f(*given, m).sum(), given) for f in (model, fast))

    assert all(map(torch.equal, actual, expected))
