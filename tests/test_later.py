"""Later calls: a candidate that is right in the example and wrong in one later call is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

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
from tests.level_2 import Running as Of
from tests.single_pass import rows

PLAIN = torch.contiguous_format
Function = Callable[..., Any]


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
    return lambda x: (kept.append(x * 2), kept[0])[1]


X = torch.arange(12, dtype=torch.float64).reshape(3, 4)
SPOILED: dict[str, tuple[Function, Function]] = {
    "more rows": (lambda x: x + len(x), lambda x: x + 3),
    "one row": (lambda x: x + len(x), lambda x: x + 3),
    "longer rows": (lambda x: x + x.shape[-1], lambda x: x + 4),
    "one channel": (lambda x: x + x.shape[1], lambda x: x + 4),
    "one column": (lambda x: x + x.shape[-1], lambda x: x + 4),
    "one more": (lambda x, *more: x + len(more), lambda x, *more: x + 0),
    "one row of the last": (lambda x, y: x + y, lambda x, y: x + y * (len(y) == len(x))),
    "one tensor for all": (
        lambda x, y: (x.add_(1), x + y)[1], lambda x, y: (y := y.clone(), x.add_(1) + y)[1],
    ),
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
    "none for the last": (lambda x: X if x is None else x, lambda x: -X if x is None else x),
    "gradient": (lambda x: x * 2, lambda x: x + x.detach()),
    "weights written": (lambda x: x * 3, lambda x: x * 3),
    "twice": (lambda x: x * 2, lambda x: x * 2),
}  # fmt: skip
PAIR = (X, 2 * X)
INPUTS_OF = {
    "channels last": (X.repeat(2, 1).reshape(2, 3, 2, 2),),
    "one tensor for all": PAIR,
    "one row of the last": PAIR,
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", LATER_CALLS)
def test_each_later_call_is_spoiled_and_seen(name: str, exact: bool) -> None:
    model, candidate = map(Of, SPOILED[name])
    inputs = INPUTS_OF.get(name, (X,))
    if name == "weights written":
        model = nn.Linear(4, 2, dtype=torch.float64)
        candidate = nn.Sequential(model)  # it is no snapshot
    if name == "twice":
        candidate = Of(remembers())
    kept = [each.detach().clone() for each in model.parameters()]
    assert_equivalent(model, candidate, inputs)

    with pytest.raises(AssertionError):
        LATER_CALLS[name](model, candidate, inputs, exact=exact)
    LATER_CALLS[name](model, copy.deepcopy(model), inputs, exact=exact)
    assert all(map(torch.equal, model.parameters(), kept))  # what was written is put back


def test_each_later_call_is_drawn() -> None:
    drawn = {call for seed in range(8) for call in later_calls(Spec((), seed=seed))}

    assert drawn == set(LATER_CALLS)


def kinked(zero: float) -> Function:
    return lambda x: torch.where(x * 3 > zero, x * 2, x)


def pooled(order: Function) -> Function:
    return lambda x: F.adaptive_avg_pool2d(order(F.adaptive_avg_pool2d(x, 1)), 2)


def spelled(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.mT).softmax(-1) @ VALUES


def attention(factor: float) -> Function:
    fused, value = F.scaled_dot_product_attention, factor * VALUES[None, None]
    return lambda x: fused(x[None, None], x[None, None], value, scale=1.0)[0, 0]


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def shifted(x: torch.Tensor) -> torch.Tensor:
    return (x - x.amax(-1, keepdim=True)).softmax(-1)


def narrow(dtype: torch.dtype, factor: int) -> Function:
    """Softmax, of what is not double by way of another dtype."""
    wrong = lambda x: x.to(dtype).softmax(-1).to(x.dtype) * factor  # noqa: E731
    return lambda x: softmax(x) if x.dtype == torch.float64 else wrong(x)


def chosen(factor: int) -> Function:
    return lambda x, mask: x[mask] * factor


def by(factor: int) -> Function:
    return lambda x: x * factor


def third(x: torch.Tensor) -> torch.Tensor:
    return x / 3


torch.manual_seed(0)
SATURATED, VALUES = (torch.randn(4, 4, dtype=torch.float64) * scale for scale in (5.0, 1e9))
SEVENTH, TENTH, MASKED = X / 7, torch.full((2,), 0.1, dtype=torch.float64), (X, X < 2)
ONES = torch.ones(2, 2, 3, 3, dtype=torch.float64)
ABOVE = 0.30000000000000004  # 0.1 * 3
GRADIENT, LOST = "gradient differs", "no longer asserts: finite"
# A later call, its inputs, if to the bit, the model, what is right, what is wrong, and why.
JUDGED: dict[str, tuple[Any, ...]] = {
    # What is wrong by more than rounding is seen where bits may differ; they agree at first.
    "rounded": ("not finite", SEVENTH, False, third, by(1 / 3), lambda x: x / 3 * (x < 9e9), None),
    "rounded, cast": ("cast", SEVENTH, False, softmax, shifted, narrow(torch.half, 1), None),
    "to half": ("cast to half", SEVENTH, False, softmax, shifted, narrow(torch.bfloat16, 2), None),
    "rounded gradient": (
        "gradient", SEVENTH, False, third, by(1 / 3), lambda x: x.detach() / 3 + 0 * x, None,
    ),
    # It may jump where rounding moves a kink.
    "a kink": ("gradient", TENTH, False, kinked(0.3), kinked(ABOVE), None, None),
    "exact kink": ("gradient", TENTH, True, kinked(0.3), None, kinked(ABOVE), GRADIENT),
    "kink elsewhere": ("gradient", TENTH, False, kinked(0.2), None, kinked(ABOVE), GRADIENT),
    # Of a softmax that saturates, and cancels to zero in one order of its sums only.
    "left of larger": (
        "gradient", SATURATED, False, spelled, attention(1.0), attention(2.0), GRADIENT,
    ),
    "none": ("gradient", X, True, lambda x: x.detach() * 2, None, by(2), GRADIENT),
    "no tensor": ("gradient", X, True, lambda x: (2 * x, None), None, lambda x: x, GRADIENT),
    # The layout of single elements on the way is as torch makes it up.
    "single elements": (
        "channels last", ONES, True, pooled(lambda x: x),
        pooled(lambda x: x.clone(memory_format=PLAIN)), None, None,
    ),
    "layout": ("channels last", ONES, True, by(2), None, lambda x: x.contiguous() * 2, "strides"),
    # Masks and numbers of rows are not cast.
    "mask": ("not finite", MASKED, True, chosen(3), None, chosen(4), None),
    "mask, cast": ("cast", MASKED, True, chosen(3), None, chosen(4), None),
    "mask, to half": ("cast to half", MASKED, True, chosen(3), None, chosen(4), None),
    "mask, gradient": ("gradient", MASKED, True, chosen(3), None, chosen(4), None),
    "the model rejects": (
        "more rows", X, True, lambda x: x.reshape(3, 4) + 1, lambda x: x + 2, None, None,
    ),
    "the candidate refuses": ("more rows", X, True, lambda x: x + 1, refuses, None, None),
    "an assertion is lost": ("not finite", X, True, asserts, None, lambda x: x + 1, LOST),
}  # fmt: skip


@rows("call given exact function right wrong words", JUDGED)
def test_a_later_call_accepts_what_is_right_and_not_what_is_wrong(
    call: str, given: Any, exact: bool, function: Any, right: Any, wrong: Any, words: str | None
) -> None:
    model, inputs = Of(function), given if isinstance(given, tuple) else (given,)

    LATER_CALLS[call](model, Of(right or function), inputs, exact=exact)
    if given is SEVENTH:
        assert_equivalent(model, Of(wrong), inputs)
    if wrong is not None:
        with pytest.raises(AssertionError, match=words):
            LATER_CALLS[call](model, Of(wrong), inputs, exact=exact)


def test_the_model_is_not_watched_while_it_answers() -> None:
    """Under a dispatch mode, max_pool1d lays its result out so that its sum rounds otherwise."""
    spec = Spec(("max_pool_F", "mask_put_torch"), (2, 3, 3), "random")
    candidate = check_spec(spec, Optimize(only=()), exact=True)

    LATER_CALLS["channels last"](spec.build(), candidate, spec.inputs(), exact=True)


def test_what_torch_warns_of_is_not_compared() -> None:
    for _ in range(2):  # torch itself says it once
        model, other = Of(lambda x: x.T + 1), Of(lambda x: x.t() + 1)
        LATER_CALLS["another rank"](model, other, (X,), exact=True)


def test_a_spec_chooses_a_later_call_and_the_report_repeats_it() -> None:
    def fixed(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
        expected = model(*inputs)
        return Of(lambda x: x + 1 if x.shape == expected.shape else x)

    spec = Spec(("shift",), (3, 3))
    assert check_spec(spec, fixed) is not None

    with pytest.raises(Counterexample) as caught:
        check_spec(spec, fixed, later=True)
    assert 'LATER_CALLS["more rows"](model, candidate, inputs, exact=False)' in str(caught.value)
