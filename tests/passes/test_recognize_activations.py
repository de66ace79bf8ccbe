"""Activations that are spelled out become one call, in every spelling, or stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optimizer.testing import assert_equivalent
from tests.single_pass import Forward, assert_left_alone, callees, optimized_by

NAME = "recognize_activations"
optimized = partial(optimized_by, NAME)


class Model(Forward):
    """Runs a forward of a case, with the activations that are modules."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(forward)
        self.sigmoid, self.tanh, self.relu6 = nn.Sigmoid(), nn.Tanh(), nn.ReLU6(inplace=True)
        self.hardtanh = nn.Hardtanh(0.0, 6.0)


def values(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.cat([torch.linspace(-12, 12, 200), torch.tensor([0.0, -0.0])]).to(dtype)


def tanh_of_a_cube(m: Any, x: Tensor) -> Tensor:
    return m.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))


def in_steps(m: Any, x: Tensor) -> Tensor:
    scale = x + 3
    scale = scale.clamp_(0, 6)
    scale /= 6
    return scale.mul_(x)


SPELLINGS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Any]] = {
    "silu": (lambda m, x: x * x.sigmoid(), F.silu),
    "silu of modules": (lambda m, x: m.sigmoid(x) * x, F.silu),
    "silu of methods": (lambda m, x: x.mul(torch.sigmoid(x)), F.silu),
    "silu in place": (lambda m, x: x.sigmoid().mul_(x), F.silu),
    "hardswish": (lambda m, x: x * F.relu6(x + 3) / 6, F.hardswish),
    "hardswish of a module": (lambda m, x: x * (m.relu6(x + 3.0) / 6.0), F.hardswish),
    "hardswish in place": (lambda m, x: x * F.relu6(x + 3, inplace=True).div_(6.0), F.hardswish),
    "hardswish of a clamp": (lambda m, x: x * (x + 3).clamp(min=0, max=6) * (1 / 6), F.hardswish),
    "hardswish of hardtanh": (lambda m, x: x / 6 * F.hardtanh(3 + x, 0.0, 6.0), F.hardswish),
    "hardswish of hardsigmoid": (lambda m, x: F.hardsigmoid(x) * x, F.hardswish),
    "hardswish in steps": (in_steps, F.hardswish),
    "hardsigmoid": (lambda m, x: torch.clamp(x.add(3.0), 0, 6).div(6), F.hardsigmoid),
    "hardsigmoid by name": (lambda m, x: torch.clamp(max=6, min=0, input=x + 3) / 6, F.hardsigmoid),
    "hardsigmoid of a module": (lambda m, x: m.hardtanh(x + 3) / 6, F.hardsigmoid),
    "hardsigmoid of two sums": (lambda m, x: F.relu6(x + 4 - 1) / 6, F.hardsigmoid),
    "tanh gelu": (lambda m, x: 0.5 * x * (1 + tanh_of_a_cube(m, x)), F.gelu),
    "tanh gelu of products": (
        lambda m, x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608028654 * (1 + 0.044715 * x * x))),
        F.gelu,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLINGS)
