"""The fuzz kit's oracle: each thing that a caller can observe, spoiled in one candidate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from optimizer.testing import (
    Optimize,
    Spec,
    assert_equivalent,
    check_spec,
    randomize,
    untouched,
)
from optimizer.testing import _lowering as _level_two
from optimizer.testing._rounding import Jitter
from tests.single_pass import Forward, ForwardOfTwo, rows

X = torch.arange(-3.0, 3.0, dtype=torch.float64).reshape(2, 3)
DIFFER = "output 0: values differ"


@rows(
    "model candidate message",
    {
        "a value": ("x * 2", "x * 2.0000001", DIFFER),
        "an imaginary part": ("torch.complex(x / 3, x / 3)", "torch.complex(x / 3, x / 2)", DIFFER),
        "one of several values": (
            "(x + 1, {'a': x + 2})", "(x + 1, {'a': x + 3})", "output 1: values differ",
        ),
        "the structure": ("(x.clone(),)", "x.clone()", "structure"),
        "a key": ("{'a': x + 1}", "{'b': x + 1}", "structure"),
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
        "one in float32": ("x.float() / 0.0", "(x.float() / 0.0).clamp(max=9)", DIFFER),
        "its sign": ("x / 0.0", "x / -0.0", DIFFER),
        "a last bit where nothing rounds": ("x * 3", "x * (3 + 1e-15)", "same values"),
    },
)  # fmt: skip
def test_a_spoiled_candidate_is_seen(model: str, candidate: str, message: str) -> None:
    assert_equivalent(Forward(model), Forward(model), (X,), exact=True)

    with pytest.raises(AssertionError, match=message):
        assert_equivalent(Forward(model), Forward(candidate), (X,))


def jump(threshold: float, step: float = 1.0) -> str:
    return f"torch.where(x * 3 > {threshold}, {step}, 0.0) + x"


ABOVE = 0.1 * 3  # 0.30000000000000004
SIXTH, GATE = "torch.where(x > 0, x / 3, x) * {}", "F.hardsigmoid(x.float() @ x.float().mT) * {}"


@rows(
    "model right wrong values",
    {
        "the sign of zero": ("x + 0", "-x", "x - 1e-9", 0.0),
        "the sign of an imaginary zero": (
            "torch.complex(x, 0 * x)", "torch.complex(x, -0.0 * x)", "torch.complex(x, x)", 2.0,
        ),
        "a model that rounds": ("x * 3", "x * (3 + 1e-15)", "x * (3 + 1e-8)", 0.1),
        "one that jumps": (jump(0.3), jump(ABOVE), jump(0.3, step=4.0), 0.1),
        "inputs that hide rounding": (SIXTH.format(1), SIXTH.format("(1 + 1e-15)"),
                                      SIXTH.format("(1 + 1e-8)"), -1.0),
        "inputs that show it": (SIXTH.format(1), SIXTH.format("(1 + 1e-15)"),
                                SIXTH.format("(1 + 1e-8)"), 1.0),
        "what saturates": (GATE.format(1), GATE.format("(1 - 2**-24)"),
                           GATE.format("(1 - 2**-20)"), 4.0),
        "what cancels": ("x - 0.1", "x - 0.1 + 1e-17", "x - 0.1 + 1e-9", 0.1),
    },
)  # fmt: skip
def test_what_rounding_makes_of_a_model_is_allowed_where_bits_may_differ(
    model: str, right: str, wrong: str, values: float
) -> None:
    inputs = (torch.full((1, 1), values, dtype=torch.float64),)
    assert_equivalent(Forward(model), Forward(right), inputs)

    with pytest.raises(AssertionError, match="same bits"):
        assert_equivalent(Forward(model), Forward(right), inputs, exact=True)
    with pytest.raises(AssertionError, match="values differ"):
        assert_equivalent(Forward(model), Forward(wrong), inputs)


@pytest.mark.parametrize(
    ("model", "wrong", "values"),
    [(jump(0.3), "x.clamp(max=9)", [0.1, torch.inf]), (jump(0.2), jump(0.4), [0.1])],
)
def test_a_jump_that_rounding_does_not_make_is_seen(model: str, wrong: str, values: Any) -> None:
    with pytest.raises(AssertionError, match="values differ"):
        assert_equivalent(Forward(model), Forward(wrong), (torch.tensor(values).double(),))


def test_a_model_that_seldom_jumps() -> None:
    # What is compared with 0 is exactly 0, or 2e-16 where hardswish is one operation.
    spec = Spec(("mean_keep", "hardswish_expanded", "mask_row"), shape=(2, 3, 3), seed=3)

    assert "recognize_activations" in check_spec(spec, Optimize()).report.counts()


def test_a_lost_update_of_a_statistic_is_seen_and_what_is_written_is_put_back() -> None:
    model = randomize(nn.BatchNorm1d(3, dtype=torch.float64))
    before = copy.deepcopy(model.state_dict())
    other, still = copy.deepcopy(model), Forward("m.norm(x)", norm=copy.deepcopy(model).eval())
    expected = copy.deepcopy(model)(X).detach()
    assert_equivalent(model, copy.deepcopy(model), (X,))

    other.momentum = 0.0
    with pytest.raises(AssertionError, match="buffer running_mean after the call"):
        assert_equivalent(model, other, (X,))
    with pytest.raises(AssertionError, match="buffer running_mean is not written"):
        assert_equivalent(model, Forward(lambda m, x: expected.clone()), (X,))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert_equivalent(model.eval(), still.eval(), (X,))


def test_a_buffer_is_found_by_its_whole_name() -> None:
    def counts() -> nn.Module:
        flat = nn.BatchNorm1d(3)
        flat.running_mean.fill_(2.0)  # type: ignore[union-attr]
        return Forward("x", outer=nn.ModuleDict({"norm": nn.BatchNorm1d(3)}), norm=flat)

    assert_equivalent(counts(), counts(), (X,))


def test_a_call_that_fails_leaves_no_buffer_written() -> None:
    model = Forward("m.count.add_(1); return x[m.absent]", count=torch.zeros(1))

    with pytest.raises(AttributeError):
        assert_equivalent(model, model, (X,))
    assert not model.count.any()


def test_a_lost_hook_is_seen() -> None:
    model = randomize(nn.Linear(3, 3, dtype=torch.float64))
    candidate = copy.deepcopy(model)
    model.register_forward_hook(lambda module, arguments, output: output * 2)

    with pytest.raises(AssertionError, match=DIFFER):
        assert_equivalent(model, candidate, (X,))


def test_integers_are_kept_and_what_is_the_models_is_told() -> None:
    held: Any = {"linear": nn.Linear(3, 3)}
    held["steps"] = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    model, copied = (
        randomize(Forward(f"return m.linear(x), {weight}, m.steps * 1, 3", **held).double().eval())
        for weight in ("m.linear.weight", "m.linear.weight.clone()")
    )

    assert model.steps.tolist() == [1, 2]
    with torch.no_grad():
        assert_equivalent(model, model, (X,))
        with pytest.raises(AssertionError, match="memory shared"):
            assert_equivalent(model, copied, (X,))


def test_an_input_may_be_a_number() -> None:
    scaled, inputs = ForwardOfTwo("x.relu() * z"), (X, 2)

    assert_equivalent(scaled, scaled, inputs)
    with pytest.raises(AssertionError, match="values differ"):
        assert_equivalent(scaled, ForwardOfTwo("x.relu()"), inputs)


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
    model, x = Forward("m.linear((x > 0).half())", linear=nn.Linear(3, 3).half()), X.half()
    other = copy.deepcopy(model)

    assert_equivalent(model, other, (x,), exact=False)
    with torch.no_grad():
        other.linear.bias += 1
    with pytest.raises(AssertionError, match="values differ"):
        assert_equivalent(model, other, (x,), exact=False)


CONV = {"conv": nn.Conv1d(3, 3, 1, bias=False), "pool": nn.AvgPool1d(2, padding=1)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
# One with an output that rounds, and one that needs a gradient.
@pytest.mark.parametrize("outputs", ["return left", "return (left, m.conv.weight, m.conv(x))"])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_what_cancels_in_the_models_order_need_not_in_another(
    dtype: torch.dtype, scale: float, outputs: str
) -> None:
    """Two equal branches leave nothing of one another in the model's own order."""
    model, other = (
        Forward(f"left = {branch} - m.pool(m.conv(x)); {outputs}", **copy.deepcopy(CONV)).to(dtype)
        for branch in ("m.pool(m.conv(x))", f"m.conv(m.pool(x)) * {scale}")
    )
    other.load_state_dict(randomize(model).state_dict())
    x = 1000 * torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)

    with pytest.raises(AssertionError) if scale != 1 else nullcontext():
        assert_equivalent(model, other, (x,))


