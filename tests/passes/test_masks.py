"""What is written under a mask is chosen by `where` where nobody can tell, and stays elsewhere."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import optimizer
from optimizer.core.ops import where_into, where_like
from optimizer.testing import assert_equivalent
from tests.single_pass import (
    Forward,
    ForwardOfThree,
    ForwardOfTwo,
    alike,
    assert_outcome,
    callees,
    optimized_by,
    rows,
    tried,
)

ASSIGNMENT, UPDATE = "lower_masked_assignment", "lower_masked_update"
UNKNOWN = "the graph was captured without example inputs"


def model_of(forward: Callable[..., Any]) -> nn.Module:
    """A model that may write the buffer `seen`."""
    return Forward(forward, seen=torch.ones(4, 3, dtype=torch.float64)).eval()


def values(*shape: int) -> Tensor:
    """Numbers around zero, and the signs and specials that a careless `where` would change."""
    tensor = torch.linspace(-2.0, 2.0, torch.Size(shape).numel(), dtype=torch.float64)
    if tensor.numel() >= 4:
        tensor[:4] = torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf])
    return tensor.reshape(shape)


def assigned(
    value: Any,
    mask: Callable[[Tensor], Tensor] = lambda y: y > 0,
    copy: Callable[[Tensor], Tensor] = lambda x: x.clone(),
) -> Callable[..., Any]:
    """A forward that assigns `value`, or what it gives, to a copy under a mask."""

    def forward(module: Any, x: Tensor) -> Tensor:
        y = copy(x)
        y[mask(x)] = value(x) if callable(value) else value
        return y

    return forward


FIRES = {
    "zero": assigned(0.0),
    "negative zero": assigned(-0.0),
    "an integer": assigned(3),
    "a boolean": assigned(True),
    "infinity": assigned(-torch.inf),
    "not a number": assigned(torch.nan),
    "a number that float64 rounds": assigned(0.1),
    "a mask of a method": assigned(0.0, lambda y: y.isnan()),
    "a mask of masks": assigned(0.0, lambda y: (y > 0) & ~(y < 1) | y.isnan()),
    "a mask that is a comparison of tensors": assigned(0.0, lambda y: y.ge(-y)),
    "torch.clone": assigned(0.0, lambda x: x < 0, torch.clone),
    "the method": "y = x.clone(); y.__setitem__(x < 0, 0.0); return y",
}


@pytest.mark.parametrize("shape", [(4, 3), (7,), (2, 1, 3)])
@rows("forward outcome", alike(1, FIRES))
def test_fires_on_every_number_and_mask(forward: Any, outcome: int, shape: Any) -> None:
    empty = (values(0, *shape[1:]),)

    fast = tried(ASSIGNMENT, model_of(forward), (values(*shape),), outcome, empty)

    assert callees(fast)[-1] is where_like
    assert "setitem" not in fast.code
    assert "clone" not in fast.code


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *((torch.float32, 0.1), (torch.float16, 0.1), (torch.bfloat16, 0.1)),
        *((torch.int64, -7), (torch.int64, True), (torch.int64, -1.7), (torch.int8, 2.5)),
        *((torch.int32, 2**31 - 1), (torch.uint8, 255)),
        *((torch.bool, True), (torch.bool, 3), (torch.bool, 0.0)),
    ],
)
def test_the_number_is_cast_as_the_assignment_casts(dtype: torch.dtype, value: float) -> None:
    x = values(4, 3) if dtype.is_floating_point else torch.tensor([[0, 1], [1, 2]])

    tried(ASSIGNMENT, model_of(assigned(value)), (x.to(dtype),), 1)


FORMS: dict[str, tuple[Callable[..., Any], int]] = {
    "a tensor without dimensions": (assigned(lambda x: x.sum()), 1),
    "a mask of rows": (assigned(0.25, lambda x: x[:, 0] > 0), 1),
    "a mask without dimensions": (assigned(0.25, lambda x: x.sum().isnan()), 1),
    "index_put_": (
        "y = x.clone(); y.index_put_((x > 0,), x.sum()); "
        "return torch.index_put_(y, [x < 0], x.sum().exp())", 2,
    ),
    "masked_fill_": ("return x.clone().masked_fill_(x[:1] > 0, 0.25) * 2", 1),
    "masked_fill_ of a tensor": ("y = x.clone(); y.masked_fill_(x > 0, x.sum()); return y", 1),
    "a view that is taken later": (
        "y = x.clone(); y[x > 0] = 0.25; row = y[0]; row.mul_(3.0); return (y, row)", 1,
    ),
    "a view that was read before": (
        "y = x * 2; total = y[0].sum(); y[x > 0] = 0.25; return (y, total)", 1,
    ),
    "a value that was read before": (
        "y = x * 2; before = y.sum(); y[y > 0] = 0.0; return (before, y.sum(), y)", 1,
    ),
    "assignments in a row": (
        "y = x.clone(); y[x < 0] = 0.0; y[y > 1] = 1.0; y[y == 0.5] = torch.nan; return y * 2", 3,
    ),
    "a view that is taken between two": (
        "y = x * 2; y[x > 0] = 1.0; view = y[0]; y[x < -1] = 2.0; return view", 1,
    ),
    "another write after a read": (
        "y = x * 2; y[x > 0] = 1.0; mask = y > 0.5; chosen = y[mask]; y.mul_(2.0); "
        "y[mask] = chosen; return y", 1,
    ),
    # The copy is saved only where its source stays the same.
    "a source that is written before": (
        "a = x * 2; y = a.clone(); mask = a > 0; a.add_(5.0); y[mask] = 0.0; return (y, a)", 1,
    ),
    "a source that is written after": (
        "a = x * 2; y = a.clone(); y[a > 0] = 0.0; a.add_(5.0); return (y, a)", 1,
    ),
    "a copy that is read before": (
        "y = x.clone(); z = y.exp(); y[x > 0] = 0.0; return (y, z, y is x)", 1,
    ),
    "a copy that is written before": (
        "y, mask = (x.clone(), x > 0); y[0] = 5.0; y[mask] = 0.0; return (y, mask)", 1,
    ),
    "a mask of the copy": (
        lambda m, x: (y := x.clone(), mask := y > 0, operator.setitem(y, mask, 0.0))[:2], 1,
    ),
    "a copy in another layout": (
        lambda m, x: (
            y := x.t().clone(memory_format=torch.contiguous_format),
            operator.setitem(y, x.t().contiguous() > 0, 0.0),
            x,
        )[::2],
        1,
    ),
}  # fmt: skip


@rows("forward outcome", FORMS)
def test_fires_on_every_form(forward: Any, outcome: int) -> None:
    first, *later = ((values(*shape),) for shape in ((4, 3), (1, 3), (5, 2)))

    fast = tried(ASSIGNMENT, model_of(forward), first, outcome, *later)

    assert where_like in callees(fast)


def under_a_given_mask(copy: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def forward(module: Any, x: Tensor, z: Tensor) -> Any:
        y = copy(x)
        y[z > 0] = 0.0
        return y

    return forward


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x, z: under_a_given_mask(lambda x: x * 2)(m, x, z).view(-1),
        lambda m, x, z: assigned(
            0.0, copy=lambda x: x.clone(memory_format=torch.contiguous_format)
        )(m, x).view(-1),
        under_a_given_mask(lambda x: x.clone()),
    ],
)
def test_the_result_is_laid_out_as_in_eager_whatever_the_inputs_are(forward: Any) -> None:
    model = ForwardOfTwo(forward).eval()
    x, transposed = values(4, 3), values(3, 4).t()
    fast = tried(ASSIGNMENT, model, (x, x), 1)

    for inputs in [(x, transposed), (transposed, x), (x[:1].expand(4, 3), transposed)]:
        try:
            expected = model(*inputs)
        except RuntimeError:  # a view of what is not contiguous
            continue
        assert fast(*inputs).stride() == expected.stride()
        assert_equivalent(model, fast, inputs, exact=True)


def test_two_inputs_may_be_the_same_tensor_later() -> None:
    model = ForwardOfTwo("y = x.clone(); mask = x > 0; z.add_(1.0); y[mask] = 0.0; return y").eval()
    fast = optimized_by(ASSIGNMENT, model, values(4, 3), values(4, 3))
    one, other = values(4, 3), values(4, 3)

    assert torch.equal(fast(one, one).nan_to_num(7), model(other, other).nan_to_num(7))


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded:UserWarning")
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded:UserWarning")
def test_what_overlaps_itself_in_a_later_call_is_left_alone() -> None:
    tried(
        ASSIGNMENT,
        model_of("y = (x[:1] * 2).expand(x.shape[0], x.shape[1]); y[x > 0] = 0.0; return y"),
        (values(1, 3),),
        SEEN,
        (values(4, 3),),
    )


SEEN = "an input, an attribute or a view would see the write"
KIND = "it is no real number"
HOLDS = "the dtype cannot hold the number"
REFUSALS = {
    "what accumulates": (
        "y = x.clone(); y.index_put_((x > 0,), x.sum(), accumulate=True); "
        "y.index_put_((x > 0,), x.sum(), True); return y", torch.float64, 0,
    ),
    "an index that is no mask": (
        "y = x.clone(); y[x[:, 1].argsort()] = 0.0; y[0] = 1.0; y[1:2, :] = 2.0; "
        "y[:, None] = 3.0; return y", torch.float64, 0,
    ),
    "one element each": (
        assigned(lambda x: x[x > 0]), torch.float64,
        "the assigned value may have an element for each True",
    ),
    "a tensor of another dtype": (
        assigned(lambda x: x.sum().float()), torch.float64, "the assigned value has another dtype",
    ),
    "a fill": (
        lambda m, x: (x * 2).masked_fill_(x > 0, 1.0), torch.float64,
        "it is filled in place and saves no copy",
    ),
    "the input": (assigned(0.0, copy=lambda x: x), torch.float64, SEEN),
    "a view of the input": (
        assigned(0.0, lambda x: x.t() > 0, lambda x: x.t()), torch.float64, SEEN,
    ),
    "a buffer": ("m.seen[x > 0] = 0.0; return m.seen + x", torch.float64, SEEN),
    "a view that is read later": (
        "y = x * 2; view = y[0]; y[y > 0] = 0.0; return view + 1", torch.float64, SEEN,
    ),
    "a view that is written": (
        "y = x * 2; view = y.t(); view[view > 0] = 0.0; return y", torch.float64, SEEN,
    ),
    "a number into complex ones": (assigned(2.0, lambda y: y.real > 0), torch.complex128, KIND),
    "a complex number": (assigned(2.0 + 0j), torch.float64, KIND),
    "a number beyond float16": (assigned(1e5), torch.float16, HOLDS),
    "a number beyond uint8": (assigned(-1), torch.uint8, HOLDS),
    "no number into integers": (assigned(torch.inf), torch.int64, HOLDS),
    "no number into booleans": (assigned(torch.nan, lambda y: y), torch.bool, HOLDS),
    "two devices": (
        "y = x.clone(); y[x > 0] = 0.0; "
        "return y.exp().view(torch.zeros(x.numel(), device=torch.device('meta')).shape)",
        torch.float64, "the tensors may live on different devices",
    ),
}  # fmt: skip


@rows("forward dtype outcome", REFUSALS)
def test_an_assignment_stays(forward: Any, dtype: torch.dtype, outcome: Any) -> None:
    x = torch.arange(-5, 7).reshape(4, 3).to(dtype)

    fast = optimized_by(ASSIGNMENT, model_of(forward), x)

    assert_outcome(ASSIGNMENT, fast, outcome)
    assert_same_outcome(model_of(forward), fast, x)


def assert_same_outcome(model: Any, fast: Any, *inputs: Tensor) -> None:
    """As eager: the answer, its strides and dtype, or the error; and what is left in the input."""
    one, other = ([each.clone() for each in inputs] for _ in range(2))
    try:
        expected = model(*one)
    except (RuntimeError, IndexError) as error:
        with pytest.raises(type(error), match=re.escape(str(error)[:20])):
            fast(*other)
        return
    actual = fast(*other)
    assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(actual, expected)
    assert all(map(torch.equal, other, one))


def test_an_assignment_stays_without_example_inputs() -> None:
    tried(ASSIGNMENT, model_of(assigned(0.0)), (), UNKNOWN, (values(4, 3),))


MASKS = [torch.tensor([True, False, True]), torch.tensor([[0, 1, 2], [0, 0, 1], [1, 1, 1]])]


@pytest.mark.parametrize("mask", MASKS)
def test_another_kind_of_mask_than_the_example_is_an_error(mask: Tensor) -> None:
    x = values(3, 3)

    fast = tried(
        ASSIGNMENT,
        ForwardOfTwo("y = x * 2; y[z] = 0.0; return y").eval(),
        (x, x > 0),
        1,
        (x, x < 0),
    )

    with pytest.raises(optimizer.InputError):
        fast(x, mask)


def test_another_dtype_than_the_example_is_an_error() -> None:
    fast = optimized_by(ASSIGNMENT, model_of(assigned(0.5)), values(4, 3))

    with pytest.raises(optimizer.InputError, match="float64 and got"):
        fast(torch.arange(12).reshape(4, 3))


def test_two_results_that_are_returned_stay_two_tensors() -> None:
    once = assigned(0.0, copy=lambda x: x * 2)
    twice = Forward(lambda m, x: (once(m, x), once(m, x))).eval()

    first, second = optimizer.optimize(twice, torch.ones(3), check=None, level=1)(torch.ones(3))

    assert first.data_ptr() != second.data_ptr()


def given(*shape: int, kind: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    count = torch.Size(shape).numel()
    x = torch.linspace(-3.0, 3.0, count, dtype=torch.float64).reshape(shape)
    specials = torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
    v = specials.repeat(count)[:count].reshape(shape) if kind.is_floating_point else x * 5
    return x.to(kind), v.to(kind), (torch.arange(count) % 3 != 1).reshape(shape)


def update(statement: str) -> Callable[..., Any]:
    """A forward with a statement on `y`, which is `x * 2`."""
    names: dict[str, Any] = {"torch": torch}
    exec(f"def forward(_, x, v, m):\n    y = x * 2; {statement}\n    return y", names)
    return names["forward"]  # type: ignore[no-any-return]


UPDATES = [
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


def updated(statement: str) -> nn.Module:
    return ForwardOfThree(update(statement)).eval()


@pytest.mark.parametrize("shape", [(4, 3), (2, 2), (1, 1)])
@pytest.mark.parametrize("statement", UPDATES)
def test_computes_everywhere_and_chooses(statement: str, shape: tuple[int, ...]) -> None:
    fires = statement.count("y[m] ") + statement.count("y[y > 1] ")

    fast = tried(UPDATE, updated(statement), given(*shape), fires, given(5, 3), given(2, 0))

    assert not [n for n in fast.graph.nodes if "setitem" in n.name or n.name.startswith("iadd")]


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
    tried(UPDATE, updated(statement), given(4, 3, kind=kind), 1)


OF_ROWS = "a mask of rows touches fewer of them"
BETWEEN = "what the value is chosen from or by is written in between"
UPDATES_THAT_STAY = {
    "y[m[:, 0]] = v[m[:, 0]]": 0,
    "r = m[:, 0]; y[r] = v[r]": OF_ROWS,
    "r = m[:, 0]; y[r] += 1.0": OF_ROWS,
    "m = m[:, 0].nonzero()[:, 0]; y[m] += 1.0": "it is indexed by numbers",
    "g = v[m]; v.add_(1.0); y[m] = g": BETWEEN,
    "m = m.clone(); g = v[m]; m.logical_not_(); y[m] = g": BETWEEN,
    "g = v[m]; x.add_(1.0); y[m] = g": BETWEEN,
    "x[m] += 1.0; y = x * 1.5": SEEN,
    "z = y.t(); n = m.t(); z[n] += 1.0": SEEN,
    "w = y[1:]; n = m[1:]; w[n] = y[:-1][n]": SEEN,
    "w = y[1:]; n = m[1:]; y = y[:-1]; y[n] = w[n]": SEEN,
    "y[m] = (v + 1j)[m]": "the value has another dtype",
    "y = y.float(); y[m] = v[m] * 1": "the value has another dtype",
    "w = v[m]; y[m] = w; y = y * w.sum()": 0,
    "y[m] = v[m] + v[m]": 0,
    "y[m] = v[m].exp()": 0,
    "y[~m] = v[m].flip(0)[:1]": 0,
    "y[m] += 1.0; y = y.view(torch.zeros(x.numel(), device=torch.device('meta')).shape)": (
        "the tensors may live on different devices"
    ),
}


@pytest.mark.parametrize("statement", UPDATES_THAT_STAY)
def test_an_update_stays(statement: str) -> None:
    x, v, m = given(4, 3, kind=torch.int64)
    inputs = (x.double(), v.double(), m)

    fast = optimized_by(UPDATE, updated(statement), *inputs)

    assert_outcome(UPDATE, fast, UPDATES_THAT_STAY[statement])
    assert_same_outcome(updated(statement), fast, *inputs)


def test_a_value_that_overlaps_what_is_written_is_left_alone() -> None:
    statement = "w = y.t(); y[m] = w[m]"

    tried(UPDATE, updated(statement), given(3, 3), "the value overlaps what is written")


def test_an_update_stays_without_example_inputs() -> None:
    tried(UPDATE, updated("y[m] = v[m]"), (), UNKNOWN, given(3, 3))


@pytest.mark.parametrize("mask", MASKS)
def test_another_kind_of_mask_of_an_update_is_an_error(mask: Tensor) -> None:
    fast = optimized_by(UPDATE, updated("y[m] += 1.0"), *given(3, 3))

    with pytest.raises(optimizer.InputError):
        fast(*given(3, 3)[:2], mask)


def test_it_gathers_and_scatters_nothing() -> None:
    fast = optimized_by(UPDATE, updated("y[m] += 1.0"), *given(4, 3))

    assert [each.__name__ for each in callees(fast)[-3:]] == ["mul", "add", "where_into"]


def test_gradients_flow_as_in_eager() -> None:
    model, (x, v, m) = updated("y[m] = v[m] * 3.0 + 1"), given(4, 3)
    fast = optimized_by(UPDATE, model, x, v, m)

    learn = [t.nan_to_num(2.0, 3.0, 4.0).requires_grad_() for t in (x, v)]
    expected, actual = (torch.autograd.grad(f(*learn, m).sum(), learn) for f in (model, fast))

    assert all(map(torch.equal, actual, expected))


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
