"""The fuzz kit's oracle: each thing that a caller can observe, spoiled in one candidate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from optimizer.testing import (
    Optimize,
    Spec,
    assert_equivalent,
    check_spec,
    randomize,
    untouched,
)
from optimizer.testing._rounding import Jitter
from optimizer.verify.equivalence import relative_error

Function = Callable[[torch.Tensor], object]


class Of(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


# What is spoiled: the model, the candidate, what the message must say.
SPOILED: dict[str, tuple[Function, Function, str]] = {
    "a value": (lambda x: x * 2, lambda x: x * 2.0000001, "output 0: values differ"),
    "an imaginary part": (
        lambda x: torch.complex(x / 3, x / 3),
        lambda x: torch.complex(x / 3, x / 2),
        "output 0: values differ",
    ),
    "one of several values": (
        lambda x: (x + 1, {"a": x + 2}),
        lambda x: (x + 1, {"a": x + 3}),
        "output 1: values differ",
    ),
    "the structure": (lambda x: (x.clone(),), lambda x: x.clone(), "structure"),
    "a key": (lambda x: {"a": x + 1}, lambda x: {"b": x + 1}, "structure"),
    "a number": (lambda x: (x + 0, 3), lambda x: (x + 0, 4), "expected 3, got 4"),
    "a tensor for a number": (lambda x: 3, lambda x: torch.tensor(3), "expected 3"),
    "the shape": (lambda x: x + 0, lambda x: x[None] + 0, "expected shape"),
    "the dtype": (lambda x: x + 0, lambda x: x.float(), "expected dtype"),
    "the strides": (lambda x: x + 0, lambda x: (x.t() + 0).contiguous().t(), "expected strides"),
    "a write to an input": (
        lambda x: x.mul_(2) + 0,
        lambda x: x * 2,
        "input 0 after the call",
    ),
    "an alias of an input": (lambda x: x.t(), lambda x: x.t().clone(), "memory shared"),
    "two outputs, now one": (lambda x: (x + 1, x + 1), lambda x: (x + 1,) * 2, "memory shared"),
    "the random state": (lambda x: x + 0, lambda x: (torch.rand(1), x + 0)[1], "random state"),
    "a NaN out of nothing": (lambda x: x / 3, lambda x: x / 3 + float("nan"), "values differ"),
    "a lost infinity": (lambda x: x / 0.0, lambda x: (x / 0.0).clamp(max=9), "values differ"),
    "a last bit where nothing rounds": (lambda x: x * 3, lambda x: x * (3 + 1e-15), "same values"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_candidate_is_seen(name: str) -> None:
    model, candidate, message = SPOILED[name]
    inputs = (torch.arange(-3.0, 3.0, dtype=torch.float64).reshape(2, 3),)
    assert_equivalent(Of(model), Of(model), inputs, exact=True)

    with pytest.raises(AssertionError, match=message):
        assert_equivalent(Of(model), Of(candidate), inputs)


def test_a_lost_update_of_a_statistic_is_seen() -> None:
    model = randomize(nn.BatchNorm1d(3, dtype=torch.float64))
    candidate = copy.deepcopy(model)
    candidate.momentum = 0.0
    inputs = (torch.rand(2, 3, dtype=torch.float64),)
    assert_equivalent(model, copy.deepcopy(model), inputs)

    with pytest.raises(AssertionError, match="buffer running_mean after the call"):
        assert_equivalent(model, candidate, inputs)


def test_a_statistic_that_is_lost_with_its_update_is_seen() -> None:
    model = randomize(nn.BatchNorm1d(3, dtype=torch.float64))
    inputs = (torch.rand(2, 3, dtype=torch.float64),)
    expected = copy.deepcopy(model)(*inputs).detach()

    with pytest.raises(AssertionError, match="buffer running_mean is not written"):
        assert_equivalent(model, Of(lambda x: expected.clone()), inputs)
    assert_equivalent(model.eval(), Of(copy.deepcopy(model).eval()), inputs)


def test_a_buffer_is_found_by_its_whole_name() -> None:
    def counts() -> nn.Module:
        deep, flat, model = nn.BatchNorm1d(3), nn.BatchNorm1d(3), Of(lambda x: x)
        flat.running_mean.fill_(2.0)  # type: ignore[union-attr]
        model.add_module("outer", nn.ModuleDict({"norm": deep}))
        model.add_module("norm", flat)
        return model

    assert_equivalent(counts(), counts(), (torch.ones(2, 3, dtype=torch.float64),))


def test_a_lost_hook_is_seen() -> None:
    model = randomize(nn.Linear(3, 3, dtype=torch.float64))
    candidate = copy.deepcopy(model)
    model.register_forward_hook(lambda module, arguments, output: output * 2)

    with pytest.raises(AssertionError, match="output 0: values differ"):
        assert_equivalent(model, candidate, (torch.rand(2, 3, dtype=torch.float64),))


def test_exact_sees_the_sign_of_zero() -> None:
    inputs = (torch.zeros(2, dtype=torch.float64),)
    positive, negative = Of(lambda x: x + 0), Of(lambda x: -x)
    assert_equivalent(positive, negative, inputs)

    with pytest.raises(AssertionError, match="same bits"):
        assert_equivalent(positive, negative, inputs, exact=True)


def test_a_model_that_rounds_allows_rounding() -> None:
    inputs = (torch.full((3,), 0.1, dtype=torch.float64),)
    model, candidate = Of(lambda x: x * 3), Of(lambda x: x * (3 + 1e-15))
    assert_equivalent(model, candidate, inputs)

    with pytest.raises(AssertionError, match="same bits"):
        assert_equivalent(model, candidate, inputs, exact=True)


def test_a_model_that_jumps_allows_what_rounding_makes_of_it() -> None:
    def above(threshold: float, step: float = 1.0) -> Of:
        return Of(lambda x: torch.where(x * 3 > threshold, step, 0.0) + x)

    inputs = (torch.full((3,), 0.1, dtype=torch.float64),)  # 0.1 * 3 is 0.30000000000000004
    assert_equivalent(above(0.3), above(0.30000000000000004), inputs)

    with pytest.raises(AssertionError, match="values differ"):
        assert_equivalent(above(0.3), above(0.3, step=4.0), inputs)
    mixed = (torch.tensor([0.1, torch.inf], dtype=torch.float64),)
    with pytest.raises(AssertionError, match="values differ"):
        assert_equivalent(above(0.3), Of(lambda x: x.clamp(max=9)), mixed)
    with pytest.raises(AssertionError, match="values differ"):
        assert_equivalent(above(0.2), above(0.4), inputs)


def test_a_model_that_seldom_jumps() -> None:
    # What is compared with 0 is exactly 0, or 2e-16 where hardswish is one operation.
    spec = Spec(("mean_keep", "hardswish_expanded", "mask_row"), shape=(2, 3, 3), seed=3)

    assert "recognize_activations" in check_spec(spec, Optimize()).report.counts()


def test_inputs_may_hide_that_a_model_rounds() -> None:
    def sixth(factor: float) -> Of:
        return Of(lambda x: torch.where(x > 0, x / 3, x) * factor)

    hidden, shown = (torch.tensor([each], dtype=torch.float64) for each in (-1.0, 1.0))
    for inputs in ((hidden,), (shown,)):
        assert_equivalent(sixth(1), sixth(1 + 1e-15), inputs)
        with pytest.raises(AssertionError, match="values differ"):
            assert_equivalent(sixth(1), sixth(1 + 1e-8), inputs)


def test_what_saturates_hides_that_a_model_rounds() -> None:
    def gate(factor: float) -> Of:
        return Of(lambda x: F.hardsigmoid(x @ x.mT) * factor)

    inputs = (torch.tensor([[4.0]]),)
    assert_equivalent(gate(1), gate(1 - 2**-24), inputs)
    with pytest.raises(AssertionError, match="values differ"):
        assert_equivalent(gate(1), gate(1 - 2**-20), inputs)


def test_what_cancels_to_nothing_has_no_relative_error() -> None:
    inputs = (torch.full((3,), 0.1, dtype=torch.float64),)

    assert_equivalent(Of(lambda x: x - 0.1), Of(lambda x: x - 0.1 + 1e-17), inputs)


def test_infinities_of_another_sign_are_far_apart() -> None:
    above, below = torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf])

    assert relative_error(above, below) == relative_error(below, above) == math.inf
    assert relative_error(above, above * 1) == 0


def test_the_statistics_are_put_back() -> None:
    model = randomize(nn.BatchNorm1d(3, dtype=torch.float64))
    before = copy.deepcopy(model.state_dict())
    assert_equivalent(model, model, (torch.rand(2, 3, dtype=torch.float64),))

    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


SPOILERS: dict[str, Callable[[nn.Linear], object]] = {
    "a weight": lambda m: m.weight.data.add_(1),
    "a mode": lambda m: m.train(),
    "a hook": lambda m: m.register_forward_hook(lambda *_: None),
    "a parameter object": lambda m: setattr(m, "weight", nn.Parameter(m.weight.detach())),
    "a parameter's memory": lambda m: setattr(m.weight, "data", m.weight.detach().clone()),
    "requires_grad": lambda m: m.requires_grad_(False),
    "the random state": lambda _: torch.rand(1),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_a_touched_model_is_noticed(name: str) -> None:
    model = nn.Linear(2, 2).eval()

    with pytest.raises(AssertionError, match=r"changed|overwritten"), untouched(model):
        SPOILERS[name](model)


def test_what_a_layer_keeps_in_python_is_put_back_and_compared() -> None:
    spec = Spec(("kept_list",))
    model = spec.build()

    assert_equivalent(model, copy.deepcopy(model), spec.inputs(), exact=True)
    with pytest.raises(AssertionError, match="keeps in Python"), untouched(model):
        model(*spec.inputs())


def test_a_model_that_names_its_dtype_is_judged_without_another_precision() -> None:
    """Cast to half, it raised in the oracle itself, whatever the candidate was."""

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3).half()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear((x > 0).half())

    model, x = Single(), torch.randn(2, 3).half()

    assert_equivalent(model, copy.deepcopy(model), (x,), exact=False)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.linear.bias += 1
    with pytest.raises(AssertionError, match="values differ"):
        assert_equivalent(model, other, (x,), exact=False)


class Cancelling(nn.Module):
    """What two equal branches leave of one another: nothing, in the model's own order."""

    def __init__(self, *, pooled_first: bool, shows: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.shows = shows  # an output that rounds, and one that needs a gradient
        self.conv, self.pool = nn.Conv1d(3, 3, 1, bias=False), nn.AvgPool1d(2, padding=1)
        self.pooled_first, self.scale = pooled_first, scale

    def forward(self, x: torch.Tensor) -> object:
        branch = self.conv(self.pool(x)) if self.pooled_first else self.pool(self.conv(x))
        left = branch * self.scale - self.pool(self.conv(x))
        return (left, self.conv.weight, self.conv(x)) if self.shows else left


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_what_cancels_in_the_models_order_need_not_in_another(
    dtype: torch.dtype, scale: float, shows: bool
) -> None:
    model = Cancelling(pooled_first=False, shows=shows).to(dtype)
    other = Cancelling(pooled_first=True, shows=shows, scale=scale).to(dtype)
    other.load_state_dict(randomize(model).state_dict())
    x = 1000 * torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)

    with pytest.raises(AssertionError) if scale != 1 else nullcontext():
        assert_equivalent(model, other, (x,))


def test_a_jitter_leaves_indices_and_whole_numbers() -> None:
    x = torch.tensor([1.5, 2.5])
    with Jitter(0):
        moved, whole, places = x * 3, x.floor(), torch.arange(3.0)

    assert not torch.equal(moved, torch.tensor([4.5, 7.5]))
    assert torch.equal(whole, torch.tensor([1.0, 2.0]))
    assert torch.equal(places, torch.tensor([0.0, 1.0, 2.0]))
