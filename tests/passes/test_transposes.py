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
UNKNOWN_RANK = "its rank depends on sizes, through a squeeze"


def model_of(text: str) -> nn.Module:
    return Forward(text).eval()


def tensor(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64)


def chain(*steps: str) -> str:
    """Steps on `x`, one after another."""
    return "; ".join([*(f"x = {step}" for step in steps), "return x"])


CUBE = tensor(2, 3, 4)
# Each swaps the axes 1 and 2 of three.
SWAPS = texts(
    """
    x.transpose(1, 2); x.transpose(2, 1); x.transpose(-1, -2); x.transpose(1, -1); x.mT;
    x.transpose(dim1=1, dim0=2); torch.transpose(x, 1, 2); torch.transpose(input=x, dim0=1, dim1=2);
    x.swapaxes(1, 2); x.swapaxes(axis0=1, axis1=-1); x.swapdims(1, 2); torch.swapaxes(x, 1, 2);
    torch.swapdims(x, 1, 2); x.permute(0, 2, 1); x.permute((0, 2, 1)); x.permute([0, 2, 1]);
    x.permute(0, -1, -2); x.permute(dims=(0, 2, 1)); torch.permute(x, (0, 2, 1));
    torch.permute(input=x, dims=(0, 2, 1)); x.movedim(1, 2); x.movedim(-1, 1);
    x.movedim((1, 2), (2, 1)); x.movedim(source=1, destination=2); x.moveaxis(1, 2);
    torch.movedim(x, 1, 2); torch.moveaxis(x, (2, 1), (1, 2))
    """
)


@pytest.mark.parametrize(
    "inner", texts("x.transpose(1, 2); x.permute(0, -1, -2); x.movedim(1, 2); x.mT")
)
@pytest.mark.parametrize("outer", SWAPS)
def test_two_swaps_vanish_in_every_spelling(outer: str, inner: str) -> None:
    tried(COMPOSE, model_of(chain(inner, outer, "torch.exp(x)")), (CUBE,), [torch.exp])


@pytest.mark.parametrize("spelling", SWAPS)
def test_a_single_swap_is_left_as_it_is(spelling: str) -> None:
    assert len(callees(tried(COMPOSE, model_of(spelling), (CUBE,), 0))) == 1


def test_two_permutes_compose() -> None:
    for inner, outer in product(permutations(range(3)), repeat=2):
        model = model_of(f"x.permute{inner}.permute{outer}")

        fast = optimized_by(COMPOSE, model, CUBE)

        same = model(CUBE).shape == CUBE.shape
        assert callees(fast) == ([] if same else [torch.permute])
        assert_equivalent(model, fast, (CUBE,), exact=True)


CYCLE, BACK = "x.permute(1, 2, 0)", "x.permute(2, 0, 1)"
MANY: dict[Any, str] = {
    ((2, 3, 4),): f"""
    {CYCLE}.permute(1, 2, 0).permute(1, 2, 0); {CYCLE}.permute(2, 0, 1); x.transpose(1, 1);
    x.permute(-2, -1, -3).permute(-2, -1, -3).permute(-2, -1, -3); x.permute(0, -2, 2)
    """,
    ((2, 3, 4), torch.permute): f"""
    {CYCLE}.permute(1, 2, 0)
    {chain(*[CYCLE, *SWAPS][:21])}
    """,
    ((2, 3, 1, 2, 4),): "x.permute(0, 2, 3, 4, 1).movedim(-1, 1)",
    ((2, 3, 4, 5),): "x.movedim((0, -1), (-1, 1)).movedim((3, 1), (0, 3))",
    ((3, 4),): "x.t().T; torch.t(x).transpose(-2, -1)",
    ((3,),): "torch.t(torch.t(x))",
}


@spelled(MANY, cells="forward case")
def test_a_run_becomes_one_or_none(forward: str, case: Any) -> None:
    (shape, *left), model = case, model_of(forward)

    fast = tried(COMPOSE, model, (tensor(*shape),), left)

    assert fast(tensor(*shape)).stride() == model(tensor(*shape)).stride()


