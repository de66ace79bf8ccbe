"""Transposes meet, and become one or none, in every spelling and at every rank."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import optimizer
from optimizer.testing import assert_equivalent
from tests.single_pass import Forward, callees, optimized_by, spelled, texts, tried

COMPOSE, SINK = "compose_transposes", "sink_transposes"
PERMUTATIONS = (torch.permute, torch.transpose, torch.t, torch.movedim)
CYCLE, BACK = "x.permute(1, 2, 0)", "x.permute(2, 0, 1)"


def model_of(text: str) -> nn.Module:
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda module, given, result: result.cumsum(-1))
    slopes = nn.PReLU(4, dtype=torch.float64)  # of the axis 1
    layers = {"sigmoid": nn.Sigmoid(), "leaky": nn.LeakyReLU(), "slopes": slopes}
    return Forward(text, hooked=hooked, **layers).eval()


def tensor(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64)


CUBE = tensor(2, 3, 4)
# Each swaps the axes 1 and 2 of three.
SWAPS = """
    x.transpose(-1, -2); x.mT; torch.transpose(input=x, dim0=1, dim1=2);
    x.swapaxes(axis0=1, axis1=-1); torch.swapdims(x, 1, 2); x.permute([0, 2, 1]);
    torch.permute(input=x, dims=(0, -1, 1)); x.movedim((1, 2), (2, 1));
    x.moveaxis(source=1, destination=2)"""


@pytest.mark.parametrize("outer", texts(SWAPS))
def test_two_swaps_vanish_in_every_spelling_and_one_stays(outer: str) -> None:
    for inner in ("x.transpose(1, 2)", "x.permute(0, -1, -2)", "x.movedim(1, 2)"):
        model = model_of(f"x = {inner}; x = {outer}; return torch.exp(x)")
        tried(COMPOSE, model, (CUBE,), [torch.exp])

    assert len(callees(tried(COMPOSE, model_of(outer), (CUBE,), 0))) == 1


def test_two_permutes_compose() -> None:
    for inner, outer in product(permutations(range(3)), repeat=2):
        model = model_of(f"x.permute{inner}.permute{outer}")

        fast = optimized_by(COMPOSE, model, CUBE)

        assert callees(fast) == [torch.permute] * (model(CUBE).shape != CUBE.shape)
        assert_equivalent(model, fast, (CUBE,), exact=True)


# The shape of the input, without one nothing, and the outcome
COMPOSED: dict[Any, str] = {
    ((2, 3, 4), ()): "x.transpose(1, 1); x.permute(0, -2, 2)",
    ((2, 3, 1, 2, 4), ()): "x.permute(0, 2, 3, 4, 1).movedim(-1, 1)",
    ((2, 3, 4, 5), ()): "x.movedim((0, -1), (-1, 1)).movedim((3, 1), (0, 3))",
    ((3, 4), ()): "x.t().T; torch.t(x).transpose(-2, -1)",
    ((2, 3, 4), 1): "y = x.clone().transpose(1, 2); y.add_(1.0); return y.transpose(1, 2)",
    ((2, 3, 4), "its rank depends on sizes"): """
    x.squeeze().transpose(1, 2).mT; x.flatten(0, x.shape[0] - 2).transpose(1, 2).mT;
    x.view(x.shape[:x.shape[0] + 1]).transpose(1, 2).mT""",
    ((2, 3, 4), "its axes are computed"): "x.permute(0, x.dim() - 1, 1).permute(0, 2, 1)",
    ((2, 3, 4), "'getattr_1' has no known shape"): """
    x.masked_select(x > 0).reshape(-1, 1, 1).transpose(1, 2).mT""",
    (None, ()): "x.permute(0, 2, 1).transpose(1, 2)",
    (None, "the graph was captured without example inputs"): "x.transpose(1, 2).mT",
}


@spelled(COMPOSED, cells="forward case")
def test_transposes_are_composed(forward: str, case: Any) -> None:
    shape, outcome = case
    calls = [(tensor(*shape),)] if shape else [(), (CUBE,)]

    tried(COMPOSE, model_of(forward), calls[0], outcome, *calls[1:])


def sunk(text: str, outcome: Any, *inputs: Tensor, later: Any = ()) -> Any:
    """The function after both passes, of which `outcome` is what the one says that sinks."""
    model = model_of(text)
    fast = optimized_by(SINK, model, *inputs, only=[SINK, COMPOSE])
    fired = SINK in fast.report.counts()
    reasons = [each.reason for each in fast.report.refused if each.name == SINK]
    left = sum(called in PERMUTATIONS for called in callees(fast))
    assert (left if fired else reasons) == ([outcome] if isinstance(outcome, str) else outcome)
    for x in (*inputs, *later):
        assert_equivalent(model, fast, (x,), exact=True)
    return fast


OPERATIONS = """
    m.leaky(x); m.sigmoid(x); x.tanh(); F.silu(x); torch.add(x, 1.0, alpha=2); 1 / (x + 4.0);
    (-torch.relu(x) + 1.0).exp(); x * torch.sigmoid(x)"""


@pytest.mark.parametrize("operation", texts(OPERATIONS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_pair_around_an_operation_vanishes_and_keeps_every_bit(operation, dtype):
    text = f"x = x.permute(0, 2, 3, 1); y = {operation}; return y.permute(0, 3, 1, 2)"
    x, *others = (
        tensor(*shape).to(dtype) for shape in ((2, 3, 4, 5), (7, 17, 9, 3), (1, 2, 33, 1))
    )

    sunk(text, 0, x, later=[*others, *(each.mT.contiguous().mT for each in (x, *others))])


SHAPE = "the operands differ in shape"
# The shape of the input, and how many transposes are left, or why all are
SUNK: dict[Any, Any] = {
    ((2, 3, 4), 0): f"""
    return (x.mT + torch.relu(x * 2.0).mT).mT
    return torch.relu(torch.tanh({CYCLE}).permute(1, 2, 0)).permute(1, 2, 0)
    y = torch.relu(x.mT).mT; y.mul_(2.0); return (y, x)
    y = x.clone(); z = y.mT; y.mul_(2.0); w = torch.tanh(z).mT; y.add_(1.0); return w + y""",
    ((2, 3, 4), 1): f"torch.tanh({CYCLE}).permute(1, 2, 0)",
    ((2, 3, 4), ()): """
    m.hooked(x.mT).mT; m.slopes(x.mT).mT; torch.relu(x.mT); (x.mT + x.new_ones(4, 3)).mT;
    F.gelu(x.mT).mT; torch.relu_(x.exp().mT).mT; x.mT.cumsum(-1).mT;
    torch.relu(x.permute(0, x.dim() - 1, 1)).mT; torch.relu(x.mT).permute(0, x.dim() - 1, 1)""",
    ((2, 3, 4), "a value between the transposes is read elsewhere"): """
    y = torch.relu(x.mT); return (y.mT, y)""",
    ((3, 3, 3), "the operands are transposed differently"): f"({CYCLE} + {BACK}).permute(1, 0, 2)",
    ((1, 4), SHAPE): "(x[:1].mT + x[:, :1].mT).mT",
    ((2, 3, 4), "what is transposed may be repeated in memory"): """
    torch.relu(x[:1, :, None].expand(2, 3, 5, 4).permute(2, 3, 0, 1)).mT""",
}


@spelled(SUNK, cells="forward case")
def test_transposes_sink(forward: str, case: Any) -> None:
    shape, outcome = case
    later = [tensor(5, 6, 7)] if isinstance(outcome, int) else []

    sunk(forward, [] if outcome == () else outcome, tensor(*shape), later=later)


def test_an_input_of_another_memory_order_and_one_that_is_unknown_stay() -> None:
    layout = "the result would be laid out differently in memory"

    sunk("torch.relu(x.permute(2, 3, 0, 1)).mT", layout, tensor(1, 3, 1, 4).expand(2, 3, 5, 4))
    assert len(callees(sunk("torch.relu(x.mT).mT", []))) == 3


def test_a_rank_that_was_relied_on_is_required_of_later_calls() -> None:
    composed = optimized_by(COMPOSE, model_of("x.transpose(1, 2).mT"), CUBE)

    with pytest.raises(optimizer.InputError, match="3 dimensions and got 4"):
        composed(tensor(2, 3, 4, 5))


def test_a_long_chain_needs_one_transpose_and_each_moves_once() -> None:
    steps = ["x = (x + 0.5).permute(1, 2, 0)", "x = (-x).permute(1, 2, 0)"] * 50

    fast = sunk("; ".join([*steps, "return x"]), 1, CUBE)

    assert fast.report.counts()[SINK] < 100