def test_a_jitter_leaves_indices_and_whole_numbers() -> None:
    x = torch.tensor([1.5, 2.5])
    with Jitter(0):
        moved, whole, places = x * 3, x.floor(), torch.arange(3.0)

    assert not torch.equal(moved, torch.tensor([4.5, 7.5]))
    assert whole.tolist() + places.tolist() == [1.0, 2.0, 0.0, 1.0, 2.0]


def test_what_torch_says_of_a_model_once_a_process_fails_no_test() -> None:
    """It would fail the one that happens to come first."""
    torch.set_warn_always(True)
    try:
        spec = Spec(("autocast", "linear", "rmsnorm"))
        assert check_spec(spec, Optimize(level=0), exact=True, dtype=torch.float32)
    finally:
        torch.set_warn_always(False)


def test_broken_kernels_are_offered_and_lose() -> None:
    model = randomize(nn.Sequential(nn.Linear(3, 4), nn.ReLU()).double().eval())
    fast = _level_two.Lower()(model, (X,))
    wrong, greedy = (_level_two._KERNELS[name](model, ()) for name in ("wrong", "greedy"))
    given = X.clone()
    greedy(given)

    torch.testing.assert_close(fast(X), model(X))
    _level_two.assert_follows_its_weights(fast, (X,))
    assert not torch.allclose(wrong(X)[0], model(X)[0])
    assert not given.any()