COMPOSED = {
    (torch.transpose,): "y = x.transpose(1, 2); return (y, y.transpose(1, 2))",
    1: """
    y = x.clone().transpose(1, 2); y.add_(1.0); return y.transpose(1, 2)
    y = x.clone().transpose(1, 2); y[y > 3.0] = 0.0; return y.transpose(1, 2)
    y = x.transpose(1, 2).transpose(1, 2); y.mul_(2.0); return y + x
    """,
    UNKNOWN_RANK: "torch.squeeze(x).transpose(1, 2).mT",
    "its axes are computed": "x.permute(0, x.dim() - 1, 1).permute(0, 2, 1)",
    "'getattr_1' has no known shape": """
    x.masked_select(x > 0).reshape(-1, 1, 1).transpose(1, 2).mT
    """,
}
WITHOUT_EXAMPLES = {
    (): """
    x.transpose(1, 2).transpose(1, 2); x.permute(0, 2, 1).transpose(1, 2);
    torch.permute(x, (0, 2, 1)).transpose(1, 2)
    """,
    "the graph was captured without example inputs": "x.transpose(1, 2).mT",
}


@spelled(COMPOSED)
def test_what_is_composed_is_a_view_all_the_same(forward: str, outcome: Any) -> None:
    tried(COMPOSE, model_of(forward), (CUBE,), outcome)


@spelled(WITHOUT_EXAMPLES)
def test_no_example_inputs_are_needed_where_the_rank_is_stated(forward: str, outcome: Any) -> None:
    tried(COMPOSE, model_of(forward), (), outcome, (CUBE,))


def test_equal_transposes_cancel_at_any_rank_and_a_squeeze_may_give_another_later() -> None:
    ends, squeezed = "x.transpose(0, -1).transpose(-1, 0)", "torch.squeeze(x).transpose(1, 2).mT"

    tried(COMPOSE, model_of(ends), (tensor(2, 3),), [], (CUBE,))
    tried(COMPOSE, model_of(squeezed), (CUBE,), UNKNOWN_RANK, (tensor(1, 2, 3, 4),))


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


OPERATIONS = texts(
    """
    torch.relu(x); x.tanh(); torch.sigmoid(x); F.silu(x); F.leaky_relu(x, 0.5); 0.5 * x;
    torch.add(x, 1.0, alpha=2); 1 / (x + 4.0); (-torch.relu(x) + 1.0).exp(); x * torch.sigmoid(x)
    """
)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_pair_around_an_operation_vanishes_and_keeps_every_bit(
    operation: str, dtype: torch.dtype
) -> None:
    text = chain("x.permute(0, 2, 3, 1)", operation, "x.permute(0, 3, 1, 2)")
    shapes = ((2, 3, 4, 5), (7, 17, 9, 3), (1, 2, 33, 1))
    x, *others = (tensor(*shape).to(dtype) for shape in shapes)

    sunk(text, 0, x, later=[*others, *(each.mT.contiguous().mT for each in (x, *others))])


@pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh])
def test_a_layer_is_an_operation_unless_it_has_a_hook(kind: type[nn.Module]) -> None:
    model = Forward("m.layer(x.mT).mT", layer=kind()).eval()

    fast = optimizer.optimize(model, CUBE, level=1)
    model.layer.register_forward_hook(lambda module, args, result: result.cumsum(-1))
    hooked = optimizer.optimize(model, CUBE, level=1)

    assert [sum(c in PERMUTATIONS for c in callees(each)) for each in (fast, hooked)] == [0, 2]
    assert_equivalent(model, hooked, (CUBE,), exact=True)


TWO_OPERANDS = "(x.mT + torch.relu(x * 2.0).mT).mT"
MEET = {
    0: f"""
    {TWO_OPERANDS}
    torch.relu(torch.tanh({CYCLE}).permute(1, 2, 0)).permute(1, 2, 0)
    y = torch.relu(x.mT).mT; y.mul_(2.0); return (y, x)
    y = x.clone(); z = y.mT; y.mul_(2.0); w = torch.tanh(z).mT; y.add_(1.0); return w + y
    """,
    1: f"torch.tanh({CYCLE}).permute(1, 2, 0); (torch.relu(y := x.mT).mT, y.exp())",
}
LEFT = """
    torch.relu(x.mT); torch.relu(x).mT; (x.mT + x.new_ones(4, 3)).mT; torch.relu_(x.exp().mT).mT;
    torch.relu(x.mT.flip(1)).mT; torch.relu(torch.flip(x, (1,))).flip(1);
    torch.relu(x.mT).roll(1, 1); x.mT.cumsum(-1).mT; x.mT.softmax(-1).mT; F.gelu(x.mT).mT;
    torch.relu(x.permute(0, x.dim() - 1, 1)).mT; torch.relu(x.mT).permute(0, x.dim() - 1, 1)
"""


