"""Transposes meet, and become one or none, in every spelling and at every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import assert_equivalent
from tests.single_pass import Forward, alike, callees, function_of, optimized_by, rows, texts, tried

COMPOSE, SINK = "compose_transposes", "sink_transposes"
LAYOUTS = (torch.permute, torch.transpose, torch.t, torch.movedim)


def model_of(function: Callable[[Tensor], Any]) -> nn.Module:
    return Forward(lambda _, x: function(x)).eval()


def tensor(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64)


CUBE = tensor(2, 3, 4)


def composed(function: Callable[[Tensor], Any], outcome: Any, x: Tensor | None = CUBE) -> Any:
    """The optimized function, after a look at what came of it; example inputs only where given."""
    return tried(
        COMPOSE,
        model_of(function),
        () if x is None else (x,),
        outcome,
        () if x is not None else (CUBE,),
    )


# Each swaps the axes 1 and 2 of three.
SWAPS = texts(
    """
    x.transpose(1, 2); x.transpose(2, 1); x.transpose(-1, -2); x.transpose(1, -1); x.mT;
    x.transpose(dim1=1, dim0=2); torch.transpose(x, 1, 2); torch.transpose(input=x, dim0=1, dim1=2);
    x.swapaxes(1, 2); x.swapaxes(axis0=1, axis1=-1); x.swapdims(1, 2); torch.swapaxes(x, 1, 2);
    torch.swapdims(x, 1, 2); x.permute(0, 2, 1); x.permute((0, 2, 1)); x.permute([0, 2, 1]);
    x.permute(0, -1, -2); x.permute(dims=(0, 2, 1)); torch.permute(x, (0, 2, 1));
    torch.permute(input=x, dims=(0, 2, 1)); x.movedim(1, 2); x.movedim(-1, 1);
    x.movedim((1, 2), (2, 1)); x.movedim(source=1, destination=2); x.moveaxis(1, 2);
    torch.movedim(x, 1, 2); torch.moveaxis(x, (2, 1), (1, 2))
    """
)


def chain(*steps: Any) -> Callable[[Tensor], Tensor]:
    """Functions of `x`, or their texts, one after another."""
    functions = [function_of("x", step) if isinstance(step, str) else step for step in steps]
    return lambda x: reduce(lambda value, step: step(value), functions, x)


ORDERS = list(permutations(range(3)))


@pytest.mark.parametrize(
    "inner", ["x.transpose(1, 2)", "x.permute(0, -1, -2)", "x.movedim(1, 2)", "x.mT"]
)
@pytest.mark.parametrize("outer", SWAPS)
def test_two_swaps_vanish_in_every_spelling(outer: str, inner: str) -> None:
    composed(chain(inner, outer, torch.exp), [torch.exp])


@pytest.mark.parametrize("spelling", SWAPS)
def test_a_single_swap_is_left_as_it_is(spelling: str) -> None:
    assert len(callees(composed(chain(spelling), 0))) == 1


@pytest.mark.parametrize(("inner", "outer"), list(product(ORDERS, ORDERS)))
def test_two_permutes_compose(inner: tuple[int, ...], outer: tuple[int, ...]) -> None:
    function = chain(lambda x: x.permute(inner), lambda x: x.permute(outer))
    same = function(CUBE).shape == CUBE.shape

    fast = optimized_by(COMPOSE, model_of(function), CUBE)

    assert callees(fast) == ([] if same else [torch.permute])
    assert_equivalent(model_of(function), fast, (CUBE,), exact=True)


def cycle(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0)


MANY = {
    "three-cycle, three times": (chain(cycle, cycle, cycle), (2, 3, 4), []),
    "three-cycle, twice": (chain(cycle, cycle), (2, 3, 4), [torch.permute]),
    "three-cycle there and back": (chain(cycle, "x.permute(2, 0, 1)"), (2, 3, 4), []),
    "three-cycle of negative axes": (chain(*["x.permute(-2, -1, -3)"] * 3), (2, 3, 4), []),
    "twenty-one steps": (chain(*[cycle, *SWAPS][:21]), (2, 3, 4), [torch.permute]),
    "five axes": (
        chain("x.permute(0, 2, 3, 4, 1)", "x.movedim(-1, 1)"), (2, 3, 1, 2, 4), [],
    ),
    "movedim of several axes": (
        chain("x.movedim((0, -1), (-1, 1))", "x.movedim((3, 1), (0, 3))"),
        (2, 3, 4, 5), [],
    ),
    "matrix: t and T": (chain("x.t()", "x.T"), (3, 4), []),
    "matrix: torch.t and transpose": (chain(torch.t, "x.transpose(-2, -1)"), (3, 4), []),
    "vector: t": (chain(torch.t, torch.t), (3,), []),
    "an axis and itself": (chain("x.transpose(1, 1)"), (2, 3, 4), []),
    "a permute that moves nothing": (chain("x.permute(0, -2, 2)"), (2, 3, 4), []),
}  # fmt: skip


@rows("function shape outcome", MANY)
def test_a_run_becomes_one_or_none(function: Any, shape: tuple[int, ...], outcome: Any) -> None:
    fast = composed(function, outcome, tensor(*shape))

    assert fast(tensor(*shape)).stride() == function(tensor(*shape)).stride()


@pytest.mark.parametrize(
    "inner", ["x.transpose(1, 2)", "x.permute(0, 2, 1)", "torch.permute(x, (0, 2, 1))"]
)
def test_no_example_inputs_are_needed_where_the_rank_is_stated(inner: str) -> None:
    composed(chain(inner, "x.transpose(1, 2)"), [], None)


def test_equal_transposes_cancel_at_any_rank() -> None:
    function = chain("x.transpose(0, -1)", "x.transpose(-1, 0)")

    tried(COMPOSE, model_of(function), (tensor(2, 3),), [], (CUBE,))


def written_between(x: Tensor) -> Tensor:
    y = x.clone().transpose(1, 2)
    y.add_(1.0)
    return y.transpose(1, 2)


def written_through_a_mask(x: Tensor) -> Tensor:
    y = x.clone().transpose(1, 2)
    y[y > 3.0] = 0.0
    return y.transpose(1, 2)


def written_afterwards(x: Tensor) -> Tensor:
    y = x.transpose(1, 2).transpose(1, 2)
    y.mul_(2.0)
    return y + x


MIXED = chain("x.transpose(1, 2)", "x.mT")
COMPOSED: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "a second reader of the inner one": (
        lambda x: (y := x.transpose(1, 2), y.transpose(1, 2)), [torch.transpose],
    ),
    "a write between": (written_between, 1),
    "a write through a mask": (written_through_a_mask, 1),
    "a write afterwards": (written_afterwards, 1),
    "a rank that depends on sizes": (
        chain(torch.squeeze, MIXED), "its rank depends on sizes, through a squeeze",
    ),
    "axes that are computed": (
        chain("x.permute(0, x.dim() - 1, 1)", "x.permute(0, 2, 1)"), "its axes are computed",
    ),
    "a shape that depends on data": (
        chain("x.masked_select(x > 0).reshape(-1, 1, 1)", MIXED),
        "'getattr_1' has no known shape",
    ),
}  # fmt: skip


@rows("function outcome", COMPOSED)
def test_what_is_composed_is_a_view_all_the_same(function: Any, outcome: Any) -> None:
    composed(function, outcome)


def test_a_rank_is_known_from_example_inputs_only() -> None:
    composed(MIXED, "the graph was captured without example inputs", None)


def test_a_squeeze_may_give_another_rank_later() -> None:
    function = chain(torch.squeeze, MIXED)

    fast = optimized_by(COMPOSE, model_of(function), CUBE)

    assert_equivalent(model_of(function), fast, (tensor(1, 2, 3, 4),), exact=True)


def test_a_rank_that_was_relied_on_is_required_of_later_calls() -> None:
    fast = composed(MIXED, [])

    assert torch.equal(fast(tensor(5, 6, 7)), tensor(5, 6, 7))
    with pytest.raises(optimizer.InputError, match="3 dimensions and got 4"):
        fast(tensor(2, 3, 4, 5))


def sunk(function: Callable[[Tensor], Any], outcome: Any, *inputs: Tensor, later: Any = ()) -> Any:
    """The function after both passes, of which `outcome` is what the one says that sinks."""
    model = model_of(function)
    fast = optimized_by(SINK, model, *inputs, only=[SINK, COMPOSE])
    fired = SINK in fast.report.counts()
    reasons = [each.reason for each in fast.report.refused if each.name == SINK]
    left = sum(called in LAYOUTS for called in callees(fast))
    assert (left if fired else reasons) == outcome
    for x in (*inputs, *later):
        assert_equivalent(model, fast, (x,), exact=True)
    return fast


OPERATIONS = {
    "relu": torch.relu,
    "tanh, a method": lambda y: y.tanh(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.5),
    "a number times it": lambda y: 0.5 * y,
    "a keyword": lambda y: torch.add(y, 1.0, alpha=2),
    "a quotient": lambda y: 1 / (y + 4.0),
    "a chain": lambda y: (-torch.relu(y) + 1.0).exp(),
    "both operands": lambda y: y * torch.sigmoid(y),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_pair_around_an_operation_vanishes_and_keeps_every_bit(
    operation: str, dtype: torch.dtype
) -> None:
    function = lambda x: OPERATIONS[operation](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # noqa: E731
    x, *others = (
        tensor(*shape).to(dtype) for shape in ((2, 3, 4, 5), (7, 17, 9, 3), (1, 2, 33, 1))
    )

    sunk(function, 0, x, later=[*others, *(each.mT.contiguous().mT for each in (x, *others))])


@pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh])
def test_a_layer_is_an_operation_unless_it_has_a_hook(kind: type[nn.Module]) -> None:
    model = Forward(lambda m, x: m.layer(x.mT).mT, layer=kind()).eval()

    fast = optimizer.optimize(model, CUBE, level=1)
    model.layer.register_forward_hook(lambda module, args, result: result.cumsum(-1))
    hooked = optimizer.optimize(model, CUBE, level=1)

    assert len([each for each in callees(fast) if each in LAYOUTS]) == 0
    assert len([each for each in callees(hooked) if each in LAYOUTS]) == 2
    assert_equivalent(model, hooked, (CUBE,), exact=True)


def two_inputs(x: Tensor) -> Tensor:
    return (x.mT + torch.relu(x * 2.0).mT).mT


def through_two(x: Tensor) -> Tensor:
    return torch.relu(torch.tanh(x.permute(1, 2, 0)).permute(1, 2, 0)).permute(1, 2, 0)


def three_cycles(x: Tensor) -> Tensor:
    return torch.tanh(x.permute(1, 2, 0)).permute(1, 2, 0)


def read_elsewhere(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.mT
    return torch.relu(y).mT, y.exp()


def written_result(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.relu(x.mT).mT
    y.mul_(2.0)
    return y, x


def written_before(x: Tensor) -> Tensor:
    y = x.clone()
    z = y.mT
    y.mul_(2.0)
    w = torch.tanh(z).mT
    y.add_(1.0)
    return w + y


COUNTS = {
    "two operands": (two_inputs, 0),
    "through two operations": (through_two, 0),
    "a pair that does not cancel": (three_cycles, 1),
    "an operand with another reader": (read_elsewhere, 1),
    "a result that is written": (written_result, 0),
    "a source that is written around it": (written_before, 0),
}
LEFT = {
    "no second transpose": lambda x: torch.relu(x.mT),
    "no first transpose": lambda x: torch.relu(x).mT,
    "an operand that is not transposed": lambda x: (x.mT + x.new_ones(4, 3)).mT,
    "an operation in place": lambda x: torch.relu_(x.exp().mT).mT,
    "something else that moves elements": lambda x: torch.relu(x.mT.flip(1)).mT,
    "a flip in the place of the first": lambda x: torch.relu(torch.flip(x, (1,))).flip(1),
    "a roll in the place of the last": lambda x: torch.relu(x.mT).roll(1, 1),
    "a running sum": lambda x: x.mT.cumsum(-1).mT,
    "a reduction": lambda x: x.mT.softmax(-1).mT,
    "a kernel that depends on the layout": lambda x: F.gelu(x.mT).mT,
    "axes that are computed": lambda x: torch.relu(x.permute(0, x.dim() - 1, 1)).mT,
    "outer axes that are computed": lambda x: torch.relu(x.mT).permute(0, x.dim() - 1, 1),
}


@rows("function outcome", COUNTS, alike([], LEFT))
def test_transposes_meet(function: Any, outcome: Any) -> None:
    sunk(function, outcome, CUBE, later=[tensor(5, 6, 7)] if isinstance(outcome, int) else [])


def read_between(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.relu(x.mT)
    return y.mT, y


def broadcast(x: Tensor) -> Tensor:
    return (x.transpose(0, 1) + x[0].transpose(0, 1)).transpose(0, 1)


REFUSALS = {
    "a reader of what lies between": (
        read_between, (2, 3, 4), "a value between the transposes is read elsewhere",
    ),
    "other axes": (
        lambda x: (x.permute(1, 2, 0) + x.permute(2, 0, 1)).permute(1, 0, 2), (3, 3, 3),
        "the operands are transposed differently",
    ),
    "other axes of the same function": (
        lambda x: (x.transpose(0, 1) + x.transpose(1, 2)).transpose(0, 1), (3, 3, 3),
        "the operands are transposed differently",
    ),
    "another function of the same axes": (
        lambda x: (x.transpose(0, -1) + x.movedim(0, -1)).transpose(0, 1), (3, 3, 3),
        "the operands are transposed differently",
    ),
    "fewer dimensions": (broadcast, (4, 4, 4), "the operands differ in shape"),
    "a row and a column": (
        lambda x: (x[:1].mT + x[:, :1].mT).mT, (1, 4), "the operands differ in shape",
    ),
    "a row that is repeated": (
        lambda x: torch.relu(x[:1, :, None].expand(2, 3, 5, 4).permute(2, 3, 0, 1)).mT, (2, 3, 4),
        "what is transposed may be repeated in memory",
    ),
    "a row that is repeated in other calls": (
        lambda x: torch.relu(torch.broadcast_to(x[:1], x.shape).mT).mT, (1, 4),
        "what is transposed may be repeated in memory",
    ),
}  # fmt: skip


@rows("function shape reason", REFUSALS)
def test_transposes_stay(function: Any, shape: tuple[int, ...], reason: str) -> None:
    sunk(function, [reason], tensor(*shape))


def test_refuses_an_input_of_another_memory_order() -> None:
    model, x = model_of(lambda x: torch.relu(x.permute(2, 3, 0, 1)).mT), tensor(1, 3, 1, 4)
    rows = x.expand(2, 3, 5, 4)

    fast = optimizer.optimize(model, rows, level=0)

    reasons = [r.reason for r in fast.report.refused if r.name == SINK]
    assert reasons == ["the result would be laid out differently in memory"]
    assert_equivalent(model, fast, (rows,), exact=True)


def test_nothing_is_known_to_be_pure_without_example_inputs() -> None:
    assert len(callees(sunk(lambda x: torch.relu(x.mT).mT, []))) == 3


def test_the_rank_of_two_operands_is_required_of_later_calls() -> None:
    fast = sunk(two_inputs, 0, CUBE)

    with pytest.raises(optimizer.InputError, match="3 dimensions and got 2"):
        fast(tensor(3, 4))


@pytest.mark.parametrize("count", [10, 100])
def test_a_chain_with_operations_between_needs_one_transpose(count: int) -> None:
    def function(x: Tensor) -> Tensor:
        for position in range(count):
            x = (-x if position % 2 else x + 0.5).permute(1, 2, 0)
        return x

    fast = sunk(function, 1, CUBE)

    assert fast.report.counts()[SINK] < count  # each moves once, not once for each before it
    assert fast(CUBE).stride() == function(CUBE).stride()


def test_a_view_that_is_written_later_is_one_of_what_was_sunk() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.permute(1, 2, 0).sigmoid().transpose(0, 1)
        z = y + y
        y.mul_(2.0)
        return (z + (y + y)).transpose(0, 1)

    given, x = Forward(forward).eval(), torch.randn(2, 3, 3, dtype=torch.float64)

    fast = optimizer.optimize(given, x, level=1)

    assert fast.report.counts()["sink_transposes"] == 2
    torch.testing.assert_close(fast(x), given(x), rtol=0, atol=0)
