"""Level 3: products in 16 or 8 bits within an error budget, and only where nothing overflows."""

from __future__ import annotations

import copy
import importlib.util
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import optimizer
from tests.internals import AS_IT_IS, BOUNDS, HEADROOM, in_precision, name_of_call, relative_error
from tests.level_2 import attending, image, last_wins, line_of, lowered, pickled, racing
from tests.single_pass import function_of, rows

pytestmark = pytest.mark.usefixtures("right_is_enough")
BF16, FP16 = torch.bfloat16, torch.float16


def perceptron(*sizes):
    torch.manual_seed(1)
    layers = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False)
    return nn.Sequential(*layers).eval(), image(*sizes, 32)


def reduced(model, *inputs, precision="bf16", **options):
    return lowered(model, *inputs, level=3, precision=precision, **options)


def choice(fast):
    return next(each for each in fast.report.choices if each.region == "its precision")


@rows(
    "model x precision most",
    {
        "bf16": (attending(), image(), "bf16", BOUNDS[BF16]),
        "fp16": (attending(), image(), "fp16", BOUNDS[FP16]),
        "int8": (*perceptron(2, 5), "int8", 5e-2),
        "int8 of one": (*perceptron(), "int8", 5e-2),
    },
)
def test_the_answer_is_within_the_budget_and_not_the_models(model, x, precision, most):
    fast = reduced(model, x, precision=precision)

    assert choice(fast).chosen == precision
    assert 1e-6 < relative_error(model(x), fast(x)) < most
    assert fast(x).dtype == torch.float32
    for other in (copy.deepcopy(fast), pickled(fast)):
        assert torch.equal(other(x), fast(x))
        assert other.state_dict().keys() == fast.state_dict().keys()
    exact = reduced(model, x, precision=precision, error_budget=1e-6)
    assert choice(exact).chosen == AS_IT_IS
    assert "its answer is off by" in choice(exact).rejected[precision]
    assert len({each.key for each in exact.report.choices}) == len(exact.report.choices)
    assert_close(exact(x), model(x))


def test_the_report_states_the_budget_and_the_largest_error_that_was_seen():
    """Here that of the example, whose terms cancel; those of other values do not."""
    model, x = nn.Linear(4, 1, bias=False), torch.tensor([[10.3, 8.2, 8.2, 1.0]])
    model.weight.data = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
    fast = reduced(model.eval(), x, error_budget=0.04)
    error = relative_error(model(x), fast(x))
    assert error > 0.01
    for text in (f"a relative error of {error:.2g} seen", "0.04 allowed", "its precision"):
        assert text in str(fast.report)


def test_other_values_are_held_to_the_budget_too():
    """An example of zeros says nothing: weights that cancel do so for other values."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(64, 4).mul(100))
        model[1].weight.copy_(torch.cat([torch.ones(1, 32), -torch.ones(1, 32)], 1))
        model[0].weight[32:] = model[0].weight[:32] + 0.01

    assert choice(reduced(model, torch.zeros(2, 4))).chosen == AS_IT_IS


def test_other_calls_run_in_the_models_precision_until_they_are_lowered_also_after_refit():
    model, trained, x = attending(), attending(seed=2), image()
    fast = reduced(model, x)

    assert_close(fast(x[:1]), model(x[:1]))
    assert relative_error(model(x), fast(x)) > 1e-6
    assert fast.lower(x[:1])[0].chosen == "bf16"
    assert relative_error(model(x[:1]), fast(x[:1])) > 1e-6
    fast.refit(trained.state_dict(), x)
    assert 1e-6 < relative_error(trained(x), fast(x)) < 5e-2


def test_where_it_is_slower_nothing_is_lowered(monkeypatch):
    racing(monkeypatch, lambda names: {name: 0.1 + (name != AS_IT_IS) for name in names})
    report = reduced(attending(), image(), check=None).report
    assert "bf16" not in [each.chosen for each in report.choices]
    # Nor a whole call that is slower, whatever its regions save.
    racing(monkeypatch, lambda names: last_wins(names) | {"plan": 1.0, "portable": 0.5})
    report = reduced(attending(), image(), check=None).report
    assert "it is not faster so: 2.00 of the time" in str(report)


_MASK, _WEIGHT = torch.zeros(4, 4).index_fill(1, torch.tensor(1), -math.inf), torch.ones(4, 4)
HELD = {"w": _WEIGHT, "wide": _WEIGHT.double(), "mask": _MASK}
_BLOCK = "F.layer_norm(F.gelu((x @ w).mT), (4,)).softmax(-1)"
_ATTENDING = "F.scaled_dot_product_attention(x, x, x, mask)"
# Products follow, and what moves; norms, softmax and means stay.
REDUCED = {
    "a block": (_BLOCK, BF16, image(4, 4), "matmul gelu transpose", "layer_norm softmax"),
    "a sum of one": ("x @ w + x", BF16, image(4, 4), "matmul", "add"),
    "float64": ("x @ wide", BF16, image(4, 4).double(), "", "matmul"),
    "large": ("x @ w", FP16, _WEIGHT * 65504 / HEADROOM / 2, "", "matmul"),
    "small": ("x @ w", FP16, _WEIGHT, "matmul", ""),
    "an infinite mask": (_ATTENDING, BF16, image(4, 4), "scaled_dot_product_attention", ""),
    "int8": ("F.linear(x, weight=w)", torch.int8, image(5, 4), "int8_linear", ""),
    "int8 of float64": ("F.linear(x, wide)", torch.int8, image(5, 4).double(), "", "linear"),
}


@rows("text low x in_low in_wide", REDUCED)
def test_products_are_reduced_and_what_follows_where_nothing_overflows(
    text, low, x, in_low, in_wide
):
    line = line_of(function_of("x", text, **HELD), HELD.values(), x)
    before, seen = line.module.code, {}

    class Seeing(torch.fx.Interpreter):
        def run_node(self, n):
            value, name = super().run_node(n), name_of_call(n)
            seen[name] = getattr(value, "dtype", None) == low or name == "int8_linear"
            return value

    Seeing(in_precision(line.module, [line.inputs], low)).run(*line.inputs)

    assert all(seen[name] for name in in_low.split())
    assert not any(seen[name] for name in in_wide.split())
    assert line.module.code == before


def test_without_torchao_the_error_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda *name: None if name[0] == "torchao" else find(*name)
    )
    with pytest.raises(optimizer.InputError, match="pip install torchao"):
        reduced(*perceptron(5), precision="int8")
