"""The verbs for editing a graph by hand: what they change, what they keep, what they refuse."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer import toolkit
from optimizer.testing import assert_equivalent, inputs_like, randomize, untouched
from tests.single_pass import Forward as Held

Forward = Callable[[Any, Tensor], Any]


class Layers(Held):
    """Runs a forward of a case over layers of its own."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(
            forward,
            conv=nn.Conv2d(3, 4, 3),
            bn=nn.BatchNorm2d(4, eps=0.125),
            conv2=nn.Conv2d(4, 4, 1, bias=False),
            bn2=nn.BatchNorm2d(4, eps=0.5),
            conv3=nn.Conv2d(4, 4, 1),
            linear=nn.Linear(5, 2),
            drop=nn.Dropout(0.25),
            pool=nn.MaxPool2d(2),
            pool3=nn.MaxPool2d(3),
            relu=nn.ReLU(),
            inplace=nn.ReLU(inplace=True),
        )


X = inputs_like([(2, 3, 5, 5)], "random", 0)


def model_of(forward: Forward) -> nn.Module:
    return randomize(Layers(forward).double().eval())


def captured(forward: Forward, *inputs: Tensor) -> Any:
    return optimizer.capture(model_of(forward), inputs or None)


def computes(module: nn.Module, forward: Forward) -> None:
    """Assert that an edited module computes what another forward does, on any data."""
    assert_equivalent(model_of(forward), module, X)


NETWORK: Forward = lambda m, x: F.relu(m.bn(m.conv(x))).relu() + 1  # noqa: E731


@pytest.mark.parametrize("target", [torch.relu, F.relu, "relu", "relu_", nn.ReLU, torch.relu_])
def test_finds_every_spelling_by_any_spelling(target: Any) -> None:
    module = captured(lambda m, x: m.relu(x).relu() + F.relu(torch.relu(x)))

    found = toolkit.find(module, target)

    assert [node.name for node in found] == ["relu", "relu_1", "relu_2", "relu_3"]
    assert [node.name for node in found[0].all_input_nodes] == ["x"]
    assert [node.name for node in found[0].users] == ["relu_1"]


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (nn.Conv2d, ["conv"]),
        ("mean", ["mean"]),
        (nn.Dropout, ["drop"]),
        (torch.add, ["add", "add_1"]),
        ((torch.add, operator.add), ["add", "add_1"]),
        (nn.Module, []),
    ],
)
def test_finds_modules_methods_and_functions(target: Any, names: list[str]) -> None:
    module = captured(lambda m, x: torch.add(m.drop(m.conv(x)).mean(), 1) + 2)

    assert [node.name for node in toolkit.find(module, target)] == names


def test_a_table_has_a_row_for_each_node() -> None:
    module = captured(lambda m, x: m.conv(x).relu().sum(), *X)

    assert toolkit.table(module).splitlines() == [
        "name    calls   reads  read by  shape",
        "x       x              conv     2x3x5x5",
        "conv    Conv2d  x      relu     2x4x3x3",
        "relu    F.relu  conv   sum_1    2x4x3x3",
        "sum_1   .sum    relu   output   scalar",
        "output  output  sum_1",
    ]
    assert toolkit.table(toolkit.find(module, nn.Conv2d)).count("\n") == 1


REPLACEMENTS: dict[str, tuple[Forward, Any, Any, Forward]] = {
    "add by mul": (lambda m, x: torch.add(x, x), torch.add, torch.mul, lambda m, x: x * x),
    "the operator too": (
        lambda m, x: torch.add(x, 3) + x, (torch.add, operator.add), torch.mul,
        lambda m, x: x * 3 * x,
    ),
    "ReLU by a function": (
        lambda m, x: m.relu(m.conv(x)), nn.ReLU, F.gelu, lambda m, x: F.gelu(m.conv(x)),
    ),
    "ReLU by a class": (
        lambda m, x: F.relu(x).relu(), nn.ReLU, nn.GELU, lambda m, x: F.gelu(F.gelu(x)),
    ),
    "ReLU by a module": (
        lambda m, x: m.relu(x), "relu", nn.LeakyReLU(0.5), lambda m, x: F.leaky_relu(x, 0.5),
    ),
    "a method": (lambda m, x: x.sum(dim=1), "sum", "mean", lambda m, x: x.mean(dim=1)),
    "settings that count": (
        lambda m, x: F.softmax(x, dim=1), F.softmax, F.log_softmax,
        lambda m, x: F.log_softmax(x, dim=1),
    ),
    "an identity": (lambda m, x: m.drop(x) + 1, nn.Dropout, nn.Identity, lambda m, x: x + 1),
    "in place on a layer's result": (
        lambda m, x: m.inplace(m.conv(x)), nn.ReLU, F.gelu, lambda m, x: F.gelu(m.conv(x)),
    ),
    "in place, read again": (
        lambda m, x: (y := m.conv(x), m.inplace(y))[0] + y, nn.ReLU, F.gelu,
        lambda m, x: 2 * F.gelu(m.conv(x)),
    ),
    "in place on a view": (
        lambda m, x: (y := m.conv(x), F.relu(y[0], inplace=True))[0], nn.ReLU, nn.GELU,
        lambda m, x: (y := m.conv(x), y[0].copy_(F.gelu(y[0])))[0],
    ),
    "in place on an input": (
        lambda m, x: m.inplace(x), nn.ReLU, torch.neg, lambda m, x: x.copy_(-x),
    ),
    "nothing to replace": (NETWORK, nn.GELU, nn.ReLU, NETWORK),
}  # fmt: skip


