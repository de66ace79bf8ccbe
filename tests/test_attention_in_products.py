"""A call of attention as products on oneDNN: the same values, and only where it is so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer._inputs import Call
from optimizer._lowered import LoweredModule
from optimizer._report import Choice
from optimizer.lowering import _products
from optimizer.lowering._policies import AS_IT_IS, POLICIES
from optimizer.lowering._products import as_products, extract_calls
from optimizer.lowering._straight_line import straight_line
from optimizer.testing import randomize

HEADS, TOKENS, SIZE = 2, 5, 8
NAME = "attention in products"
attend = F.scaled_dot_product_attention
pytestmark = pytest.mark.usefixtures("last_candidate_wins")


class Attending(nn.Module):
    """Calls attention with what a function makes of its input, once or more."""

    def __init__(self, function: Callable[[Tensor], Tensor], times: int = 1) -> None:
        super().__init__()
        self.function, self.times = function, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.function(x).tanh()
        return x


def heads(*batch: int, tokens: int = TOKENS) -> Tensor:
    """As models have them: cut from one product, so that heads lie within tokens."""
    torch.manual_seed(0)
    return torch.randn(*batch, tokens, HEADS, SIZE).transpose(-2, -3)


def lowered(function: Callable[[Tensor], Tensor], x: Tensor, times: int = 1) -> LoweredModule:
    fast = optimizer.optimize(Attending(function, times).eval(), x, level=2)
    assert isinstance(fast, LoweredModule)
    return fast


def choices(fast: LoweredModule) -> list[Choice]:
    return [choice for choice in fast.report.choices if choice.region == "attention"]


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "one value": lambda x: attend(x, x, x),
    "three": lambda x: attend(x, x.exp(), x.sin()),
    "keywords": lambda x: attend(query=x, key=x.cos(), value=x, is_causal=False),
    "a scale": lambda x: attend(x, x.cos(), x, scale=0.5),
    "a scale of zero": lambda x: attend(x, x.cos(), x, scale=0.0),
    "other tokens": lambda x: attend(x, x[..., :3, :].cos(), x[..., :3, :]),
    "another size": lambda x: attend(x, x, x[..., :4])[..., [0, 1, 2, 3, 0, 1, 2, 3]],
    "nothing by position": lambda x: attend(x, x.cos(), x, None, 0.0, False),
}  # fmt: skip


@pytest.mark.parametrize("batch", [(3,), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_two_products(call: str, batch: tuple[int, ...]) -> None:
    x = heads(*batch)
    fast = lowered(CALLS[call], x)
    expected = Attending(CALLS[call])(x)

    assert [choice.chosen for choice in choices(fast)] == [NAME]
    torch.testing.assert_close(fast(x), expected)
    assert fast(x).stride() == expected.stride()


def test_the_result_lies_as_torch_lays_it_out() -> None:
    x = heads(3)
    line = straight_line(Attending(CALLS["one value"]).eval(), (), Call((x,), {}))
    extract_calls(line.module)
    region: Any = line.module.get_submodule("call_of_attention_0")
    expected = region(x)[0]

    assert not expected.is_contiguous()
    assert as_products(region, (x,))(x)[0].stride() == expected.stride()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HEADS * SIZE, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def test_torchs_layer_of_attention_calls_it() -> None:
    model, x = randomize(Layer().eval()), torch.randn(2, TOKENS, HEADS * SIZE)
    fast: Any = optimizer.optimize(model, x, level=2)

    assert [choice.chosen for choice in choices(fast)] == [NAME]
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize(
    ("call", "programs"),
    [
        (CALLS["one value"], 1),
        (lambda x: CALLS["one value"](CALLS["one value"](x).contiguous()), 2),
        (lambda x: CALLS["a scale"](CALLS["keywords"](x)), 2),
    ],
    ids=["alike", "other strides", "another scale"],
)
def test_calls_that_are_alike_share_what_was_compiled(
    call: Callable[[Tensor], Tensor], programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    on_onednn = _products.on_onednn

    def counted(*args: Any) -> nn.Module:
        compiled.append(args)
        return on_onednn(*args)

    monkeypatch.setattr(_products, "on_onednn", counted)
    x = heads(3)
    fast = lowered(call, x, times=4)

    assert [choice.chosen for choice in choices(fast)] == [NAME] * (4 * programs)
    assert len(compiled) == programs
    torch.testing.assert_close(fast(x), Attending(call, 4)(x))


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask": lambda x: attend(x, x, x, torch.ones(TOKENS, TOKENS).tril().bool()),
    "causal": lambda x: attend(x, x, x, is_causal=True),
    "grouped heads": lambda x: attend(x, x[:, :1], x[:, :1], enable_gqa=True),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_call_is_no_region(other: str) -> None:
    x = heads(3)
    fast: Any = optimizer.optimize(Attending(OTHERS[other]).eval(), x, level=2)

    assert not choices(fast)
    torch.testing.assert_close(fast(x), Attending(OTHERS[other])(x))


REJECTED: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, str]] = {
    "many scores": (
        CALLS["one value"], heads(1, tokens=8 * SIZE + 1),
        "ValueError: its scores would take much more memory than what they are made of",
    ),
    "one batch for all": (
        lambda x: attend(x, x[:1].cos(), x[:1]), heads(3), "ValueError: its batches differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_what_is_rejected_stays_as_it_is(case: str) -> None:
    function, x, reason = REJECTED[case]
    fast = lowered(function, x)

    (choice,) = choices(fast)
    assert (choice.chosen, choice.rejected) == (AS_IT_IS, {NAME: reason})
    torch.testing.assert_close(fast(x), Attending(function)(x))


def test_twice_as_many_scores_as_numbers_are_few() -> None:
    (choice,) = choices(lowered(CALLS["one value"], heads(1, tokens=8 * SIZE)))

    assert choice.chosen == NAME


def test_what_is_not_finite_runs_the_portable_code() -> None:
    x = heads(3)
    fast = lowered(CALLS["one value"], x)
    x[0, 0, 0, 0] = math.nan

    torch.testing.assert_close(fast(x), Attending(CALLS["one value"])(x), equal_nan=True)


def test_float64_is_offered_nothing() -> None:
    (choice,) = choices(lowered(CALLS["one value"], heads(3).double()))

    assert (choice.chosen, choice.seconds, choice.rejected) == (AS_IT_IS, {}, {})


def test_on_other_devices_it_is_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name, policy in POLICIES.items() if policy.splits_attention] == ["cpu"]
    monkeypatch.setattr(POLICIES["cpu"], "splits_attention", False)
    fast: Any = optimizer.optimize(Attending(CALLS["one value"]).eval(), heads(3), level=2)

    assert not choices(fast)


def test_what_holds_weights_is_not_shared() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(attend(self.first(x), x, x))  # type: ignore[no-any-return]

    model = randomize(Layers().eval())
    fast: Any = optimizer.optimize(model, heads(3), level=2)

    first, _, second = fast.report.choices
    assert first.key == second.key
    torch.testing.assert_close(fast(heads(3)), model(heads(3)))


def test_untimed_it_stays_one_call() -> None:
    model = nn.Sequential(nn.Conv2d(HEADS, HEADS, 1), Attending(CALLS["one value"]))
    fast: Any = optimizer.optimize(model.eval(), heads(3), level=2, tune_seconds=0)

    assert [choice.chosen for choice in choices(fast)] == [AS_IT_IS]
