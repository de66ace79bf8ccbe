"""Later calls: a candidate that is right in the example and wrong in one later call is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from optimizer import InputError
from optimizer.testing import LATER_CALLS, Counterexample, Spec, assert_equivalent, check_spec

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


SPOILED: dict[str, tuple[Function, Function]] = {
    "more rows": (lambda x: x + len(x), lambda x: x + 3),
    "one row": (lambda x: x + len(x), lambda x: x + 3),
    "longer rows": (lambda x: x + x.shape[-1], lambda x: x + 4),
    "one row of the last": (lambda x, y: x + y, lambda x, y: x + y * (len(y) == len(x))),
    "one tensor for all": (written_first, read_first),
    "another layout": (lambda x: x + 1, lambda x: (x + 1).contiguous()),
    "another rank": (lambda x: x + x.dim(), lambda x: x + 2),
    "not finite": (lambda x: x * 2, lambda x: x * 2 + x * 0),
    "cast": (lambda x: x * 3, lambda x: x * torch.full((1,), 3, dtype=torch.float64)),
    "gradient": (lambda x: x * 2, lambda x: x + x.detach()),
}
INPUTS = (torch.arange(12, dtype=torch.float64).reshape(3, 4),)


def inputs_of(name: str) -> tuple[torch.Tensor, ...]:
    needs_two = name in ("one tensor for all", "one row of the last")
    return (INPUTS[0], 2 * INPUTS[0]) if needs_two else INPUTS


@pytest.mark.parametrize("name", LATER_CALLS)
def test_each_later_call_is_spoiled_and_seen(name: str) -> None:
    model, candidate = map(Of, SPOILED[name])
    assert_equivalent(model, candidate, inputs_of(name))

    with pytest.raises(AssertionError):
        LATER_CALLS[name](model, candidate, inputs_of(name), exact=True)
    LATER_CALLS[name](model, model, inputs_of(name), exact=True)


@pytest.mark.parametrize("name", ["not finite", "cast", "gradient"])
def test_where_a_rewrite_rounds_there_is_nothing_to_compare(name: str) -> None:
    LATER_CALLS[name](*map(Of, SPOILED[name]), INPUTS, exact=False)


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

    LATER_CALLS["gradient"](model, model, (torch.ones(2, 3),), exact=True)
    with pytest.raises(AssertionError, match="gradient differs"):
        LATER_CALLS["gradient"](model, Of(lambda x: x), (torch.ones(2, 3),), exact=True)