@pytest.mark.parametrize("case", REPLACEMENTS)
def test_replaces_an_operation(case: str) -> None:
    forward, target, replacement, expected = REPLACEMENTS[case]
    module = captured(forward)
    with untouched(module):
        code = module.code
        edited = toolkit.replace_op(module, target, replacement)

    assert module.code == code
    computes(edited, expected)


def test_a_replaced_layer_leaves_with_its_weights() -> None:
    edited = toolkit.replace_op(captured(NETWORK), nn.Conv2d, nn.Identity)

    assert "conv.weight" not in edited.state_dict()
    assert not edited.identity.training


def test_an_edited_module_shares_its_weights_and_is_optimized_as_any_other() -> None:
    module = captured(NETWORK, *X)

    edited = toolkit.replace_op(module, nn.ReLU, F.gelu)
    fast = optimizer.optimize(edited, X, level=1)

    assert edited.conv.weight is module.conv.weight
    assert "2x3x5x5" in toolkit.table(module)
    assert "2x3x5x5" not in toolkit.table(edited), "shapes may be others now"
    assert fast.report.counts()
    computes(fast, lambda m, x: F.gelu(F.gelu(m.bn(m.conv(x)))) + 1)


def test_inserts_between_a_node_and_its_readers() -> None:
    module = captured(lambda m, x: m.conv(x) + x.sum())

    added = toolkit.insert_after(toolkit.find(module, nn.Conv2d)[0], torch.mul, 2)

    assert [node.name for node in added.all_input_nodes] == ["conv"]
    computes(module, lambda m, x: m.conv(x) * 2 + x.sum())


def test_inserts_for_some_readers_only_and_after_every_input() -> None:
    module = optimizer.capture(TwoInputs())
    first, second = (node for node in module.graph.nodes if node.op == "placeholder")

    toolkit.insert_after(first, "add", second, readers=toolkit.find(module, torch.neg))

    x, y = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(module(x, y), -(x + y) * x)


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.neg(x) * x


def test_removes_a_node() -> None:
    module = captured(lambda m, x: m.relu(m.conv(x)) + 1)

    toolkit.remove_node(toolkit.find(module, nn.ReLU)[0])
    computes(module, lambda m, x: m.conv(x) + 1)
    toolkit.remove_node(toolkit.find(module, nn.Conv2d)[0])
    computes(module, lambda m, x: x + 1)

    assert module.state_dict() == {}


def test_removes_a_node_of_several_inputs_for_the_one_that_is_named() -> None:
    module = captured(lambda m, x: (m.conv(x) + m.conv(-x)).relu())
    total = toolkit.find(module, operator.add)[0]

    toolkit.remove_node(total, instead=total.all_input_nodes[1])

    computes(module, lambda m, x: m.conv(-x).relu())


RULES: dict[str, tuple[Forward, dict[Any, Any], Forward]] = {
    "relu": (
        lambda m, x: m.relu(m.conv(x)),
        {F.relu: lambda x: (x > 0) * x},
        lambda m, x: (y := m.conv(x)) * (y > 0),
    ),
    "a rule that needs another": (
        lambda m, x: F.hardtanh(x) + x.relu(),
        {
            F.hardtanh: lambda x: 1 - torch.relu(2 - F.relu(x + 1)),
            nn.ReLU: lambda x: torch.where(x > 0, x, torch.zeros(())),
        },
        lambda m, x: x.clamp(-1, 1) + x.clamp(min=0),
    ),
    "a layer": (
        lambda m, x: m.linear(x) + m.linear(-x),
        {nn.Linear: lambda linear, x: x @ linear.weight.t() + linear.bias},
        lambda m, x: m.linear(x) + m.linear(-x),
    ),
    "settings": (
        lambda m, x: F.softmax(x, dim=1),
        {F.softmax: lambda x, dim: x.exp() / x.exp().sum(dim, keepdim=True)},
        lambda m, x: F.softmax(x, 1),
    ),
    "in place": (
        lambda m, x: (y := x * 2, m.inplace(y))[0] - 1,
        {"relu": lambda x: (x > 0) * x},
        lambda m, x: (2 * x).relu() - 1,
    ),
    "to its own input": (
        lambda m, x: m.drop(x) + 1,
        {nn.Dropout: lambda x, **settings: x},
        lambda m, x: x + 1,
    ),
    "assignment": (
        lambda m, x: x.abs(),
        {"abs": lambda x: (y := x.clone(), operator.setitem(y, x < 0, 0.0))[0]},
        lambda m, x: x.relu(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_decomposes(case: str) -> None:
    forward, rules, expected = RULES[case]
    module = captured(forward)
    with untouched(module):
        edited = toolkit.decompose(module, rules)

    assert not toolkit.find(edited, tuple(rules))
    computes(edited, expected)
