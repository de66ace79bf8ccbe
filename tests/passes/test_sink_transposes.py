"""Transposes move behind elementwise operations where another transpose waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.core.node import callee
from optimizer.testing import assert_equivalent, untouched
from tests.single_pass import Forward

NAME = "sink_transposes"
LAYOUTS = (torch.permute, torch.transpose, torch.t, torch.movedim)


def model_of(function: Callable[[Tensor], Any]) -> nn.Module:
    return Forward(lambda _, x: function(x)).eval()


def optimized(function: Callable[[Tensor], Any], *inputs: Tensor) -> Any:
    model = model_of(function)
    with untouched(model):
        only = [NAME, "compose_transposes"]
        return optimizer.optimize(model, inputs or None, only=only, check=None, level=1)


def transposes(fast: Any) -> int:
    return sum(callee(node) in LAYOUTS for node in fast.graph.nodes)


def tensor(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh, a method": lambda y: y.tanh(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.5),
    "a number times it": lambda y: 0.5 * y,
    "a keyword": lambda y: torch.add(y, 1.0, alpha=2),
    "a quotient": lambda y: 1 / (y + 4.0),
    "a chain": lambda y: (-torch.relu(y) + 1.0).exp(),
    "both operands": lambda y: y * torch.sigmoid(y),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_pair_around_an_operation_vanishes_and_keeps_every_bit(
    operation: str, dtype: torch.dtype
) -> None:
    function = lambda x: OPERATIONS[operation](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # noqa: E731

    fast = optimized(function, tensor(2, 3, 4, 5).to(dtype))

    assert transposes(fast) == 0
    for shape in ((2, 3, 4, 5), (7, 17, 9, 3), (1, 2, 33, 1)):
        x = tensor(*shape).to(dtype)
        assert_equivalent(model_of(function), fast, (x,), exact=True)
        assert_equivalent(model_of(function), fast, (x.mT.contiguous().mT,), exact=True)


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT).mT  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh])
def test_a_layer_is_an_operation_unless_it_has_a_hook(kind: type[nn.Module]) -> None:
    model, x = Around(kind()).eval(), tensor(2, 3, 4)

    fast = optimizer.optimize(model, x, level=1)
    model.layer.register_forward_hook(lambda module, args, result: result.cumsum(-1))
    hooked = optimizer.optimize(model, x, level=1)

    assert transposes(fast) == 0
    assert transposes(hooked) == 2
    assert_equivalent(model, hooked, (x,), exact=True)


def two_inputs(x: Tensor) -> Tensor:
    return (x.mT + torch.relu(x * 2.0).mT).mT


def twice(x: Tensor) -> Tensor:
    return torch.relu(torch.tanh(x.permute(1, 2, 0)).permute(1, 2, 0)).permute(1, 2, 0)


def three_cycles(x: Tensor) -> Tensor:
    return torch.tanh(x.permute(1, 2, 0)).permute(1, 2, 0)


def read_elsewhere(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.mT
    return torch.relu(y).mT, y.exp()


def written_afterwards(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.relu(x.mT).mT
    y.mul_(2.0)
    return y, x


def written_before(x: Tensor) -> Tensor:
    y = x.clone()
    z = y.mT
    y.mul_(2.0)
    w = torch.tanh(z).mT
    y.add_(1.0)
    return w + y


COUNTS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "two operands": (two_inputs, 0),
    "through two operations": (twice, 0),
    "a pair that does not cancel": (three_cycles, 1),
    "an operand with another reader": (read_elsewhere, 1),
    "a result that is written": (written_afterwards, 0),
    "a source that is written around it": (written_before, 0),
}


@pytest.mark.parametrize("case", COUNTS)
def test_transposes_meet(case: str) -> None:
    function, left = COUNTS[case]
    x = tensor(2, 3, 4)

    fast = optimized(function, x)

    assert fast.report.counts()[NAME] >= 1
    assert transposes(fast) == left
    assert_equivalent(model_of(function), fast, (x,), exact=True)
    assert_equivalent(model_of(function), fast, (tensor(5, 6, 7),), exact=True)


LEFT: dict[str, Callable[[Tensor], Any]] = {
    "no second transpose": lambda x: torch.relu(x.mT),
    "no first transpose": lambda x: torch.relu(x).mT,
    "an operand that is not transposed": lambda x: (x.mT + x.new_ones(4, 3)).mT,
    "an operation in place": lambda x: torch.relu_(x.exp().mT).mT,
    "something else that moves elements": lambda x: torch.relu(x.mT.flip(1)).mT,
    "a flip in the place of the first": lambda x: torch.relu(torch.flip(x, (1,))).flip(1),
    "a roll in the place of the last": lambda x: torch.relu(x.mT).roll(1, 1),
    "a running sum": lambda x: x.mT.cumsum(-1).mT,
    "a reduction": lambda x: x.mT.softmax(-1).mT,
    "a kernel that depends on the layout": lambda x: F.gelu(x.mT).mT,
    "axes that are computed": lambda x: torch.relu(x.permute(0, x.dim() - 1, 1)).mT,
    "outer axes that are computed": lambda x: torch.relu(x.mT).permute(0, x.dim() - 1, 1),
}


@pytest.mark.parametrize("case", LEFT)
def test_leaves_alone(case: str) -> None:
    fast = optimized(LEFT[case], tensor(2, 3, 4))

    assert NAME not in fast.report.counts()
    assert [refusal for refusal in fast.report.refused if refusal.name == NAME] == []
    assert_equivalent(model_of(LEFT[case]), fast, (tensor(2, 3, 4),), exact=True)


def read_between(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.relu(x.mT)
    return y.mT, y


def broadcast(x: Tensor) -> Tensor:
    return (x.transpose(0, 1) + x[0].transpose(0, 1)).transpose(0, 1)


# name: forward, shape, reason
REFUSALS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...], str]] = {
    "a reader of what lies between": (
        read_between, (2, 3, 4), "a value between the transposes is read elsewhere",
    ),
    "other axes": (
        lambda x: (x.permute(1, 2, 0) + x.permute(2, 0, 1)).permute(1, 0, 2),
        (3, 3, 3),
        "the operands are transposed differently",
    ),
    "other axes of the same function": (
        lambda x: (x.transpose(0, 1) + x.transpose(1, 2)).transpose(0, 1),
        (3, 3, 3),
        "the operands are transposed differently",
    ),
    "another function of the same axes": (
        lambda x: (x.transpose(0, -1) + x.movedim(0, -1)).transpose(0, 1),
        (3, 3, 3),
        "the operands are transposed differently",
    ),
    "fewer dimensions": (broadcast, (4, 4, 4), "the operands differ in shape"),
    "a row and a column": (
        lambda x: (x[:1].mT + x[:, :1].mT).mT, (1, 4), "the operands differ in shape",
    ),
    "a row that is repeated": (
        lambda x: torch.relu(x[:1, :, None].expand(2, 3, 5, 4).permute(2, 3, 0, 1)).mT,
        (2, 3, 4),
        "what is transposed may be repeated in memory",
    ),
    "a row that is repeated in other calls": (
        lambda x: torch.relu(torch.broadcast_to(x[:1], x.shape).mT).mT,
        (1, 4),
        "what is transposed may be repeated in memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    function, shape, reason = REFUSALS[case]
    x = tensor(*shape)

    fast = optimized(function, x)

    assert [r.reason for r in fast.report.refused if r.name == NAME] == [reason]
    assert NAME not in fast.report.counts()
    assert_equivalent(model_of(function), fast, (x,), exact=True)


def test_refuses_an_input_of_another_memory_order() -> None:
    model, x = model_of(lambda x: torch.relu(x.permute(2, 3, 0, 1)).mT), tensor(1, 3, 1, 4)
    rows = x.expand(2, 3, 5, 4)

    fast = optimizer.optimize(model, rows, level=0)

    reasons = [r.reason for r in fast.report.refused if r.name == NAME]
    assert reasons == ["the result would be laid out differently in memory"]
    assert_equivalent(model, fast, (rows,), exact=True)


def test_nothing_is_known_to_be_pure_without_example_inputs() -> None:
    assert transposes(optimized(lambda x: torch.relu(x.mT).mT)) == 2


def test_the_rank_of_two_operands_is_required_of_later_calls() -> None:
    fast = optimized(two_inputs, tensor(2, 3, 4))

    with pytest.raises(optimizer.InputError, match="3 dimensions and got 2"):
        fast(tensor(3, 4))


@pytest.mark.parametrize("count", [10, 100])
def test_a_chain_with_operations_between_needs_one_transpose(count: int) -> None:
    def function(x: Tensor) -> Tensor:
        for position in range(count):
            x = (-x if position % 2 else x + 0.5).permute(1, 2, 0)
        return x

    fast = optimized(function, tensor(2, 3, 4))

    assert fast.report.counts()[NAME] < count  # each moves once, not once for each before it
    assert transposes(fast) == 1
    assert fast(tensor(2, 3, 4)).stride() == function(tensor(2, 3, 4)).stride()
    assert_equivalent(model_of(function), fast, (tensor(2, 3, 4),), exact=True)


def test_a_view_that_is_written_later_is_one_of_what_was_sunk() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = x.permute(1, 2, 0).sigmoid().transpose(0, 1)
        z = y + y
        y.mul_(2.0)
        return (z + (y + y)).transpose(0, 1)

    given, x = Forward(forward).eval(), torch.randn(2, 3, 3, dtype=torch.float64)

    fast = optimizer.optimize(given, x, level=1)

    assert fast.report.counts()["sink_transposes"] == 2
    torch.testing.assert_close(fast(x), given(x), rtol=0, atol=0)