def test_recognizes_every_spelling(case: str) -> None:
    forward, native = SPELLINGS[case]
    model = Model(forward).eval()

    fast = optimized(model, values())

    assert callees(fast) == [native]
    assert_equivalent(model, fast, (values(),))
    assert_equivalent(model, fast, (values().reshape(2, -1, 1),))
    assert torch.equal(fast(values(torch.float32)), fast(values(torch.float32).clone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", SPELLINGS)
def test_is_as_near_to_float64_as_the_spelling_up_to_one_rounding(
    case: str, dtype: torch.dtype
) -> None:
    model = Model(SPELLINGS[case][0]).eval()
    x = values(dtype)
    exact = model(x.double())

    fast = optimized(model, x)

    def error(answer: Tensor) -> float:
        return float((answer.double() - exact).abs().max())

    assert fast(x).dtype == dtype
    assert error(fast(x)) <= error(model(x)) + torch.finfo(dtype).eps * float(exact.abs().max())


def read_elsewhere(m: Any, x: Tensor) -> Any:
    gate = torch.sigmoid(x)
    return x * gate, gate


def read_in_part(m: Any, x: Tensor) -> Any:
    moved = x + 3
    clamped = moved.clamp_(0, 6)
    return x * clamped / 6 + moved


def written_on_the_way(m: Any, x: Tensor) -> Any:
    y = x * 2
    gate = torch.sigmoid(y)
    y.add_(1.0)
    return y * gate


def clamped_unseen(m: Any, x: Tensor) -> Any:
    gate = torch.sigmoid(x)
    gate.clamp_(0.25, 0.5)
    return x * gate


def read_by_its_old_name(m: Any, x: Tensor) -> Any:
    y = x * 1
    gate = y.sigmoid_()
    return y * gate


def written_over_what_is_given(m: Any, x: Tensor) -> Any:
    return x.add_(3).clamp_(0, 6).div_(6)


ELSEWHERE = "what it computes on the way is read elsewhere"
REFUSALS: dict[str, tuple[Callable[[Any, Tensor], Any], torch.dtype, str]] = {
    "a second reader": (read_elsewhere, torch.float64, ELSEWHERE),
    "a part that is read": (
        lambda m, x: (lambda s: (x * s) + s)(x.sigmoid()), torch.float64, ELSEWHERE,
    ),
    "a part that is read after its clamp": (read_in_part, torch.float64, ELSEWHERE),
    "a part that is written": (clamped_unseen, torch.float64, ELSEWHERE),
    "a part that is written and read by its old name": (
        read_by_its_old_name, torch.float64, ELSEWHERE,
    ),
    "a write over the input": (written_over_what_is_given, torch.float64, ELSEWHERE),
    "a write of the input": (
        written_on_the_way, torch.float64, "its input is written later",
    ),
    "a layout that leaves a choice": (
        lambda m, x: (lambda y: y * F.hardsigmoid(y))(x.as_strided((1, 3, 4), (1, 2, 0))),
        torch.float64,
        "the result would differ in layout",
    ),
    "integers": (
        lambda m, x: x * torch.sigmoid(x), torch.int64, "its input is not floating point",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    forward, dtype, reason = REFUSALS[case]
    model = Model(forward).eval()
    x = torch.arange(-6, 6).reshape(3, 4).to(dtype)

    fast = optimized(model, x)

    assert_left_alone(model, fast, (x,), reason)


OTHERS: list[Callable[[Any, Tensor], Any]] = [
    lambda m, x: x * torch.sigmoid(x + 1),
    lambda m, x: x * torch.sigmoid(1.702 * x),
    lambda m, x: (x + 1) * torch.sigmoid(x),
    lambda m, x: x * x.flip(0).sigmoid(),
    lambda m, x: x * F.relu6(x + 2) / 6,
    lambda m, x: x * F.relu6(x + 3) / 5,
    lambda m, x: F.relu6(x + 2 + 5) / 6,
    lambda m, x: x * (x + 3).clamp(0) / 6,
    lambda m, x: x * (x + 3).clamp(0, 6) // 6,
    lambda m, x: torch.div(x * F.relu6(x + 3), 6, rounding_mode="floor"),
    lambda m, x: torch.add(x, 3, alpha=2).clamp(0, 6) / 6,
    lambda m, x: F.hardtanh(x + 3) / 6,
    lambda m, x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2.0))),
    lambda m, x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
    lambda m, x: 6 / F.relu6(x + 3),
    lambda m, x: x * True,
    lambda m, x: (x * 1j).real,
    lambda m, x: x.clamp(max=9) * torch.sigmoid(x),
    lambda m, x: x * torch.sigmoid(x.clamp(min=-60)),
    lambda m, x: x * torch.sigmoid(x.clamp(min=-100)),
    lambda m, x: x * F.relu6(x + 3) * 0.1666667,
    lambda m, x: x / 0,
]


@pytest.mark.parametrize("forward", OTHERS)
def test_what_only_looks_alike_is_left_alone(forward: Callable[[Any, Tensor], Any]) -> None:
    model = Model(forward).eval()

    fast = optimized(model, values())

    assert fast.report.fired == fast.report.refused == ()
    assert torch.equal(fast(values()).nan_to_num(7), model(values()).nan_to_num(7))


def test_refuses_without_example_inputs() -> None:
    fast = optimized(Model(SPELLINGS["silu"][0]).eval())

    reasons = [each.reason for each in fast.report.refused]
    assert reasons == ["the graph was captured without example inputs"]


def test_a_long_run_of_products_is_looked_at_in_no_time() -> None:
    def squares(m: Any, x: Tensor) -> Tensor:
        for _ in range(60):
            x = x * x
        return x

    assert optimized(Model(squares).eval(), values()).report.fired == ()


@pytest.mark.parametrize(("calls", "native"), [(8, [F.silu]), (9, [])])
def test_a_spelling_is_eight_calls_deep_at_most(calls: int, native: list[Any]) -> None:
    def gated(m: Any, x: Tensor) -> Tensor:
        gate = x
        for _ in range(calls - 2):
            gate = gate * 1
        return x * torch.sigmoid(gate)

    assert [
        each for each in callees(optimized(Model(gated).eval(), values())) if each is F.silu
    ] == native


@pytest.mark.parametrize("case", SPELLINGS)
def test_infinities_are_what_the_spelling_makes_of_them(case: str) -> None:
    model = Model(SPELLINGS[case][0]).eval()
    finite = [0.0, -0.0] if "gelu" in case else [0.0, -0.0, 1e30, -1e30]
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, *finite] * 8)

    fast = optimized(model, x)

    torch.testing.assert_close(fast(x), model(x), equal_nan=True)


def test_later_integers_are_an_error() -> None:
    fast = optimized(Model(lambda m, x: x * torch.sigmoid(x)).eval(), values())

    with pytest.raises(NotImplementedError):
        fast(torch.arange(4))
