"""Level 3: products in 16 bits within an error budget, and only where nothing overflows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optimizer
from optimizer.core.inputs import Call
from optimizer.lowering import choose as _choose
from optimizer.lowering.choose import AS_IT_IS
from optimizer.lowering.module import LoweredModule
from optimizer.lowering.precision import HEADROOM, in_precision
from optimizer.lowering.trace import straight_line
from optimizer.verify.equivalence import relative_error

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    """A convolution, a norm, attention and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv(x)).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v
        return self.head(x.mean(1))


@pytest.fixture(autouse=True)
def _the_last_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is not what is tested here."""

    def race(self: Any, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
        seconds = {name: 1.0 / place for place, name in enumerate(runs, 1)}
        return {"plan": 0.1, "portable": 1.0} if "plan" in runs else seconds

    monkeypatch.setattr(_choose.Times, "race", race)


def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def block() -> Block:
    torch.manual_seed(1)
    return Block().eval()


def reduced(model: nn.Module, *inputs: Any, precision: Any = "bf16", **options: Any) -> Any:
    fast = optimizer.optimize(model, inputs, level=3, precision=precision, **options)
    assert isinstance(fast, LoweredModule)
    return fast


def choice(fast: LoweredModule) -> Any:
    return next(each for each in fast.report.choices if each.region == "its precision")


def calls(function: Any, low: torch.dtype, *inputs: torch.Tensor, held: Any = ()) -> dict[str, Any]:
    """What is computed in which dtype, by the name of the function."""
    line = straight_line(function, held, Call(inputs, {}))
    module = in_precision(line.module, [line.inputs], low)
    seen = {}

    class Seeing(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor):
                seen[_choose.name_of_call(n)] = value.dtype
            return value

    Seeing(module).run(*line.inputs)
    return seen


class TestTheAnswer:
    @pytest.mark.parametrize("precision", ["bf16", "fp16"])
    def test_it_is_within_the_budget_and_not_the_models(self, precision: Any) -> None:
        model, x = block(), image()
        fast = reduced(model, x, precision=precision)
        error = relative_error(model(x), fast(x))

        assert choice(fast).chosen == precision
        assert 1e-6 < error < optimizer.verify.equivalence.BOUNDS[DTYPES[precision]]
        assert fast(x).dtype == torch.float32

    def test_the_report_states_error_and_budget(self) -> None:
        fast = reduced(block(), image(), error_budget=0.04)

        assert "0.04 allowed" in str(fast.report)
        assert "its precision" in str(fast.report)

    def test_over_the_budget_nothing_is_lowered(self) -> None:
        model, x = block(), image()
        fast = reduced(model, x, error_budget=1e-6)

        assert choice(fast).chosen == AS_IT_IS
        assert "its answer is off by" in choice(fast).rejected["bf16"]
        torch.testing.assert_close(fast(x), model(x))

    def test_it_is_decided_apart_from_the_region_that_a_call_consists_of(self) -> None:
        fast = reduced(nn.Conv2d(3, 4, 3).eval(), image(), error_budget=1e-6, engines=())

        assert len({each.key for each in fast.report.choices}) == 2

    def test_other_values_are_held_to_the_budget_too(self) -> None:
        """An example of zeros says nothing: weights that cancel do so for other values."""
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1)).eval()
        with torch.no_grad():
            model[0].weight.copy_(torch.randn(64, 4).mul(100))
            model[1].weight.copy_(torch.cat([torch.ones(1, 32), -torch.ones(1, 32)], 1))
            model[0].weight[32:] = model[0].weight[:32] + 0.01
        fast = reduced(model, torch.zeros(2, 4))

        assert choice(fast).chosen == AS_IT_IS

    def test_other_calls_run_in_the_models_precision(self) -> None:
        model, x = block(), image()
        fast = reduced(model, x)

        torch.testing.assert_close(fast(x[:1]), model(x[:1]))
        assert relative_error(model(x), fast(x)) > 1e-6

    def test_where_it_is_slower_nothing_is_lowered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def race(self: Any, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
            return {name: float(name != AS_IT_IS) + 0.1 for name in runs}

        monkeypatch.setattr(_choose.Times, "race", race)
        fast = optimizer.optimize(block(), image(), level=3, precision="bf16", check=None)

        assert "bf16" not in [each.chosen for each in fast.report.choices]

    def test_a_whole_call_that_is_slower_is_not_lowered_whatever_its_regions_save(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def race(self: Any, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
            seconds = {name: 1.0 / place for place, name in enumerate(runs, 1)}
            return {"plan": 1.0, "portable": 0.5} if "plan" in runs else seconds

        monkeypatch.setattr(_choose.Times, "race", race)
        fast = optimizer.optimize(block(), image(), level=3, precision="bf16", check=None)

        assert "it is not faster so: 2.00 of the time" in str(fast.report)

    def test_the_error_that_is_told_is_the_largest_that_was_seen(self) -> None:
        """Here that of the example, whose terms cancel; those of other values do not."""
        model, x = nn.Linear(4, 1, bias=False), torch.tensor([[10.3, 8.2, 8.2, 1.0]])
        model.weight.data = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
        fast = reduced(model.eval(), x, error_budget=0.04)

        error = relative_error(model(x), fast(x))
        assert error > 0.01
        assert f"a relative error of {error:.2g} seen" in str(fast.report)


class TestWhatIsReduced:
    def test_norms_softmax_and_means_stay(self) -> None:
        model, x = block(), image()
        seen = calls(model, torch.bfloat16, x, held=list(model.parameters()))

        low = {name for name, dtype in seen.items() if dtype == torch.bfloat16}
        assert low >= {"conv2d", "gelu", "linear", "matmul", "flatten"}
        assert not low & {"layer_norm", "softmax", "mean", "div"}

    def test_a_sum_follows_its_terms(self) -> None:
        x, weight = torch.randn(3, 4), torch.randn(4, 4)

        both = calls(lambda x: (x @ weight) + (x @ weight), torch.bfloat16, x, held=[weight])
        one = calls(lambda x: (x @ weight) + x, torch.bfloat16, x, held=[weight])
        assert (both["add"], one["add"]) == (torch.bfloat16, torch.float32)

    def test_what_is_not_float32_stays(self) -> None:
        x = torch.randn(3, 4, dtype=torch.float64)
        weight = torch.randn(4, 4, dtype=torch.float64)

        seen = calls(lambda x: x @ weight, torch.bfloat16, x, held=[weight])
        assert torch.bfloat16 not in seen.values()

    @pytest.mark.parametrize("scale", [1.0, 65504 / HEADROOM / 4])
    def test_what_could_overflow_stays(self, scale: float) -> None:
        x, weight = torch.ones(3, 8) * scale, torch.ones(8, 8)
        seen = calls(lambda x: x @ weight, torch.float16, x, held=[weight])

        assert (seen["matmul"] == torch.float16) is (scale == 1.0)

    def test_a_mask_of_infinities_does_not_overflow(self) -> None:
        scores, mask = torch.randn(4, 4), torch.zeros(4, 4)
        mask[0, 1] = float("-inf")
        attend = F.scaled_dot_product_attention
        seen = calls(lambda x: attend(x, x, x, mask), torch.bfloat16, scores, held=[mask])

        assert seen["scaled_dot_product_attention"] == torch.bfloat16


class TestItsLifecycle:
    def test_it_travels(self) -> None:
        model, x = block(), image()
        fast = reduced(model, x)

        for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            assert torch.equal(other(x), fast(x))
            assert relative_error(model(x), other(x)) > 1e-6

    def test_it_can_be_lowered_for_other_sizes(self) -> None:
        model, x = block(), image()
        other = pickle.loads(pickle.dumps(reduced(model, x)))
        made = other.lower(x[:1])

        assert made[0].chosen == "bf16"

    def test_refit_keeps_the_precision(self) -> None:
        model, x = block(), image()
        fast = reduced(model, x)
        torch.manual_seed(2)
        trained = Block().eval()
        fast.refit(trained.state_dict(), x)

        assert 1e-6 < relative_error(trained(x), fast(x)) < 5e-2


class TestBadInput:
    @pytest.mark.parametrize(
        "options",
        [
            {"level": 3},
            {"level": 2, "precision": "bf16"},
            {"level": 3, "precision": "int4"},
            {"level": 3, "precision": "bf16", "error_budget": 0},
            {"level": 3, "precision": "bf16", "error_budget": "small"},
        ],
    )
    def test_it_is_an_error_before_any_work(self, options: Any) -> None:
        def never(*args: Any) -> None:
            raise AssertionError("the model was called")

        model = nn.Linear(2, 2)
        model.register_forward_hook(never)
        with pytest.raises(optimizer.InputError, match=r"precision|error_budget"):
            optimizer.optimize(model.eval(), torch.ones(1, 2), **options)
