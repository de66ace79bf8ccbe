"""Runs of transposes and permutes become one or none, in every spelling and at every rank."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer.testing import assert_equivalent, untouched
from tests.single_pass import Forward, callees

NAME = "compose_transposes"


def model_of(function: Callable[[Tensor], Any]) -> nn.Module:
    return Forward(lambda _, x: function(x)).eval()


def optimized(function: Callable[[Tensor], Any], *inputs: Tensor) -> Any:
    """The optimized function, after a look at its answer; example inputs only where given."""
    model = model_of(function)
    with untouched(model):
        return optimizer.optimize(model, inputs or None, only=[NAME], check=None, level=1)


def tensor(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)


# Each swaps the axes 1 and 2 of three.
SWAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(1, 2),
    "transpose of the axes the other way round": lambda x: x.transpose(2, 1),
    "transpose of negative axes": lambda x: x.transpose(-1, -2),
    "transpose of a mixed pair": lambda x: x.transpose(1, -1),
    "transpose with keywords": lambda x: x.transpose(dim1=1, dim0=2),
    "torch.transpose": lambda x: torch.transpose(x, 1, 2),
    "torch.transpose with keywords": lambda x: torch.transpose(input=x, dim0=1, dim1=2),
    "swapaxes": lambda x: x.swapaxes(1, 2),
    "swapaxes with keywords": lambda x: x.swapaxes(axis0=1, axis1=-1),
    "swapdims": lambda x: x.swapdims(1, 2),
    "torch.swapaxes": lambda x: torch.swapaxes(x, 1, 2),
    "torch.swapdims": lambda x: torch.swapdims(x, 1, 2),
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(0, 2, 1),
    "permute of a tuple": lambda x: x.permute((0, 2, 1)),
    "permute of a list": lambda x: x.permute([0, 2, 1]),
    "permute of negative axes": lambda x: x.permute(0, -1, -2),
    "permute with a keyword": lambda x: x.permute(dims=(0, 2, 1)),
    "torch.permute": lambda x: torch.permute(x, (0, 2, 1)),
    "torch.permute with keywords": lambda x: torch.permute(input=x, dims=(0, 2, 1)),
    "movedim": lambda x: x.movedim(1, 2),
    "movedim of a negative axis": lambda x: x.movedim(-1, 1),
    "movedim of several axes": lambda x: x.movedim((1, 2), (2, 1)),
    "movedim with keywords": lambda x: x.movedim(source=1, destination=2),
    "moveaxis": lambda x: x.moveaxis(1, 2),
    "torch.movedim": lambda x: torch.movedim(x, 1, 2),
    "torch.moveaxis": lambda x: torch.moveaxis(x, (2, 1), (1, 2)),
}


@pytest.mark.parametrize("inner", ["transpose", "permute of negative axes", "movedim", "mT"])
@pytest.mark.parametrize("outer", SWAPS)
def test_two_swaps_vanish_in_every_spelling(outer: str, inner: str) -> None:
    function = lambda x: SWAPS[outer](SWAPS[inner](x)).exp()  # noqa: E731

    fast = optimized(function, tensor(2, 3, 4))

    assert callees(fast) == ["exp"]
    assert_equivalent(model_of(function), fast, (tensor(2, 3, 4),), exact=True)


@pytest.mark.parametrize("spelling", SWAPS)
def test_a_single_swap_is_left_as_it_is(spelling: str) -> None:
    fast = optimized(SWAPS[spelling], tensor(2, 3, 4))

    assert len(callees(fast)) == 1
    assert fast.report.fired == ()
    assert_equivalent(model_of(SWAPS[spelling]), fast, (tensor(2, 3, 4),), exact=True)


@pytest.mark.parametrize("outer", list(permutations(range(3))))
@pytest.mark.parametrize("inner", list(permutations(range(3))))
def test_two_permutes_compose(inner: tuple[int, ...], outer: tuple[int, ...]) -> None:
    function = lambda x: x.permute(inner).permute(outer)  # noqa: E731
    x = tensor(2, 3, 4)

    fast = optimized(function, x)

    identity = function(x).shape == x.shape
    assert callees(fast) == ([] if identity else [torch.permute])
    assert fast(x).stride() == function(x).stride()
    assert_equivalent(model_of(function), fast, (x,), exact=True)


def chain(*steps: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return function


def cycle(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0)


MANY: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], list[Any]]] = {
    "three-cycle, three times": (chain(cycle, cycle, cycle), (2, 3, 4), []),
    "three-cycle, twice": (chain(cycle, cycle), (2, 3, 4), [torch.permute]),
    "three-cycle there and back": (
        chain(cycle, lambda x: x.permute(2, 0, 1)), (2, 3, 4), [],
    ),
    "three-cycle of negative axes": (
        chain(*[lambda x: x.permute(-2, -1, -3)] * 3), (2, 3, 4), [],
    ),
    "twenty-one steps": (chain(*[cycle, *SWAPS.values()][:21]), (2, 3, 4), [torch.permute]),
    "five axes": (
        chain(lambda x: x.permute(0, 2, 3, 4, 1), lambda x: x.movedim(-1, 1)), (2, 3, 1, 2, 4), [],
    ),
    "movedim of several axes": (
        chain(lambda x: x.movedim((0, -1), (-1, 1)), lambda x: x.movedim((3, 1), (0, 3))),
        (2, 3, 4, 5),
        [],
    ),
    "matrix: t and T": (chain(lambda x: x.t(), lambda x: x.T), (3, 4), []),
    "matrix: torch.t and transpose": (
        chain(torch.t, lambda x: x.transpose(-2, -1)), (3, 4), [],
    ),
    "vector: t": (chain(torch.t, torch.t), (3,), []),
    "an axis and itself": (chain(lambda x: x.transpose(1, 1)), (2, 3, 4), []),
    "a permute that moves nothing": (chain(lambda x: x.permute(0, -2, 2)), (2, 3, 4), []),
}  # fmt: skip


@pytest.mark.parametrize("case", MANY)
def test_a_run_becomes_one_or_none(case: str) -> None:
    function, shape, expected = MANY[case]
    x = tensor(*shape)

    fast = optimized(function, x)

    assert callees(fast) == expected
    assert fast(x).stride() == function(x).stride()
    assert_equivalent(model_of(function), fast, (x,), exact=True)


def test_the_notebooks_own_example_vanishes_without_example_inputs() -> None:
    fast = optimized(lambda x: x.transpose(1, 2).transpose(1, 2))

    assert callees(fast) == []
    assert_equivalent(model_of(lambda x: x), fast, (tensor(2, 3, 4),), exact=True)


def test_equal_transposes_cancel_at_any_rank() -> None:
    fast = optimized(lambda x: x.transpose(0, -1).transpose(-1, 0), tensor(2, 3))

    assert callees(fast) == []
    assert_equivalent(model_of(lambda x: x), fast, (tensor(2, 3, 4),), exact=True)


def test_a_second_reader_keeps_the_inner_transpose() -> None:
    function = lambda x: (y := x.transpose(1, 2), y.transpose(1, 2))  # noqa: E731

    fast = optimized(function, tensor(2, 3, 4))

    assert callees(fast) == [torch.transpose]
    assert_equivalent(model_of(function), fast, (tensor(2, 3, 4),), exact=True)


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


@pytest.mark.parametrize("function", [written_between, written_through_a_mask, written_afterwards])
def test_whoever_writes_one_view_is_seen_through_the_others(
    function: Callable[[Tensor], Tensor],
) -> None:
    fast = optimized(function, tensor(2, 3, 4))

    assert fast.report.counts() == {NAME: 1}
    assert_equivalent(model_of(function), fast, (tensor(2, 3, 4),), exact=True)


def test_a_rank_that_was_relied_on_is_required_of_later_calls() -> None:
    fast = optimized(lambda x: x.transpose(1, 2).mT, tensor(2, 3, 4))

    assert torch.equal(fast(tensor(5, 6, 7)), tensor(5, 6, 7))
    with pytest.raises(optimizer.InputError, match="3 dimensions and got 4"):
        fast(tensor(2, 3, 4, 5))


@pytest.mark.parametrize("function", [SWAPS["permute"], SWAPS["torch.permute"]])
def test_a_permute_states_its_rank(function: Callable[[Tensor], Tensor]) -> None:
    fast = optimized(chain(function, SWAPS["transpose"]))

    assert callees(fast) == []
    assert_equivalent(model_of(lambda x: x), fast, (tensor(2, 3, 4),), exact=True)


MIXED = chain(SWAPS["transpose"], SWAPS["mT"])
REFUSALS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...] | None, str]] = {
    "no example inputs": (MIXED, None, "the graph was captured without example inputs"),
    "a rank that depends on sizes": (
        chain(torch.squeeze, MIXED),
        (2, 3, 4),
        "its rank depends on sizes, through a squeeze",
    ),
    "axes that are computed": (
        chain(lambda x: x.permute(0, x.dim() - 1, 1), SWAPS["permute"]),
        (2, 3, 4),
        "its axes are computed",
    ),
    "a shape that depends on data": (
        chain(lambda x: x.masked_select(x > 3).reshape(-1, 1, 1), MIXED),
        (2, 3, 4),
        "'getattr_1' has no known shape",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    function, shape, reason = REFUSALS[case]

    fast = optimized(function, *([tensor(*shape)] if shape else []))

    assert [refusal.reason.split(":")[0] for refusal in fast.report.refused] == [reason]
    assert fast.report.fired == ()
    assert_equivalent(model_of(function), fast, (tensor(2, 3, 4),), exact=True)


def test_a_squeeze_may_give_another_rank_later() -> None:
    function = chain(torch.squeeze, MIXED)

    fast = optimized(function, tensor(2, 3, 4))

    assert_equivalent(model_of(function), fast, (tensor(1, 2, 3, 4),), exact=True)
