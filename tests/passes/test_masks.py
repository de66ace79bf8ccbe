"""What is written under a mask is chosen by `where` where none can tell, and stays elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from tests.single_pass import ForwardOfThree, assert_outcome, optimized_by, rows, spelled, tried

ASSIGNMENT, UPDATE = "lower_masked_assignment", "lower_masked_update"
SEEN = "an input, an attribute or a view would see the write"
DEVICES = "the tensors may live on different devices"
ON_META = "view(torch.zeros(x.numel(), device=torch.device('meta')).shape)"
SHAPES = [(4, 3), (5, 2), (1, 3), (2, 0)]
DENSE = "x.clone(memory_format=torch.contiguous_format)"


class Written(ForwardOfThree):
    arguments = "own, x, v, m"


def model_of(name: str, text: str) -> nn.Module:
    """A model of statements on `y`, a value of its own, which is returned unless they return."""
    start = "x.clone()" if name == ASSIGNMENT else "x * 2"
    seen = torch.ones(4, 3, dtype=torch.float64)
    return Written(f"y = {start}; {text}; return y", seen=seen).eval()


def given(*shape: int, kind: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Two tensors with the signs and specials that a careless `where` changes, and a mask."""
    count = torch.Size(shape).numel()
    x, v = torch.linspace(-2.0, 2.0, count).double(), torch.linspace(7.0, -5.0, count).double()
    specials = torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf]).double()
    if kind.is_floating_point and count > 3:
        x[:4], v = specials, specials.repeat(count)[:count]
    mask = torch.arange(count) % 3 != 1
    return x.to(kind).reshape(shape), v.to(kind).reshape(shape), mask.reshape(shape)


# The pass, how often it fires, and the dtype. See also the motifs and tests/traps.py.
FIRES: dict[Any, str] = {
    (ASSIGNMENT, 1): """
    y[x > 0] = -0.0
    y[x > 0] = True
    y.__setitem__(x < 0, 0.1)
    y = torch.clone(x); y[x > 0] = x.sum(); return y
    y[x.sum(1) > 0] = 0.25
    y[x.sum().isnan()] = 0.25
    return x.clone().masked_fill_(x[:1] > 0, 0.25) * 2
    return x.clone().masked_fill_(value=0.25, mask=x[-1] > 0) * 2
    y = x * 2; before = y.sum(); y[y > 0] = 0.0; return (before, y.sum(), y)
    y = x * 2; y[x > 0] = 1.0; n = y > 0.5; z = y[n]; y.mul_(2.0); y[n] = z; return y
    a = x * 2; y = a.clone(); mask = a > 0; a.add_(5.0); y[mask] = 0.0; return (y, a)
    y, mask = (x.clone(), x > 0); y[0] = 5.0; y[mask] = 0.0; return (y, mask)""",
    (ASSIGNMENT, 2): """
    y.index_put_((x > 0,), x.sum()); return torch.index_put_(y, [x < 0], x.sum().exp())""",
    (ASSIGNMENT, 1, torch.bfloat16): "y[x > 0] = 0.1",
    (ASSIGNMENT, 1, torch.int64): "y[x > 0] = True; y[x > 0] = -1.7",
    (ASSIGNMENT, 1, torch.uint8): "y[x > 0] = 255; y[x > 0] = -1",
    (ASSIGNMENT, 1, torch.bool): "y[x > 0] = 3; y[x > 0] = torch.nan",
    (UPDATE, 1): """
    y[m] = v[m]; y[m] /= 7; y[m] = v[m] * 0.1 + 3; y[m] = v.t().contiguous().t()[m]""",
    (UPDATE, 1, torch.float64): """
    z = y[0].sum(); y[m] *= -3.0; return y + z
    y[m] += 1.0; w = y[0]; w.mul_(2.0); return y""",
    (UPDATE, 2): "y[m] = v[m]; y[y > 1] += 1.0; return y * 2",
    (UPDATE, 1, torch.int8): "y[m] *= 77",
    (UPDATE, 1, torch.bfloat16): "y[m] = v[m] * 0.1",
}


@spelled(FIRES, cells="text case")
def test_what_is_written_is_chosen(text: str, case: Any) -> None:
    name, fires, *kinds = case
    first, *later = (
        given(*shape, kind=kind) for kind in kinds or [torch.float64] for shape in SHAPES
    )

    tried(name, model_of(name, text), first, fires, *later)


