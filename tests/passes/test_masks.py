"""What is written under a mask is chosen by `where` where nobody can tell, and stays elsewhere."""

from __future__ import annotations

import re
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
    assert_outcome,
    callees,
    optimized_by,
    rows,
    spelled,
    tried,
)

ASSIGNMENT, UPDATE = "lower_masked_assignment", "lower_masked_update"
UNKNOWN = "the graph was captured without example inputs"


def values(*shape: int) -> Tensor:
    """Numbers around zero, and the signs and specials that a careless `where` would change."""
    tensor = torch.linspace(-2.0, 2.0, torch.Size(shape).numel(), dtype=torch.float64)
    if tensor.numel() >= 4:
        tensor[:4] = torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf])
    return tensor.reshape(shape)


def model_of(text: str) -> nn.Module:
    """A model that may write the buffer `seen`; of `y`, a copy of `x`, where it returns nothing."""
    whole = text if "return" in text else f"y = x.clone(); {text}; return y"
    return Forward(whole, seen=torch.ones(4, 3, dtype=torch.float64)).eval()


FIRES = {
    1: """
    y[x > 0] = 0.0; y[x > 0] = -0.0; y[x > 0] = 3; y[x > 0] = True; y[x > 0] = -torch.inf;
    y[x > 0] = torch.nan; y[x > 0] = 0.1; y[x.isnan()] = 0.0; y.__setitem__(x < 0, 0.0);
    y[(x > 0) & ~(x < 1) | x.isnan()] = 0.0; y[x.ge(-x)] = 0.0
    """
}
NUMBERS = {
    torch.float32: (0.1,),
    torch.float16: (0.1,),
    torch.bfloat16: (0.1,),
    torch.int64: (-7, True, -1.7),
    torch.int8: (2.5,),
    torch.int32: (2**31 - 1,),
    torch.uint8: (255, -1),
    torch.bool: (True, 3, 0.0, "torch.nan"),
}


@pytest.mark.parametrize("shape", [(4, 3), (7,), (2, 1, 3)])
@spelled(FIRES)
def test_fires_on_every_number_and_mask(forward: str, outcome: int, shape: Any) -> None:
    empty = (values(0, *shape[1:]),)

    fast = tried(ASSIGNMENT, model_of(forward), (values(*shape),), outcome, empty)

    assert callees(fast)[-1] is where_like
    assert "setitem" not in fast.code
    assert "clone" not in fast.code


@pytest.mark.parametrize(
    ("dtype", "value"), [(dtype, each) for dtype, numbers in NUMBERS.items() for each in numbers]
)
def test_the_number_is_cast_as_the_assignment_casts(dtype: torch.dtype, value: float) -> None:
    x = values(4, 3) if dtype.is_floating_point else torch.tensor([[0, 1], [1, 2]])

    tried(ASSIGNMENT, model_of(f"y[x > 0] = {value}"), (x.to(dtype),), 1)


FORMS = {
    1: """
    y = torch.clone(x); y[x < 0] = 0.0; return y
    y = x.clone(); y[x > 0] = x.sum(); return y
    y = x.clone(); y[x[:, 0] > 0] = 0.25; return y
    y = x.clone(); y[x.sum().isnan()] = 0.25; return y
    return x.clone().masked_fill_(x[:1] > 0, 0.25) * 2
    y = x.clone(); y.masked_fill_(x > 0, x.sum()); return y
    y = x.clone(); y[x > 0] = 0.25; row = y[0]; row.mul_(3.0); return (y, row)
    y = x * 2; total = y[0].sum(); y[x > 0] = 0.25; return (y, total)
    y = x * 2; before = y.sum(); y[y > 0] = 0.0; return (before, y.sum(), y)
    y = x * 2; y[x > 0] = 1.0; view = y[0]; y[x < -1] = 2.0; return view
    y = x * 2; y[x > 0] = 1.0; n = y > 0.5; z = y[n]; y.mul_(2.0); y[n] = z; return y
    a = x * 2; y = a.clone(); mask = a > 0; a.add_(5.0); y[mask] = 0.0; return (y, a)
    a = x * 2; y = a.clone(); y[a > 0] = 0.0; a.add_(5.0); return (y, a)
    y = x.clone(); z = y.exp(); y[x > 0] = 0.0; return (y, z, y is x)
    y, mask = (x.clone(), x > 0); y[0] = 5.0; y[mask] = 0.0; return (y, mask)
    y = x.clone(); mask = y > 0; y[mask] = 0.0; return (y, mask)
    y = x.t().clone(memory_format=torch.contiguous_format); y[x.t().contiguous() > 0] = 0.0; \
        return (y, x)
    """,
    2: """
    y = x.clone(); y.index_put_((x > 0,), x.sum()); \
        return torch.index_put_(y, [x < 0], x.sum().exp())
    """,
    3: """
    y = x.clone(); y[x < 0] = 0.0; y[y > 1] = 1.0; y[y == 0.5] = torch.nan; return y * 2
    """,
}


