"""Later calls: a candidate that is right in the example and wrong in one later call is found."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from optimizer import InputError
from optimizer.testing import (
    LATER_CALLS,
    Counterexample,
    Optimize,
    Spec,
    assert_equivalent,
    check_spec,
)
from optimizer.testing._later import later_calls

PLAIN = torch.contiguous_format
Function = Callable[..., torch.Tensor]


class Of(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def written_first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x + y


def read_first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    return x.add_(1) + y


def refuses(x: torch.Tensor) -> torch.Tensor:
    if x.shape != (3, 4):
        raise InputError("another shape")
    return x + 1


def asserts(x: torch.Tensor) -> torch.Tensor:
    torch._assert(bool(x.isfinite().all()), "finite")  # type: ignore[no-untyped-call]
    return x + 1


def remembers() -> Function:
    """A function that keeps what it gave first."""
    kept: list[torch.Tensor] = []

    def first(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return kept[0]

    return first


SPOILED: dict[str, tuple[Function, Function]] = {
    "more rows": (lambda x: x + len(x), lambda x: x + 3),
    "one row": (lambda x: x + len(x), lambda x: x + 3),
    "longer rows": (lambda x: x + x.shape[-1], lambda x: x + 4),
    "one channel": (lambda x: x + x.shape[1], lambda x: x + 4),
    "one column": (lambda x: x + x.shape[-1], lambda x: x + 4),
    "one more": (lambda x, *more: x + len(more), lambda x, *more: x + 0),
    "one row of the last": (lambda x, y: x + y, lambda x, y: x + y * (len(y) == len(x))),
    "one tensor for all": (written_first, read_first),
    "another layout": (lambda x: x + 1, lambda x: (x + 1).contiguous()),
    "other sizes": (lambda x: x + len(x), lambda x: x + 3),
    "no rows": (lambda x: x * 2, lambda x: x * 2 if len(x) else x.new_zeros(1)),
    "more channels": (lambda x: x + x.shape[1], lambda x: x + 4),
    "one rank less": (lambda x: x + x.dim(), lambda x: x + 2),
    "one rank more": (lambda x: x + x.dim(), lambda x: x + 2),
    "narrow": (lambda x: x * 2, lambda x: x.double() * 2),
    "another rank": (lambda x: x + x.dim(), lambda x: x + 2),
    "not finite": (lambda x: x * 2, lambda x: x * 2 + x * 0),
    "cast": (lambda x: x * 3, lambda x: x * torch.full((1,), 3, dtype=torch.float64)),
    "cast to half": (lambda x: x * 3, lambda x: x * torch.full((1,), 3, dtype=torch.float32)),
    "channels last": (lambda x: x + 1, lambda x: (x + 1).contiguous()),
    "strided": (lambda x: x + 1, lambda x: x + float(x.is_contiguous())),
    "none for the last": (
        lambda x: torch.zeros(1) if x is None else x + 1,
        lambda x: torch.ones(1) if x is None else x + 1,
    ),
    "gradient": (lambda x: x * 2, lambda x: x + x.detach()),
    "weights written": (lambda x: x * 3, lambda x: x * 3),
    "twice": (lambda x: x * 2, lambda x: x * 2),
}
INPUTS = (torch.arange(12, dtype=torch.float64).reshape(3, 4),)


def inputs_of(name: str) -> tuple[torch.Tensor, ...]:
    needs_two = name in ("one tensor for all", "one row of the last")
    if name == "channels last":
        return (INPUTS[0].repeat(2, 1).reshape(2, 3, 2, 2),)
    return (INPUTS[0], 2 * INPUTS[0]) if needs_two else INPUTS


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", LATER_CALLS)
def test_each_later_call_is_spoiled_and_seen(name: str, exact: bool) -> None:
    model, candidate = map(Of, SPOILED[name])
    if name == "weights written":
        model = nn.Linear(4, 2, dtype=torch.float64)
        candidate = nn.Sequential(model)  # it is no snapshot
    if name == "twice":
        candidate = Of(remembers())
    assert_equivalent(model, candidate, inputs_of(name))

    with pytest.raises(AssertionError):
        LATER_CALLS[name](model, candidate, inputs_of(name), exact=exact)
    LATER_CALLS[name](model, copy.deepcopy(model), inputs_of(name), exact=exact)


def test_weights_that_were_written_are_put_back() -> None:
    model = nn.Linear(4, 2, dtype=torch.float64)
    kept = model.weight.detach().clone()

    LATER_CALLS["weights written"](model, copy.deepcopy(model), INPUTS, exact=True)
    assert torch.equal(model.weight, kept)


def test_each_later_call_is_drawn() -> None:
    drawn = {call for seed in range(8) for call in later_calls(Spec((), seed=seed))}

    assert drawn == set(LATER_CALLS)


# What is wrong by more than rounding is seen where bits may differ, what is only rounded passes.
ROUNDED: dict[str, tuple[Function, Function, Function]] = {
    "not finite": (lambda x: x / 3, lambda x: x * (1 / 3), lambda x: x / 3 * (x < 9e9)),
    "cast": (
        lambda x: x.softmax(-1),
        lambda x: (x - x.amax(-1, keepdim=True)).softmax(-1),
        lambda x: x.softmax(-1) if x.dtype == torch.float64 else x.half().softmax(-1).to(x.dtype),
    ),
    "cast to half": (
        lambda x: x.softmax(-1),
        lambda x: (x - x.amax(-1, keepdim=True)).softmax(-1),
        lambda x: (
            x.softmax(-1) if x.dtype == torch.float64 else x.bfloat16().softmax(-1).to(x.dtype) * 2
        ),
    ),
    "gradient": (lambda x: x / 3, lambda x: x * (1 / 3), lambda x: x.detach() / 3 + 0 * x),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_where_bits_may_differ_rounding_alone_does(name: str) -> None:
    model, rounded, wrong = map(Of, ROUNDED[name])
    inputs = (INPUTS[0] / 7,)
    assert_equivalent(model, wrong, inputs)

    LATER_CALLS[name](model, rounded, inputs, exact=False)
    with pytest.raises(AssertionError):
        LATER_CALLS[name](model, wrong, inputs, exact=False)


def test_a_gradient_may_jump_where_rounding_moves_a_kink() -> None:
    def kinked(zero: float) -> Of:
        return Of(lambda x: torch.where(x * 3 > zero, x * 2, x))

    inputs = (torch.full((2,), 0.1, dtype=torch.float64),)  # 0.1 * 3 is 0.30000000000000004
    other = kinked(0.30000000000000004)
    LATER_CALLS["gradient"](kinked(0.3), other, inputs, exact=False)

    for model, exact in ((kinked(0.3), True), (kinked(0.2), False)):
        with pytest.raises(AssertionError, match="gradient differs"):
            LATER_CALLS["gradient"](model, other, inputs, exact=exact)


def test_a_gradient_may_be_what_rounding_leaves_of_larger_ones() -> None:
    """Of a softmax that saturates, and cancels to zero in one order of its sums only."""
    torch.manual_seed(0)
    x, values = (torch.randn(4, 4, dtype=torch.float64) * scale for scale in (5.0, 1e9))
    spelled = Of(lambda x: (x @ x.mT).softmax(-1) @ values)

    def fused(factor: float) -> Of:
        def attention(x: torch.Tensor) -> torch.Tensor:
            query, value = x[None, None], factor * values[None, None]
            return F.scaled_dot_product_attention(query, query, value, scale=1.0)[0, 0]

        return Of(attention)

    LATER_CALLS["gradient"](spelled, fused(1.0), (x,), exact=False)
    with pytest.raises(AssertionError, match="gradient differs"):
        LATER_CALLS["gradient"](spelled, fused(2.0), (x,), exact=False)


def test_the_layout_of_single_elements_on_the_way_is_as_torch_makes_it_up() -> None:
    def pooled(order: Function) -> Of:
        return Of(lambda x: F.adaptive_avg_pool2d(order(F.adaptive_avg_pool2d(x, 1)), 2))

    inputs = (torch.ones(2, 2, 3, 3, dtype=torch.float64),)
    model, anew = pooled(lambda x: x), pooled(lambda x: x.clone(memory_format=PLAIN))
    LATER_CALLS["channels last"](model, anew, inputs, exact=True)

    doubled = Of(lambda x: x * 2), Of(lambda x: x.contiguous() * 2)
    with pytest.raises(AssertionError, match="strides"):
        LATER_CALLS["channels last"](*doubled, inputs, exact=True)


def test_the_model_is_not_watched_while_it_answers() -> None:
    """Under a dispatch mode, max_pool1d lays its result out so that its sum rounds otherwise."""
    spec = Spec(("max_pool_F", "mask_put_torch"), (2, 3, 3), "random")
    candidate = check_spec(spec, Optimize(only=()), exact=True)

    LATER_CALLS["channels last"](spec.build(), candidate, spec.inputs(), exact=True)


def test_a_model_that_learns_nothing_has_gradients_of_zero() -> None:
    model = Of(lambda x: x.detach() * 2)

    LATER_CALLS["gradient"](model, model, INPUTS, exact=True)
    with pytest.raises(AssertionError, match="gradient differs"):
        LATER_CALLS["gradient"](model, Of(lambda x: x * 2), INPUTS, exact=True)


def test_masks_and_numbers_of_rows_are_not_cast() -> None:
    def chosen(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x[mask] * 3

    inputs = (INPUTS[0], INPUTS[0] < 2)
    for name in ("not finite", "cast", "cast to half", "gradient"):
        LATER_CALLS[name](Of(chosen), Of(chosen), inputs, exact=True)
        with pytest.raises(AssertionError):
            LATER_CALLS[name](Of(chosen), Of(lambda x, mask: x[mask] * 4), inputs, exact=True)


def test_what_the_model_rejects_is_not_compared() -> None:
    model = Of(lambda x: x.reshape(3, 4) + 1)

    LATER_CALLS["more rows"](model, Of(lambda x: x + 2), INPUTS, exact=True)


def test_what_torch_warns_of_is_not_compared() -> None:
    model = Of(lambda x: x.T + 1)

    for _ in range(2):  # torch itself says it once
        LATER_CALLS["another rank"](model, Of(lambda x: x.t() + 1), INPUTS, exact=True)


def test_a_candidate_may_refuse() -> None:
    LATER_CALLS["more rows"](Of(lambda x: x + 1), Of(refuses), INPUTS, exact=True)


def test_an_assertion_must_not_be_lost() -> None:
    with pytest.raises(AssertionError, match="no longer asserts: finite"):
        LATER_CALLS["not finite"](Of(asserts), Of(lambda x: x + 1), INPUTS, exact=True)
    LATER_CALLS["not finite"](Of(asserts), Of(asserts), INPUTS, exact=True)


def test_a_spec_chooses_a_later_call_and_the_report_repeats_it() -> None:
    def fixed(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
        expected = model(*inputs)
        return Of(lambda x: x + 1 if x.shape == expected.shape else x)

    spec = Spec(("shift",), (3, 3))
    assert check_spec(spec, fixed) is not None

    with pytest.raises(Counterexample) as caught:
        check_spec(spec, fixed, later=True)
    assert 'LATER_CALLS["more rows"](model, candidate, inputs, exact=False)' in str(caught.value)


def test_a_result_without_a_tensor_has_no_gradient_there() -> None:
    model = Of(lambda x: (2 * x, None))  # type: ignore[return-value, arg-type]

    LATER_CALLS["gradient"](model, model, INPUTS, exact=True)
    with pytest.raises(AssertionError, match="gradient differs"):
        LATER_CALLS["gradient"](model, Of(lambda x: x), INPUTS, exact=True)