STAYS: dict[Any, str] = {
    (ASSIGNMENT, 0): """
    y.index_put_((x > 0,), x.sum(), accumulate=True); y.index_put_((x > 0,), x.sum(), True);
    y[x[:, 1].argsort()] = 0.0; y[1:2, :] = 2.0""",
    (ASSIGNMENT, "the assigned value may have an element for each True"): "y[x > 0] = x[x > 0]",
    (ASSIGNMENT, "the assigned value has another dtype"): "y[x > 0] = x.sum().float()",
    (ASSIGNMENT, "it is filled in place and saves no copy"): """
    return (x * 2).masked_fill_(x > 0, 1.0)""",
    (ASSIGNMENT, SEEN): """
    x[x > 0] = 0.0; return x
    own.seen[x > 0] = 0.0; return own.seen + x
    y = x * 2; view = y[0]; y[y > 0] = 0.0; return view + 1
    y = x * 2; view = y.t(); view[view > 0] = 0.0; return y""",
    (ASSIGNMENT, "it is no real number", torch.complex128): "y[x.real > 0] = 2.0",
    (ASSIGNMENT, "the dtype cannot hold the number", torch.float16): "y[x > 0] = 1e5",
    (ASSIGNMENT, DEVICES): f"y[x > 0] = 0.0; return y.exp().{ON_META}",
    (UPDATE, 0): """
    y[m[:, 0]] = v[m[:, 0]]; y[m] = v[m] + v[m]; y[m] = v[m].exp()""",
    (UPDATE, "a mask of rows touches fewer of them"): "r = m[:, 0]; y[r] += 1.0; return y",
    (UPDATE, "it is indexed by numbers"): "r = m[:, 0].nonzero()[:, 0]; y[r] += 1.0; return y",
    (UPDATE, "what the value is chosen from or by is written in between"): """
    g = v[m]; v.add_(1.0); y[m] = g; return y
    m = m.clone(); g = v[m]; m.logical_and_(m); y[m] = g; return y""",
    (UPDATE, SEEN): "x[m] += 1.0; return x * 1.5",
    (UPDATE, "the value overlaps what is written"): """
    y = x[:3] * 2; n = m[:3]; y[n] = y.t()[n]; return y""",
}


@spelled(STAYS, cells="text case")
def test_what_might_be_noticed_stays(text: str, case: Any) -> None:
    name, outcome, *kinds = case
    x = torch.arange(-5, 7).reshape(4, 3).to(*kinds or [torch.float64])

    tried(name, model_of(name, text), (x, x * 5, x.real % 3 != 1), outcome)


@rows("name text", {"assignment": (ASSIGNMENT, "y[m] = 0.0"), "update": (UPDATE, "y[m] = v[m]")})
def test_without_example_inputs_nothing_is_known(name: str, text: str) -> None:
    unknown = "the graph was captured without example inputs"

    tried(name, model_of(name, text), (), unknown, given(3, 3))


def test_an_error_of_eager_is_one_here() -> None:
    model, inputs = model_of(UPDATE, "y[m] = (v + 1j)[m]"), given(4, 3)
    fast = optimized_by(UPDATE, model, *inputs)

    assert_outcome(UPDATE, fast, "the value has another dtype")
    for each in (model, fast):
        with pytest.raises((RuntimeError, IndexError)):
            each(*inputs)


@pytest.mark.filterwarnings("ignore:Use of .* on expanded:UserWarning")
def test_what_overlaps_itself_in_a_later_call_is_written_as_in_eager() -> None:
    text = "y = (x[:1] * 2).expand(x.shape[0], x.shape[1]); y[x > 0] = 0.0; return y"

    tried(ASSIGNMENT, model_of(ASSIGNMENT, text), given(1, 3), SEEN, given(4, 3))


@pytest.mark.parametrize("start", ["x * 2", DENSE, "x.clone()"])
def test_the_result_lies_in_memory_as_in_eager_whatever_the_inputs_are(start: str) -> None:
    (x, z, m), transposed = given(4, 3), given(3, 4)[0].t()
    model = model_of(ASSIGNMENT, f"y = {start}; y[v > 0] = 0.0; return y")

    others = [(x, transposed, m), (transposed, x, m), (x[:1].expand(4, 3), transposed, m)]
    fast = tried(ASSIGNMENT, model, (x, z, m), 1, *others)

    for inputs in others:
        assert fast(*inputs).stride() == model(*inputs).stride()


def test_two_inputs_may_be_the_same_tensor_later() -> None:
    text = "mask = x > 0; y = x.clone(); v.add_(1.0); y[mask] = 0.0; return y"
    model, (x, v, m) = model_of(ASSIGNMENT, text), given(4, 3)
    fast = optimized_by(ASSIGNMENT, model, x, v, m)

    assert torch.equal(*(each(*[x.nan_to_num()] * 2, m) for each in (fast, model)))


X, _, MASK = given(3, 3)
OTHER_INPUTS: dict[str, tuple[Any, ...]] = {
    "another dtype": (ASSIGNMENT, (X.long(), X, MASK), "float64 and got"),
    "a mask of rows": (UPDATE, (X, X, MASK[0]), "got"),
    "a mask of numbers": (UPDATE, (X, X, MASK.long()), "got"),
}


@rows("name later error", OTHER_INPUTS)
def test_another_kind_than_the_example_is_an_error(name: str, later: Any, error: str) -> None:
    text = "y[m] += 1.0" if name == UPDATE else "y[m] = 0.5"
    fast = tried(name, model_of(name, text), given(3, 3), 1)

    with pytest.raises(optimizer.InputError, match=error):
        fast(*later)


def test_gradients_flow_as_in_eager() -> None:
    model, (x, v, m) = model_of(UPDATE, "y[m] = v[m] * 3.0 + 1"), given(4, 3)
    fast = optimized_by(UPDATE, model, x, v, m)

    learn = [each.nan_to_num(2.0, 3.0, 4.0).requires_grad_() for each in (x, v)]
    expected, actual = (torch.autograd.grad(f(*learn, m).sum(), learn) for f in (model, fast))

    assert all(map(torch.equal, actual, expected))