@spelled(FORMS)
def test_fires_on_every_form(forward: str, outcome: int) -> None:
    first, *later = ((values(*shape),) for shape in ((4, 3), (1, 3), (5, 2)))

    fast = tried(ASSIGNMENT, model_of(forward), first, outcome, *later)

    assert where_like in callees(fast)


CONTIGUOUS = "x.clone(memory_format=torch.contiguous_format)"
LAID_OUT = {
    1: f"""
    y = x * 2; y[z > 0] = 0.0; return y.view(-1)
    y = {CONTIGUOUS}; y[x > 0] = 0.0; return y.view(-1)
    y = x.clone(); y[z > 0] = 0.0; return y
    """
}


@spelled(LAID_OUT)
def test_the_result_is_laid_out_as_in_eager_whatever_the_inputs_are(
    forward: str, outcome: int
) -> None:
    model, (x, transposed) = ForwardOfTwo(forward).eval(), (values(4, 3), values(3, 4).t())
    fast = tried(ASSIGNMENT, model, (x, x), outcome)

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


SEEN = "an input, an attribute or a view would see the write"
HOLDS = "the dtype cannot hold the number"
DEVICES = "the tensors may live on different devices"
ON_META = "view(torch.zeros(x.numel(), device=torch.device('meta')).shape)"
STAYS = {
    (torch.float64, 0): """
    y.index_put_((x > 0,), x.sum(), accumulate=True); y.index_put_((x > 0,), x.sum(), True);
    y[x[:, 1].argsort()] = 0.0; y[0] = 1.0; y[1:2, :] = 2.0; y[:, None] = 3.0
    """,
    (torch.float64, "the assigned value may have an element for each True"): "y[x > 0] = x[x > 0]",
    (torch.float64, "the assigned value has another dtype"): "y[x > 0] = x.sum().float()",
    (torch.float64, "it is filled in place and saves no copy"): """
    return (x * 2).masked_fill_(x > 0, 1.0)
    """,
    (torch.float64, SEEN): """
    x[x > 0] = 0.0; return x
    y = x.t(); y[x.t() > 0] = 0.0; return y
    m.seen[x > 0] = 0.0; return m.seen + x
    y = x * 2; view = y[0]; y[y > 0] = 0.0; return view + 1
    y = x * 2; view = y.t(); view[view > 0] = 0.0; return y
    """,
    (torch.complex128, "it is no real number"): "y[x.real > 0] = 2.0",
    (torch.float64, "it is no real number"): "y[x > 0] = 2.0 + 0j",
    (torch.float16, HOLDS): "y[x > 0] = 1e5",
    (torch.uint8, HOLDS): "y[x > 0] = 256",
    (torch.int64, HOLDS): "y[x > 0] = torch.inf",
    (torch.int8, HOLDS): "y[x > 0] = torch.nan",
    (torch.float64, DEVICES): f"y = x.clone(); y[x > 0] = 0.0; return y.exp().{ON_META}",
}


@spelled(STAYS, cells="forward case")
def test_an_assignment_stays(forward: str, case: Any) -> None:
    dtype, outcome = case
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


def test_two_results_that_are_returned_stay_two_tensors() -> None:
    twice = "y, z = (x * 2, x * 2); y[x > 0] = 0.0; z[x > 0] = 0.0; return (y, z)"

    fast: Any = optimizer.optimize(Forward(twice).eval(), torch.ones(3), check=None, level=1)
    first, second = fast(torch.ones(3))

    assert first.data_ptr() != second.data_ptr()