@spelled(MEET)
def test_transposes_meet(forward: str, outcome: int) -> None:
    sunk(forward, outcome, CUBE, later=[tensor(5, 6, 7)])


DIFFERENTLY = "the operands are transposed differently"
SHAPE = "the operands differ in shape"
REPEATED = "what is transposed may be repeated in memory"
STAY = {
    ((2, 3, 4), ()): LEFT,
    ((2, 3, 4), "a value between the transposes is read elsewhere"): """
    y = torch.relu(x.mT); return (y.mT, y)
    """,
    ((3, 3, 3), DIFFERENTLY): f"""
    ({CYCLE} + {BACK}).permute(1, 0, 2);
    (x.transpose(0, 1) + x.transpose(1, 2)).transpose(0, 1);
    (x.transpose(0, -1) + x.movedim(0, -1)).transpose(0, 1)
    """,
    ((4, 4, 4), SHAPE): "(x.transpose(0, 1) + x[0].transpose(0, 1)).transpose(0, 1)",
    ((1, 4), SHAPE): "(x[:1].mT + x[:, :1].mT).mT",
    ((2, 3, 4), REPEATED): """
    torch.relu(x[:1, :, None].expand(2, 3, 5, 4).permute(2, 3, 0, 1)).mT
    """,
    ((1, 4), REPEATED): "torch.relu(torch.broadcast_to(x[:1], x.shape).mT).mT",
}


@spelled(STAY, cells="forward case")
def test_transposes_stay(forward: str, case: Any) -> None:
    shape, reason = case
    sunk(forward, reason or [], tensor(*shape))


def test_refuses_an_input_of_another_memory_order() -> None:
    rows = tensor(1, 3, 1, 4).expand(2, 3, 5, 4)

    layout = "the result would be laid out differently in memory"
    sunk("torch.relu(x.permute(2, 3, 0, 1)).mT", layout, rows)


def test_nothing_is_known_to_be_pure_without_example_inputs() -> None:
    assert len(callees(sunk("torch.relu(x.mT).mT", []))) == 3


def test_a_rank_that_was_relied_on_is_required_of_later_calls() -> None:
    composed = tried(COMPOSE, model_of("x.transpose(1, 2).mT"), (CUBE,), [], (tensor(5, 6, 7),))

    with pytest.raises(optimizer.InputError, match="3 dimensions and got 4"):
        composed(tensor(2, 3, 4, 5))
    with pytest.raises(optimizer.InputError, match="3 dimensions and got 2"):
        sunk(TWO_OPERANDS, 0, CUBE)(tensor(3, 4))


@pytest.mark.parametrize("count", [10, 100])
def test_a_chain_with_operations_between_needs_one_transpose(count: int) -> None:
    text = chain(*["(x + 0.5).permute(1, 2, 0)", "(-x).permute(1, 2, 0)"] * (count // 2))

    fast = sunk(text, 1, CUBE)

    assert fast.report.counts()[SINK] < count  # each moves once, not once for each before it
    assert fast(CUBE).stride() == model_of(text)(CUBE).stride()


def test_a_view_that_is_written_later_is_one_of_what_was_sunk() -> None:
    turned = f"y = {CYCLE}.sigmoid().transpose(0, 1); z = y + y; y.mul_(2.0)"
    model = model_of(f"{turned}; return (z + (y + y)).transpose(0, 1)")
    x = torch.randn(2, 3, 3, dtype=torch.float64)

    fast = optimizer.optimize(model, x, level=1)

    assert fast.report.counts()[SINK] == 2
    torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)
