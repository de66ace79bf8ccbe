"""The fuzz kit's oracle: each thing that a caller can observe, now or later, spoiled once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optimizer.testing import (
    LATER_CALLS,
    Counterexample,
    Spec,
    assert_equivalent,
    check_spec,
    randomize,
    untouched,
)
from tests.level_2 import Running as Of
from tests.single_pass import Forward, rows

Function = Callable[..., Any]
X = torch.arange(12, dtype=torch.float64).reshape(3, 4)
Y = torch.arange(-3.0, 3.0, dtype=torch.float64).reshape(2, 3)
DIFFER = "output 0: values differ"


@rows(
    "model candidate message",
    {
        "a value": ("x * 2", "x * 2.0000001", DIFFER),
        "one of several values": (
            "(x + 1, {'a': x + 2})", "(x + 1, {'a': x + 3})", "output 1: values differ"),
        "the structure": ("(x.clone(),)", "x.clone()", "structure"),
        "a number": ("(x + 0, 3)", "(x + 0, 4)", "expected 3, got 4"),
        "a tensor for a number": ("3", "torch.tensor(3)", "expected 3"),
        "the shape": ("x + 0", "x[None] + 0", "expected shape"),
        "the dtype": ("x + 0", "x.float()", "expected dtype"),
        "the strides": ("x + 0", "(x.t() + 0).contiguous().t()", "expected strides"),
        "a write to an input": ("x.mul_(2) + 0", "x * 2", "input 0 after the call"),
        "an alias of an input": ("x.t()", "x.t().clone()", "memory shared"),
        "two outputs, now one": ("(x + 1, x + 1)", "(x + 1,) * 2", "memory shared"),
        "the random state": ("x + 0", "(torch.rand(1), x + 0)[1]", "random state"),
        "a NaN out of nothing": ("x / 3", "x / 3 + math.nan", DIFFER),
        "a lost infinity": ("x / 0.0", "(x / 0.0).clamp(max=9)", DIFFER),
        "its sign": ("x / 0.0", "x / -0.0", DIFFER),
        "a last bit where nothing rounds": ("x * 3", "x * (3 + 1e-15)", "same values")},
)  # fmt: skip
def test_a_spoiled_candidate_is_seen(model: str, candidate: str, message: str) -> None:
    assert_equivalent(Forward(model), Forward(model), (Y,), exact=True)

    with pytest.raises(AssertionError, match=message):
        assert_equivalent(Forward(model), Forward(candidate), (Y,))


def jump(threshold: float, step: float = 1.0) -> str:
    return f"torch.where(x * 3 > {threshold}, {step}, 0.0) + x"


ABOVE = 0.1 * 3  # 0.30000000000000004
GATE = "F.hardsigmoid(x.float() @ x.float().mT) * {}"


@rows(
    "model right wrong values",
    {
        "the sign of zero": ("x + 0", "-x", "x - 1e-9", 0.0),
        "the sign of an imaginary zero": (
            "torch.complex(x, 0 * x)", "torch.complex(x, -0.0 * x)", "torch.complex(x, x)", 2.0),
        "a model that rounds": ("x * 3", "x * (3 + 1e-15)", "x * (3 + 1e-8)", 0.1),
        "one that jumps": (jump(0.3), jump(ABOVE), jump(0.3, step=4.0), 0.1),
        "what saturates": (GATE.format(1), GATE.format("(1 - 2**-24)"),
                           GATE.format("(1 - 2**-20)"), 4.0),
        "what cancels": ("x - 0.1", "x - 0.1 + 1e-17", "x - 0.1 + 1e-9", 0.1)},
)  # fmt: skip
def test_what_rounding_makes_of_a_model_is_allowed(model, right, wrong, values):
    inputs = (torch.full((1, 1), values, dtype=torch.float64),)
    assert_equivalent(Forward(model), Forward(right), inputs)

    with pytest.raises(AssertionError, match="same bits"):
        assert_equivalent(Forward(model), Forward(right), inputs, exact=True)
    with pytest.raises(AssertionError, match="values differ"):
        assert_equivalent(Forward(model), Forward(wrong), inputs)


def test_a_lost_update_of_a_statistic_is_seen_and_what_is_written_is_put_back() -> None:
    model = randomize(nn.BatchNorm1d(3, dtype=torch.float64))
    before = copy.deepcopy(model.state_dict())
    other, still = copy.deepcopy(model), Forward("m.norm(x)", norm=copy.deepcopy(model).eval())
    expected = copy.deepcopy(model)(Y).detach()
    assert_equivalent(model, copy.deepcopy(model), (Y,))

    other.momentum = 0.0
    with pytest.raises(AssertionError, match="buffer running_mean after the call"):
        assert_equivalent(model, other, (Y,))
    with pytest.raises(AssertionError, match="buffer running_mean is not written"):
        assert_equivalent(model, Forward(lambda m, x: expected.clone()), (Y,))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert_equivalent(model.eval(), still.eval(), (Y,))


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


def by(factor: float, shift: float = 0) -> Function:
    return lambda x: x * factor + shift


def remembers() -> Function:
    """A function that keeps what it gave first."""
    kept: list[torch.Tensor] = []
    return lambda x: (kept.append(x * 2), kept[0])[1]


SPOILED: dict[str, tuple[Function, Function]] = {
    **dict.fromkeys(("more rows", "one row", "other sizes"), (lambda x: x + len(x), by(1, 3))),
    **dict.fromkeys(("longer rows", "one column"), (lambda x: x + x.shape[-1], by(1, 4))),
    **dict.fromkeys(("more channels", "one channel"), (lambda x: x + x.shape[1], by(1, 4))),
    **dict.fromkeys(("one rank less", "one rank more", "another rank"),
                    (lambda x: x + x.dim(), by(1, 2))),
    **dict.fromkeys(("another layout", "channels last"),
                    (by(1, 1), lambda x: (x + 1).contiguous())),
    "one more": (lambda x, *more: x + len(more), lambda x, *more: x + 0),
    "one row of the last": (lambda x, y: x + y, lambda x, y: x + y * (len(y) == len(x))),
    "one tensor for all":
        (lambda x, y: (x.add_(1), x + y)[1], lambda x, y: (y := y.clone(), x.add_(1) + y)[1]),
    "no rows": (by(2), lambda x: x * 2 if len(x) else x.new_zeros(1)),
    "narrow": (by(2), lambda x: x.double() * 2),
    "not finite": (by(2), lambda x: x * 2 + x * 0),
    "cast": (by(3), lambda x: x * torch.full((1,), 3, dtype=torch.float64)),
    "cast to half": (by(3), lambda x: x * torch.full((1,), 3, dtype=torch.float32)),
    "strided": (by(1, 1), lambda x: x + float(x.is_contiguous())),
    "none for the last": (lambda x: X if x is None else x, lambda x: -X if x is None else x),
    "gradient": (by(2), lambda x: x + x.detach()),
    "other options": (lambda x, flag=True: x * flag, lambda x, flag=True: x + 0),
    **dict.fromkeys(("weights written", "refitted", "twice"), (by(2), by(2))),
}  # fmt: skip
INPUTS_OF = dict.fromkeys(("one tensor for all", "one row of the last"), (X, 2 * X))
INPUTS_OF["channels last"] = (X.repeat(2, 1).reshape(2, 3, 2, 2),)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", LATER_CALLS)
def test_each_later_call_is_spoiled_and_seen(name: str, exact: bool) -> None:
    model, candidate = map(Of, SPOILED[name])
    model.forward, candidate.forward = SPOILED[name]  # with their own signatures
    inputs = INPUTS_OF.get(name, (X,))
    if name in ("weights written", "refitted"):
        model = nn.Linear(4, 2, dtype=torch.float64)
        candidate = nn.Sequential(model)  # it is no snapshot
        candidate.refit = lambda state: candidate
    if name == "twice":
        candidate = Of(remembers())
    kept = [each.detach().clone() for each in model.parameters()]
    assert_equivalent(model, candidate, inputs)

    with pytest.raises(AssertionError):
        LATER_CALLS[name](model, candidate, inputs, exact=exact)
    LATER_CALLS[name](model, copy.deepcopy(model), inputs, exact=exact)
    assert all(map(torch.equal, model.parameters(), kept))  # what was written is put back


def test_a_spec_chooses_a_later_call_and_the_report_repeats_it() -> None:
    def fixed(model, inputs):
        return Of(lambda x: x + 1 if x.shape == inputs[0].shape else x)

    spec = Spec(("shift",), (3, 3))
    assert check_spec(spec, fixed) is not None

    with pytest.raises(Counterexample) as caught:
        check_spec(spec, fixed, later=True)
    assert 'LATER_CALLS["more rows"](model, candidate, inputs, exact=False)' in str(caught.value)