def given(*shape: int, kind: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    count = torch.Size(shape).numel()
    x = torch.linspace(-3.0, 3.0, count, dtype=torch.float64).reshape(shape)
    specials = torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
    v = specials.repeat(count)[:count].reshape(shape) if kind.is_floating_point else x * 5
    return x.to(kind), v.to(kind), (torch.arange(count) % 3 != 1).reshape(shape)


class Updated(ForwardOfThree):
    """Statements on `y`, which is `x * 2`."""

    arguments = "_, x, v, m"

    def __init__(self, statements: str) -> None:
        super().__init__(f"y = x * 2; {statements}; return y")
        self.eval()


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
IN_EVERY_DTYPE = {
    torch.int64: "y[m] += 3",
    torch.int8: "y[m] *= 77",
    torch.float16: "y[m] = v[m] * 0.1",
    torch.bfloat16: "y[m] += 0.1",
}


@pytest.mark.parametrize("shape", [(4, 3), (2, 2), (1, 1)])
@pytest.mark.parametrize("statement", UPDATES)
def test_computes_everywhere_and_chooses(statement: str, shape: tuple[int, ...]) -> None:
    fires = statement.count("y[m] ") + statement.count("y[y > 1] ")

    fast = tried(UPDATE, Updated(statement), given(*shape), fires, given(5, 3), given(2, 0))

    assert not [n for n in fast.graph.nodes if "setitem" in n.name or n.name.startswith("iadd")]


@pytest.mark.parametrize("dtype", IN_EVERY_DTYPE)
def test_keeps_the_bits_in_every_dtype(dtype: torch.dtype) -> None:
    tried(UPDATE, Updated(IN_EVERY_DTYPE[dtype]), given(4, 3, kind=dtype), 1)


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
    f"y[m] += 1.0; y = y.{ON_META}": DEVICES,
}


@pytest.mark.parametrize("statement", UPDATES_THAT_STAY)
def test_an_update_stays(statement: str) -> None:
    x, v, m = given(4, 3, kind=torch.int64)
    inputs = (x.double(), v.double(), m)

    fast = optimized_by(UPDATE, Updated(statement), *inputs)

    assert_outcome(UPDATE, fast, UPDATES_THAT_STAY[statement])
    assert_same_outcome(Updated(statement), fast, *inputs)


EXPANDED, OVERLAPS = "expand(x.shape[0], x.shape[1])", "the value overlaps what is written"
ALONE: dict[str, tuple[Any, ...]] = {
    "an assignment without example inputs": (
        ASSIGNMENT, model_of("y[x > 0] = 0.0"), (), UNKNOWN, (values(4, 3),),
    ),
    "what overlaps itself in a later call": (
        ASSIGNMENT, model_of(f"y = (x[:1] * 2).{EXPANDED}; y[x > 0] = 0.0; return y"),
        (values(1, 3),), SEEN, (values(4, 3),),
    ),
    "an update without example inputs": (UPDATE, Updated("y[m] = v[m]"), (), UNKNOWN, given(3, 3)),
    "a value that overlaps what is written": (
        UPDATE, Updated("w = y.t(); y[m] = w[m]"), given(3, 3), OVERLAPS,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded:UserWarning")
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded:UserWarning")
@pytest.mark.parametrize("case", ALONE)
def test_one_pass_alone(case: str) -> None:
    tried(*ALONE[case])


OF_ROW = torch.tensor([True, False, True])
NUMBERED = torch.tensor([[0, 1, 2], [0, 0, 1], [1, 1, 1]])
ASSIGNS = ForwardOfTwo("y = x * 2; y[z] = 0.0; return y").eval()
X, ADDS = values(3, 3), Updated("y[m] += 1.0")
OTHER_INPUTS: dict[str, tuple[Any, ...]] = {
    "a mask of rows": (ASSIGNMENT, ASSIGNS, (X, X > 0), (X, OF_ROW), "got"),
    "a mask of numbers": (ASSIGNMENT, ASSIGNS, (X, X > 0), (X, NUMBERED), "got"),
    "another dtype": (
        ASSIGNMENT, model_of("y[x > 0] = 0.5"), (X,), (torch.arange(9).reshape(3, 3),),
        "float64 and got",
    ),
    "a mask of rows of an update": (UPDATE, ADDS, given(3, 3), (X, X, OF_ROW), "got"),
    "numbers in an update": (UPDATE, ADDS, given(3, 3), (X, X, NUMBERED), "got"),
}  # fmt: skip


@rows("name model inputs later error", OTHER_INPUTS)
def test_another_kind_than_the_example_is_an_error(
    name: str, model: nn.Module, inputs: Any, later: Any, error: str
) -> None:
    fast = tried(name, model, inputs, 1)

    with pytest.raises(optimizer.InputError, match=error):
        fast(*later)


def test_it_gathers_and_scatters_nothing() -> None:
    fast = optimized_by(UPDATE, ADDS, *given(4, 3))

    assert [each.__name__ for each in callees(fast)[-3:]] == ["mul", "add", "where_into"]


def test_gradients_flow_as_in_eager() -> None:
    model, (x, v, m) = Updated("y[m] = v[m] * 3.0 + 1"), given(4, 3)
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
