"""Level 3: products in 16 or 8 bits within an error budget, and only where nothing overflows."""

from __future__ import annotations

import copy
import importlib.util
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optimizer
from optimizer.core.inputs import Call
from optimizer.core.node import name_of_call
from optimizer.lowering.choose import AS_IT_IS
from optimizer.lowering.module import LoweredModule
from optimizer.lowering.precision import HEADROOM, in_int8, in_precision
from optimizer.lowering.trace import straight_line
from optimizer.verify.equivalence import BOUNDS, relative_error
from tests.level_2 import image, last_wins, lowered, offer, racing

BF16, FP16 = torch.bfloat16, torch.float16
ERRORS = {"bf16": (1e-6, BOUNDS[BF16]), "fp16": (1e-6, BOUNDS[FP16]), "int8": (1e-4, 5e-2)}
WIDTH = 32


class Block(nn.Module):
    """A convolution, a norm, attention and a Linear."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv(x)).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v
        return self.head(x.mean(1))


def block() -> tuple[nn.Module, torch.Tensor]:
    return Block().eval(), image()


def perceptron(*sizes: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    layers = nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH, bias=False)
    return nn.Sequential(*layers).eval(), image(*sizes, WIDTH)


@pytest.fixture(autouse=True)
def _the_last_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed is not what is tested here."""
    offer(monkeypatch)
    racing(monkeypatch, last_wins)


def reduced(model: nn.Module, *inputs: Any, precision: str = "bf16", **options: Any) -> Any:
    return lowered(model, *inputs, level=3, precision=precision, **options)


def choice(fast: LoweredModule) -> Any:
    return next(each for each in fast.report.choices if each.region == "its precision")


CASES = {
    "bf16": (*block(), "bf16"),
    "fp16": (*block(), "fp16"),
    "int8": (*perceptron(5), "int8"),
    "int8 of many": (*perceptron(2, 5), "int8"),
    "int8 of one": (*perceptron(), "int8"),
}


@pytest.mark.parametrize(("model", "x", "precision"), CASES.values(), ids=CASES)
class TestTheAnswer:
    def test_it_is_within_the_budget_and_not_the_models_also_of_copies(
        self, model: nn.Module, x: torch.Tensor, precision: str
    ) -> None:
        fast = reduced(model, x, precision=precision)

        assert choice(fast).chosen == precision
        least, most = ERRORS[precision]
        assert least < relative_error(model(x), fast(x)) < most
        assert fast(x).dtype == torch.float32
        for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            assert torch.equal(other(x), fast(x))
            assert other.state_dict().keys() == fast.state_dict().keys()

    def test_over_the_budget_nothing_is_lowered(
        self, model: nn.Module, x: torch.Tensor, precision: str
    ) -> None:
        fast = reduced(model, x, precision=precision, error_budget=1e-6)

        assert choice(fast).chosen == AS_IT_IS
        assert "its answer is off by" in choice(fast).rejected[precision]
        torch.testing.assert_close(fast(x), model(x))


def test_the_report_states_the_budget_and_the_largest_error_that_was_seen() -> None:
    """Here that of the example, whose terms cancel; those of other values do not."""
    model, x = nn.Linear(4, 1, bias=False), torch.tensor([[10.3, 8.2, 8.2, 1.0]])
    model.weight.data = torch.tensor([[1.0, -1.0, 0.0, 0.0]])
    fast = reduced(model.eval(), x, error_budget=0.04)

    error = relative_error(model(x), fast(x))
    assert error > 0.01
    for text in (f"a relative error of {error:.2g} seen", "0.04 allowed", "its precision"):
        assert text in str(fast.report)


def test_it_is_decided_apart_from_the_region_that_a_call_consists_of() -> None:
    fast = reduced(nn.Conv2d(3, 4, 3).eval(), image(), error_budget=1e-6)

    assert len({each.key for each in fast.report.choices}) == 2


