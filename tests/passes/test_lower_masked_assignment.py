"""`y[mask] = value` becomes torch.where where nobody can tell, and stays where somebody can."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import optimizer
from optimizer.core.ops import where_like
from optimizer.testing import assert_equivalent
from tests.single_pass import Forward, assert_left_alone, callees, optimized_by

NAME = "lower_masked_assignment"
optimized = partial(optimized_by, NAME)


class Unary(Forward):
    """Runs a forward of a case; `seen` is a buffer that it may write."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__(forward, seen=torch.ones(4, 3, dtype=torch.float64))


class Binary(Unary):
    def forward(self, x: Tensor, z: Tensor) -> Any:
        return self.function(self, x, z)


def values(*shape: int) -> Tensor:
    """Numbers around zero, and the signs and specials that a careless `where` would change."""
    tensor = torch.linspace(-2.0, 2.0, torch.Size(shape).numel(), dtype=torch.float64)
    if tensor.numel() >= 4:
        tensor[:4] = torch.tensor([-0.0, torch.nan, torch.inf, -torch.inf])
    return tensor.reshape(shape)


def reasons(fast: Any) -> list[str]:
    return [refusal.reason for refusal in fast.report.refused]


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


def setitem(module: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y.__setitem__(x < 0, 0.0)
    return y


FIRES: dict[str, Callable[[Any, Tensor], Any]] = {
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
    "the method": setitem,
}


@pytest.mark.parametrize("shape", [(4, 3), (7,), (2, 1, 3)])
@pytest.mark.parametrize("case", FIRES)
def test_fires_on_every_number_and_mask(case: str, shape: tuple[int, ...]) -> None:
    model = Unary(FIRES[case]).eval()
    inputs = (values(*shape),)

    fast = optimized(model, *inputs)

    assert callees(fast)[-1] is where_like
    assert "setitem" not in fast.code
    assert "clone" not in fast.code
    assert_equivalent(model, fast, inputs, exact=True)


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
    model = Unary(assigned(value)).eval()
    x = values(4, 3) if dtype.is_floating_point else torch.tensor([[0, 1], [1, 2]])

    fast = optimized(model, x.to(dtype))

    assert where_like in callees(fast)
    assert_equivalent(model, fast, (x.to(dtype),), exact=True)


def several(module: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[x < 0] = 0.0
    y[y > 1] = 1.0
    y[y == 0.5] = torch.nan
    return y * 2


def test_a_run_of_assignments_becomes_a_run_of_wheres() -> None:
    model = Unary(several).eval()
    inputs = (values(4, 3),)

    fast = optimized(model, *inputs)

    assert callees(fast).count(where_like) == 3
    assert_equivalent(model, fast, inputs, exact=True)


def read_before(module: Any, x: Tensor) -> Any:
    y = x * 2
    before = y.sum()
    y[y > 0] = 0.0
    return before, y.sum(), y


def source_written_later(module: Any, x: Tensor) -> Any:
    a = x * 2
    y = a.clone()
    mask = a > 0
    a.add_(5.0)
    y[mask] = 0.0
    return y, a


def source_written_after(module: Any, x: Tensor) -> Any:
    a = x * 2
    y = a.clone()
    y[a > 0] = 0.0
    a.add_(5.0)
    return y, a


def copy_read_before(module: Any, x: Tensor) -> Any:
    y = x.clone()
    z = y.exp()
    y[x > 0] = 0.0
    return y, z, y is x


def copy_written_before(module: Any, x: Tensor) -> Any:
    y, mask = x.clone(), x > 0
    y[0] = 5.0
    y[mask] = 0.0
    return y, mask


@pytest.mark.parametrize(
    "forward",
    [
        source_written_later,
        source_written_after,
        copy_read_before,
        copy_written_before,
        lambda m, x: (y := x.clone(), mask := y > 0, operator.setitem(y, mask, 0.0))[:2],
        lambda m, x: (
            y := x.t().clone(memory_format=torch.contiguous_format),
            operator.setitem(y, x.t().contiguous() > 0, 0.0),
            x,
        )[::2],
    ],
)
def test_the_copy_is_saved_only_where_its_source_stays_the_same(
    forward: Callable[..., Any],
) -> None:
    model = Unary(forward).eval()
    inputs = (values(4, 3),)

    fast = optimized(model, *inputs)

    assert where_like in callees(fast)
    assert fast(*inputs)[0].stride() == model(*inputs)[0].stride()
    assert_equivalent(model, fast, inputs, exact=True)


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
def test_the_result_is_laid_out_as_in_eager_whatever_the_inputs_are(
    forward: Callable[..., Any],
) -> None:
    model = Binary(forward).eval()
    x, transposed = values(4, 3), values(3, 4).t()
    fast = optimized(model, x, x)

    assert where_like in callees(fast)
    for inputs in [(x, x), (x, transposed), (transposed, x), (x[:1].expand(4, 3), transposed)]:
        try:
            expected = model(*inputs)
        except RuntimeError:  # a view of what is not contiguous
            continue
        assert fast(*inputs).stride() == expected.stride()
        assert_equivalent(model, fast, inputs, exact=True)


def other_input_written(module: Any, x: Tensor, z: Tensor) -> Any:
    y = x.clone()
    mask = x > 0
    z.add_(1.0)
    y[mask] = 0.0
    return y


def test_two_inputs_may_be_the_same_tensor_later() -> None:
    model = Binary(other_input_written).eval()
    fast = optimized(model, values(4, 3), values(4, 3))
    one, other = values(4, 3), values(4, 3)

    assert torch.equal(fast(one, one).nan_to_num(7), model(other, other).nan_to_num(7))


def tensor_put(module: Any, x: Tensor) -> Any:
    y = x.clone()
    y.index_put_((x > 0,), x.sum())
    return torch.index_put_(y, [x < 0], x.sum().exp())


def fill(module: Any, x: Tensor) -> Any:
    return x.clone().masked_fill_(x[:1] > 0, 0.25) * 2


def fill_tensor(module: Any, x: Tensor) -> Any:
    y = x.clone()
    y.masked_fill_(x > 0, x.sum())
    return y


def viewed_later(module: Any, x: Tensor) -> Any:
    y = x.clone()
    y[x > 0] = 0.25
    row = y[0]
    row.mul_(3.0)
    return y, row


def viewed_before(module: Any, x: Tensor) -> Any:
    y = x * 2
    total = y[0].sum()
    y[x > 0] = 0.25
    return y, total


@pytest.mark.parametrize(
    "forward",
    [
        assigned(lambda x: x.sum()),
        assigned(0.25, lambda x: x[:, 0] > 0),
        assigned(0.25, lambda x: x.sum().isnan()),
        *(tensor_put, fill, fill_tensor, viewed_later, viewed_before, read_before),
    ],
)
def test_fires_on_every_form(forward: Callable[..., Any]) -> None:
    model = Unary(forward).eval()
    inputs = (torch.linspace(-2.0, 2.0, 9, dtype=torch.float64).reshape(3, 3),)

    fast = optimized(model, *inputs)

    assert where_like in callees(fast)
    assert_equivalent(model, fast, inputs, exact=True)
    for shape in ((1, 3), (5, 2)):
        assert_equivalent(model, fast, (values(*shape),), exact=True)


def accumulated(module: Any, x: Tensor) -> Any:
    y = x.clone()
    y.index_put_((x > 0,), x.sum(), accumulate=True)
    y.index_put_((x > 0,), x.sum(), True)
    return y


def test_what_accumulates_is_none_of_its_business() -> None:
    fast = optimized(Unary(accumulated).eval(), values(4, 3))

    assert fast.report.fired == fast.report.refused == ()


def expanded(module: Any, x: Tensor) -> Any:
    y = (x[:1] * 2).expand(x.shape[0], x.shape[1])
    y[x > 0] = 0.0
    return y


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded:UserWarning")
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded:UserWarning")
def test_what_overlaps_itself_in_a_later_call_is_left_alone() -> None:
    fast = optimized(Unary(expanded).eval(), values(1, 3))

    assert reasons(fast) == [SEEN]
    assert_equivalent(Unary(expanded).eval(), fast, (values(4, 3),), exact=True)


def a_buffer(module: Any, x: Tensor) -> Any:
    module.seen[x > 0] = 0.0
    return module.seen + x


def a_view_read_later(module: Any, x: Tensor) -> Any:
    y = x * 2
    view = y[0]
    y[y > 0] = 0.0
    return view + 1


def through_a_view(module: Any, x: Tensor) -> Any:
    y = x * 2
    view = y.t()
    view[view > 0] = 0.0
    return y


def two_devices(module: Any, x: Tensor) -> Any:
    y = x.clone()
    y[x > 0] = 0.0
    return y.exp().view(torch.zeros(x.numel(), device=torch.device("meta")).shape)


SEEN = "an input, an attribute or a view would see the write"
KIND = "it is no real number"
REFUSALS: dict[str, tuple[Callable[..., Any], torch.dtype, str]] = {
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
    "a buffer": (a_buffer, torch.float64, SEEN),
    "a view that is read later": (a_view_read_later, torch.float64, SEEN),
    "a view that is written": (through_a_view, torch.float64, SEEN),
    "a number into complex ones": (
        assigned(2.0, lambda y: y.real > 0), torch.complex128, KIND,
    ),
    "a complex number": (assigned(2.0 + 0j), torch.float64, KIND),
    "a number beyond float16": (assigned(1e5), torch.float16, "the dtype cannot hold the number"),
    "a number beyond uint8": (assigned(-1), torch.uint8, "the dtype cannot hold the number"),
    "no number into integers": (
        assigned(torch.inf), torch.int64, "the dtype cannot hold the number",
    ),
    "no number into booleans": (
        assigned(torch.nan, lambda y: y), torch.bool, "the dtype cannot hold the number",
    ),
    "two devices": (two_devices, torch.float64, "the tensors may live on different devices"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    forward, dtype, reason = REFUSALS[case]
    model = Unary(forward).eval()
    x = torch.arange(-5, 7).reshape(4, 3).to(dtype)

    fast = optimized(model, x)

    assert reasons(fast) == [reason]
    assert fast.report.fired == ()
    assert_same_outcome(model, fast, x)


def assert_same_outcome(model: Any, fast: Any, x: Tensor) -> None:
    """As eager: the answer, its strides and dtype, or the error; and what is left in the input."""
    one, other = x.clone(), x.clone()
    try:
        expected = model(one)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:20]):
            fast(other)
        return
    actual = fast(other)
    assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(actual, expected)
    assert torch.equal(other, one)


def test_refuses_without_example_inputs() -> None:
    model = Unary(assigned(0.0)).eval()

    fast = optimized(model)

    assert reasons(fast) == ["the graph was captured without example inputs"]
    assert_equivalent(model, fast, (values(4, 3),), exact=True)


def by_row_number(module: Any, x: Tensor) -> Any:
    y = x.clone()
    y[x[:, 1].argsort()] = 0.0
    y[0] = 1.0
    y[1:2, :] = 2.0
    y[:, None] = 3.0
    return y


def test_another_assignment_than_a_masked_one_is_none_of_its_business() -> None:
    model = Unary(by_row_number).eval()
    inputs = (values(4, 3),)

    fast = optimized(model, *inputs)

    assert_left_alone(model, fast, inputs)


def given_mask(module: Any, x: Tensor, mask: Tensor) -> Any:
    y = x * 2
    y[mask] = 0.0
    return y


@pytest.mark.parametrize(
    "mask", [torch.tensor([True, False, True]), torch.tensor([[0, 1, 2], [0, 0, 1], [1, 1, 1]])]
)
def test_another_kind_of_mask_than_the_example_is_an_error(mask: Tensor) -> None:
    model = Binary(given_mask).eval()
    x = values(3, 3)

    fast = optimized(model, x, x > 0)

    assert_equivalent(model, fast, (x, x < 0), exact=True)
    with pytest.raises(optimizer.InputError):
        fast(x, mask)


def test_other_values_and_sizes_than_the_example_are_right() -> None:
    model = Unary(several).eval()
    fast = optimized(model, values(4, 3))

    for shape in ((1, 3), (9, 2), (0, 3)):
        assert_equivalent(model, fast, (values(*shape) * -3,), exact=True)


def test_another_dtype_than_the_example_is_an_error() -> None:
    fast = optimized(Unary(assigned(0.5)).eval(), values(4, 3))

    with pytest.raises(optimizer.InputError, match="float64 and got"):
        fast(torch.arange(12).reshape(4, 3))


def seen_through_a_later_view(module: Any, x: Tensor) -> Any:
    y = x * 2
    y[x > 0] = 1.0
    view = y[0]
    y[x < -1] = 2.0
    return view


def written_after_it_was_read(module: Any, x: Tensor) -> Any:
    y = x * 2
    y[x > 0] = 1.0
    mask = y > 0.5
    chosen = y[mask]
    y.mul_(2.0)
    y[mask] = chosen
    return y


@pytest.mark.parametrize("function", [seen_through_a_later_view, written_after_it_was_read])
def test_later_views_and_writes_are_those_of_what_replaced_the_value(function: Any) -> None:
    model, inputs = Unary(function).eval(), (values(4, 3),)

    fast = optimizer.optimize(model, inputs, level=0, check=None)

    assert fast.report.counts()["lower_masked_assignment"] == 1
    assert_equivalent(model, fast, inputs, exact=True)


def test_two_results_that_are_returned_stay_two_tensors() -> None:
    once = assigned(0.0, copy=lambda x: x * 2)
    twice = Forward(lambda m, x: (once(m, x), once(m, x))).eval()

    first, second = optimizer.optimize(twice, torch.ones(3), check=None, level=1)(torch.ones(3))

    assert first.data_ptr() != second.data_ptr()