def test_other_values_are_held_to_the_budget_too() -> None:
    """An example of zeros says nothing: weights that cancel do so for other values."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(64, 4).mul(100))
        model[1].weight.copy_(torch.cat([torch.ones(1, 32), -torch.ones(1, 32)], 1))
        model[0].weight[32:] = model[0].weight[:32] + 0.01

    assert choice(reduced(model, torch.zeros(2, 4))).chosen == AS_IT_IS


def test_other_calls_run_in_the_models_precision_until_they_are_lowered() -> None:
    model, x = block()
    fast = pickle.loads(pickle.dumps(reduced(model, x)))

    torch.testing.assert_close(fast(x[:1]), model(x[:1]))
    assert relative_error(model(x), fast(x)) > 1e-6
    assert fast.lower(x[:1])[0].chosen == "bf16"
    assert relative_error(model(x[:1]), fast(x[:1])) > 1e-6


def test_where_it_is_slower_nothing_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    racing(monkeypatch, lambda names: {name: 0.1 + (name != AS_IT_IS) for name in names})
    assert "bf16" not in [each.chosen for each in reduced(*block(), check=None).report.choices]

    # Nor a whole call that is slower, whatever its regions save.
    racing(monkeypatch, lambda names: last_wins(names) | {"plan": 1.0, "portable": 0.5})
    report = reduced(*block(), check=None).report
    assert "it is not faster so: 2.00 of the time" in str(report)


def test_refit_keeps_the_precision() -> None:
    model, x = block()
    fast, trained = reduced(model, x), Block(seed=2).eval()
    fast.refit(trained.state_dict(), x)

    assert 1e-6 < relative_error(trained(x), fast(x)) < 5e-2


def computed(function: Any, low: torch.dtype, *inputs: torch.Tensor, held: Any = ()) -> Any:
    """What is computed in which dtype, by the name of the function."""
    line = straight_line(function, held, Call(inputs, {}))
    seen = {}

    class Seeing(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor):
                seen[name_of_call(n)] = value.dtype
            return value

    Seeing(in_precision(line.module, [line.inputs], low)).run(*line.inputs)
    return seen


class TestWhatIsReduced:
    def test_norms_softmax_and_means_stay(self) -> None:
        model, x = block()
        seen = computed(model, BF16, x, held=list(model.parameters()))

        low = {name for name, dtype in seen.items() if dtype == BF16}
        assert low >= {"conv2d", "gelu", "linear", "matmul", "flatten"}
        assert not low & {"layer_norm", "softmax", "mean", "div"}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_sum_follows_its_terms_and_what_is_not_float32_stays(
        self, dtype: torch.dtype
    ) -> None:
        x, weight = torch.randn(3, 4, dtype=dtype), torch.randn(4, 4, dtype=dtype)
        both = computed(lambda x: (x @ weight) + (x @ weight), BF16, x, held=[weight])
        one = computed(lambda x: (x @ weight) + x, BF16, x, held=[weight])
        low = BF16 if dtype == torch.float32 else dtype

        assert (both["matmul"], both["add"], one["add"]) == (low, low, dtype)

    @pytest.mark.parametrize("scale", [1.0, 65504 / HEADROOM / 4])
    def test_what_could_overflow_stays(self, scale: float) -> None:
        x, weight = torch.ones(3, 8) * scale, torch.ones(8, 8)
        seen = computed(lambda x: x @ weight, FP16, x, held=[weight])

        assert (seen["matmul"] == FP16) is (scale == 1.0)

    def test_a_mask_of_infinities_does_not_overflow(self) -> None:
        scores, mask = torch.randn(4, 4), torch.zeros(4, 4)
        mask[0, 1] = -math.inf
        attend = F.scaled_dot_product_attention
        seen = computed(lambda x: attend(x, x, x, mask), BF16, scores, held=[mask])

        assert seen["scaled_dot_product_attention"] == BF16


WEIGHT = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
_WIDE = WEIGHT.double()


class TestInt8:
    """Linear layers by torchao."""

    @pytest.mark.parametrize(
        ("function", "dtype", "taken"),
        [
            (lambda x: F.linear(x, WEIGHT), torch.float32, True),
            (lambda x: F.linear(x, weight=WEIGHT), torch.float32, True),
            (lambda x: F.linear(x, _WIDE), torch.float64, False),
            (lambda x: F.linear(x, x + 1), torch.float32, False),
            (lambda x: F.linear(x, WEIGHT[0]), torch.float32, False),
        ],
        ids=["constant", "named", "wide", "computed", "vector"],
    )
    def test_weights_of_another_dtype_or_that_are_computed_stay(
        self, function: Any, dtype: torch.dtype, taken: bool
    ) -> None:
        line = straight_line(function, [WEIGHT, _WIDE], Call((image(5, WIDTH).to(dtype),), {}))
        before = line.module.code
        made = in_int8(line.module, line.inputs)

        assert ("int8_linear" in map(name_of_call, made.graph.nodes)) is taken
        assert line.module.code == before

    def test_what_torchao_cannot_compute_is_left(self) -> None:
        line = straight_line(lambda x: F.linear(x, WEIGHT), [WEIGHT], Call((image(0, WIDTH),), {}))

        with pytest.raises(optimizer.Refused, match="torchao cannot compute it"):
            in_int8(line.module, line.inputs)

    def test_without_it_the_error_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = {"torchao": lambda *rest: None, None: importlib.util.find_spec}
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda *name: found.get(name[0], found[None])(*name)
        )
        with pytest.raises(optimizer.InputError, match="pip install torchao"):
            reduced(*perceptron(5), precision="int8")


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
def test_bad_input_is_an_error_before_any_work(options: Any) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("the model was called")

    model = nn.Linear(2, 2)
    model.register_forward_hook(never)
    with pytest.raises(optimizer.InputError, match=r"precision|error_budget"):
        lowered(model, torch.ones(1, 2), **options)
