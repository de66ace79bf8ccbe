"""The verbs for editing a graph by hand: what they change, what they keep, what they refuse."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import fuse_conv_bn_eval

import optimizer
from optimizer import CaptureError, InputError, toolkit
from optimizer.testing import assert_equivalent, inputs_like, randomize, untouched
from tests.repository import table
from tests.single_pass import Forward, rows

X = inputs_like([(2, 3, 5, 5)], "random", 0)


def model_of(forward: str) -> nn.Module:
    """A model that runs a text over layers of its own."""
    model = Forward(
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
    return randomize(model.double().eval())


def captured(forward: str, *inputs: Tensor) -> Any:
    return optimizer.capture(model_of(forward), inputs or None)


def computes(module: nn.Module, forward: str) -> None:
    """Assert that an edited module computes what another forward does, on any data."""
    assert_equivalent(model_of(forward), module, X)


def edits(verb: Any, forward: str, *arguments: Any, to: str) -> Any:
    """Assert what a verb makes of a graph, and that it leaves the graph itself alone."""
    module = captured(forward)
    code = module.code
    with untouched(module):
        edited = verb(module, *arguments)
    assert module.code == code
    computes(edited, to)
    return edited


NETWORK = "F.relu(m.bn(m.conv(x))).relu() + 1"
BLOCKS = "m.bn2(m.conv2(m.bn(m.conv(x)).relu()))"


@pytest.mark.parametrize("target", [torch.relu, F.relu, "relu", "relu_", nn.ReLU, torch.relu_])
def test_finds_every_spelling_by_any_spelling(target: Any) -> None:
    found = toolkit.find(captured("m.relu(x).relu() + F.relu(torch.relu(x))"), target)

    assert [node.name for node in found] == ["relu", "relu_1", "relu_2", "relu_3"]
    assert [node.name for node in found[0].all_input_nodes] == ["x"]
    assert [node.name for node in found[0].users] == ["relu_1"]


@table(
    "target names",
    (nn.Conv2d, ["conv"]),
    ("mean", ["mean"]),
    (nn.Dropout, ["drop"]),
    (torch.add, ["add", "add_1"]),
    ((torch.add, operator.add), ["add", "add_1"]),
    (nn.Module, []),
)
def test_finds_modules_methods_and_functions(target: Any, names: list[str]) -> None:
    module = captured("torch.add(m.drop(m.conv(x)).mean(), 1) + 2")

    assert [node.name for node in toolkit.find(module, target)] == names


def test_a_table_has_a_row_for_each_node() -> None:
    module = captured("m.conv(x).relu().sum()", *X)

    assert toolkit.table(module).splitlines() == [
        "name    calls   reads  read by  shape",
        "x       x              conv     2x3x5x5",
        "conv    Conv2d  x      relu     2x4x3x3",
        "relu    F.relu  conv   sum_1    2x4x3x3",
        "sum_1   .sum    relu   output   scalar",
        "output  output  sum_1",
    ]
    assert toolkit.table(toolkit.find(module, nn.Conv2d)).count("\n") == 1


CONV = "m.relu(m.conv(x))"
WRITTEN_VIEW = "(y := m.conv(x), F.relu(y[0], inplace=True))[0]"
REPLACEMENTS: dict[str, tuple[Any, ...]] = {
    "add": ("torch.add(x, x)", torch.add, torch.mul, "x * x"),
    "operator": ("torch.add(x, 3) + x", (torch.add, operator.add), torch.mul, "x * 3 * x"),
    "by a function": (CONV, nn.ReLU, F.gelu, "F.gelu(m.conv(x))"),
    "by a class": ("F.relu(x).relu()", nn.ReLU, nn.GELU, "F.gelu(F.gelu(x))"),
    "by a module": ("m.relu(x)", "relu", nn.LeakyReLU(0.5), "F.leaky_relu(x, 0.5)"),
    "a method": ("x.sum(dim=1)", "sum", "mean", "x.mean(dim=1)"),
    "settings": ("F.softmax(x, dim=1)", F.softmax, F.log_softmax, "F.log_softmax(x, dim=1)"),
    "an identity": ("m.drop(x) + 1", nn.Dropout, nn.Identity, "x + 1"),
    "in place": ("m.inplace(m.conv(x))", nn.ReLU, F.gelu, "F.gelu(m.conv(x))"),
    "read again": (
        "(y := m.conv(x), m.inplace(y))[0] + y", nn.ReLU, F.gelu, "2 * F.gelu(m.conv(x))",
    ),
    "a view": (WRITTEN_VIEW, nn.ReLU, nn.GELU, "(y := m.conv(x), y[0].copy_(F.gelu(y[0])))[0]"),
    "an input": ("m.inplace(x)", nn.ReLU, torch.neg, "x.copy_(-x)"),
    "nothing": (NETWORK, nn.GELU, nn.ReLU, NETWORK),
}  # fmt: skip


@rows("forward target replacement to", REPLACEMENTS)
def test_replaces_an_operation(forward: str, target: Any, replacement: Any, to: str) -> None:
    edits(toolkit.replace_op, forward, target, replacement, to=to)


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
    computes(fast, "F.gelu(F.gelu(m.bn(m.conv(x)))) + 1")


def test_inserts_between_a_node_and_its_readers() -> None:
    module = captured("m.conv(x) + x.sum()")

    added = toolkit.insert_after(toolkit.find(module, nn.Conv2d)[0], torch.mul, 2)

    assert [node.name for node in added.all_input_nodes] == ["conv"]
    computes(module, "m.conv(x) * 2 + x.sum()")


def test_inserts_for_some_readers_only_and_after_every_input() -> None:
    class TwoInputs(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.neg(x) * x

    module = optimizer.capture(TwoInputs())
    first, second = (node for node in module.graph.nodes if node.op == "placeholder")

    toolkit.insert_after(first, "add", second, readers=toolkit.find(module, torch.neg))

    x, y = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(module(x, y), -(x + y) * x)


def test_removes_a_node() -> None:
    module = captured("m.relu(m.conv(x)) + 1")

    for target, to in ((nn.ReLU, "m.conv(x) + 1"), (nn.Conv2d, "x + 1")):
        toolkit.remove_node(toolkit.find(module, target)[0])
        computes(module, to)

    assert module.state_dict() == {}


def test_removes_a_node_of_several_inputs_for_the_one_that_is_named() -> None:
    module = captured("(m.conv(x) + m.conv(-x)).relu()")
    [total] = toolkit.find(module, operator.add)

    toolkit.remove_node(total, instead=total.all_input_nodes[1])

    computes(module, "m.conv(-x).relu()")


LINEAR = "m.linear(x) + m.linear(-x)"
DECOMPOSED: dict[str, tuple[str, dict[Any, Any], str]] = {
    "relu": (CONV, {F.relu: lambda x: (x > 0) * x}, "(y := m.conv(x)) * (y > 0)"),
    "a rule that needs another": (
        "F.hardtanh(x) + x.relu()",
        {
            F.hardtanh: lambda x: 1 - torch.relu(2 - F.relu(x + 1)),
            nn.ReLU: lambda x: torch.where(x > 0, x, torch.zeros(())),
        },
        "x.clamp(-1, 1) + x.clamp(min=0)",
    ),
    "a layer": (LINEAR, {nn.Linear: lambda linear, x: x @ linear.weight.t() + linear.bias}, LINEAR),
    "settings": (
        "F.softmax(x, dim=1)",
        {F.softmax: lambda x, dim: x.exp() / x.exp().sum(dim, keepdim=True)},
        "F.softmax(x, 1)",
    ),
    "in place": (
        "(y := x * 2, m.inplace(y))[0] - 1", {"relu": lambda x: (x > 0) * x}, "(2 * x).relu() - 1",
    ),
    "to its own input": ("m.drop(x) + 1", {nn.Dropout: lambda x, **settings: x}, "x + 1"),
    "assignment": (
        "x.abs()",
        {"abs": lambda x: (y := x.clone(), operator.setitem(y, x < 0, 0.0))[0]},
        "x.relu()",
    ),
}  # fmt: skip


@rows("forward rules to", DECOMPOSED)
def test_decomposes(forward: str, rules: Any, to: str) -> None:
    edited = edits(toolkit.decompose, forward, rules, to=to)

    assert not toolkit.find(edited, tuple(rules))


def of_conv(forward: str) -> nn.Module:
    return Forward(forward, conv=nn.Conv2d(1, 1, 1))


def conv_norm() -> nn.Module:
    return Forward("m.bn(m.conv(x))", conv=nn.Conv2d(1, 1, 1), bn=nn.BatchNorm2d(1))


def fused(conv: nn.Conv2d, bn: nn.BatchNorm2d) -> nn.Module:
    return fuse_conv_bn_eval(conv, bn)


def with_inner(forward: str) -> nn.Module:
    return Forward(forward, inner=conv_norm())


def relu_of_next(a: Tensor) -> Tensor:
    return torch.relu(a + 1)


POOL = Forward("m.pool(m.drop(x))", pool=nn.MaxPool2d(2), drop=nn.Dropout(0.25))
PATTERNS: dict[str, tuple[Any, ...]] = {
    "layers with weights": (BLOCKS, conv_norm(), fused, BLOCKS),
    "modules of one name are the ones that were matched": (
        BLOCKS,
        with_inner("m.inner(x).relu()"),
        with_inner("m.inner(x) * 0.5"),
        "m.bn2(m.conv2(m.bn(m.conv(x)) * 0.5))",
    ),
    "a function may leave a match alone": (
        BLOCKS,
        conv_norm(),
        lambda bn: nn.Identity() if bn.eps == 0.5 else None,
        "m.bn(m.conv(x)).relu()",
    ),
    "functions of values": (
        "(x + 1).relu() * 2 + F.relu(x + 1)",
        relu_of_next,
        lambda a: F.gelu(a - 1),
        "F.gelu(x - 1) * 2 + F.gelu(x - 1)",
    ),
    "one input twice": (
        "(x * x) + (x * (x + 1))", lambda a: a * a, torch.square, "x.square() + x * (x + 1)",
    ),
    "a pattern inside its own replacement": (
        "torch.exp(torch.exp(x))",
        torch.exp,
        lambda a: torch.exp(a * 0.5),
        "torch.exp(torch.exp(x * 0.5) * 0.5)",
    ),
    "settings agree": (
        "m.pool3(m.drop(x)) + m.pool(m.drop(x)).sum()", POOL, nn.Identity(), "m.pool3(x) + x.sum()",
    ),
    "one layer is one layer": (
        "m.conv2(m.conv2(m.conv(x))) + m.conv2(m.conv3(m.conv(x)))",
        of_conv("m.conv(m.conv(x))"),
        of_conv("m.conv(x) * 0.5"),
        "m.conv2(m.conv(x)) * 0.5 + m.conv2(m.conv3(m.conv(x)))",
    ),
    "slices and lists": (
        "torch.cat([x[:, 1:], x[:, :1]], 1)",
        lambda a: torch.cat([a[:, 1:], a[:, :1]], 1),
        lambda a: a.roll(-1, 1),
        "x.roll(-1, 1)",
    ),
    "in place": (
        "(y := x * 2, F.relu(y, inplace=True), y)[2]",
        lambda a: F.relu(a, inplace=True),
        torch.neg,
        "x * -2",
    ),
    "another constant": ("(x + 2).relu()", relu_of_next, torch.neg, "(x + 2).relu()"),
    "a slice of another kind": ("x[:, 1:]", lambda a: a[:, :1], torch.neg, "x[:, 1:]"),
    "the inside is read elsewhere": (
        "(y := x + 1).relu() + y", relu_of_next, torch.neg, "(x + 1).relu() + x + 1",
    ),
    "an input is written meanwhile": (
        "(y := x * 2, z := y + 1, y.mul_(3), z.relu() + y)[3]",
        relu_of_next,
        lambda a: torch.relu(a) + 1,
        "(x * 2 + 1).relu() + x * 6",
    ),
    "the inside writes an input": (
        "(y := x * 2, z := torch.exp(y.relu_()), y + z)[2]",
        lambda a: torch.exp(F.relu(a, inplace=True)),
        torch.exp,
        "(y := (x * 2).relu()).exp() + y",
    ),
}  # fmt: skip


@rows("forward pattern replacement to", PATTERNS)
def test_replaces_a_pattern_where_that_is_right(
    forward: str, pattern: Any, replacement: Any, to: str
) -> None:
    edited = edits(toolkit.replace_pattern, forward, pattern, replacement, to=to)

    assert replacement is not fused or not toolkit.find(edited, nn.BatchNorm2d)


def test_a_layer_in_training_mode_writes_meanwhile() -> None:
    """A BatchNorm writes what the sum around it reads."""

    def counts_up() -> nn.Module:
        forward = "(y := x + m.bn.running_mean, m.bn(x), y.relu())[2]"
        return Forward(forward, bn=nn.BatchNorm1d(3)).double()

    module, clamped = optimizer.capture(counts_up()), lambda a, b: (a + b).clamp(min=0)
    edited = toolkit.replace_pattern(module, lambda a, b: torch.relu(a + b), clamped)

    x = torch.linspace(-1, 3, 12, dtype=torch.float64).reshape(4, 3)
    assert torch.equal(edited(x), counts_up()(x))


def two_values(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, -x


def steered(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def nodes(graph: Any) -> list[fx.Node]:
    """In order: x, conv, relu, add, output."""
    return list(graph.graph.nodes)


def op(replacement: Any) -> Any:
    return lambda g: toolkit.replace_op(g, nn.ReLU, replacement)


def rule(decomposition: Any) -> Any:
    return lambda g: toolkit.decompose(g, {nn.ReLU: decomposition})


def pattern(*arguments: Any) -> Any:
    return lambda g: toolkit.replace_pattern(g, *arguments)


A_CONV = of_conv("m.conv(x)")
LAYERS = (nn.Sequential(nn.ReLU(), last) for last in (nn.Conv2d(1, 1, 1), nn.Linear(1, 1)))
OTHER_ARGUMENTS = "does not take (conv)"
REFUSED: dict[str, tuple[Any, str]] = {
    "no graph": (lambda g: toolkit.find(nn.ReLU(), nn.ReLU), "optimizer.capture"),
    "a module to find": (lambda g: toolkit.find(g, nn.ReLU()), "a module's class"),
    "a function with other arguments": (op(F.nll_loss), OTHER_ARGUMENTS),
    "a builtin with other arguments": (op(torch.mul), OTHER_ARGUMENTS),
    "a class that needs arguments": (op(nn.Linear), "pass a module"),
    "no method": (op("gelu"), "no method 'gelu'"),
    "after the output": (lambda g: toolkit.insert_after(nodes(g)[-1], torch.neg), "output"),
    "an argument from later": (
        lambda g: toolkit.insert_after(nodes(g)[1], torch.add, nodes(g)[2]),
        "computed after 'conv'",
    ),
    "an input removed": (lambda g: toolkit.remove_node(nodes(g)[0]), "signature"),
    "which input": (
        lambda g: toolkit.remove_node(nodes(g)[3]), "reads relu, conv: name with instead=",
    ),
    "instead of itself": (
        lambda g: toolkit.remove_node(nodes(g)[1], instead=nodes(g)[2]), "not computed before",
    ),
    "a rule that never ends": (rule(lambda x: torch.relu(x) + 0), "never end"),
    "a rule of two values": (rule(two_values), "one value"),
    "a rule with branches": (rule(steered), "the rule for F.relu"),
    "weights that would be lost": (pattern(conv_norm(), A_CONV), "has no 'bn'"),
    "a module of another class": (pattern(*LAYERS), "'1' is a Conv2d in the pattern"),
    "an unknown module": (pattern(conv_norm(), lambda norm: None), "'norm'"),
    "no module": (pattern(A_CONV, lambda conv: 3), "made a int"),
    "a pattern of two values": (pattern(two_values, torch.neg), "one value"),
    "a pattern of nothing": (pattern(lambda x: x, torch.neg), "one value"),
    "a pattern with an effect": (
        pattern(lambda x: (x.neg(), torch.exp(x))[1], torch.neg),
        "nothing that this does not need",
    ),
    "another number of inputs": (
        pattern(lambda x: torch.relu(x), lambda x, y: x + y), "another number of inputs",
    ),
    "a replacement of two values": (pattern(lambda x: torch.relu(x), two_values), "one value"),
}  # fmt: skip


@rows("verb message", REFUSED)
def test_refuses_and_says_what_to_do(verb: Any, message: str) -> None:
    kind = CaptureError if message == "the rule for F.relu" else InputError
    module = captured("m.relu(y := m.conv(x)) + y")
    code = module.code

    with pytest.raises(kind) as raised:
        verb(module)

    assert message in str(raised.value)
    assert str(raised.value).endswith(".") or kind is CaptureError
    module.recompile()
    assert module.code == code


def test_code_of_a_package_called_like_torch_may_write() -> None:
    model = Forward(lambda m, x: (x := x + 0.5, y := x * 2, overwrite(x), torch.add(x, y))[3])

    module = optimizer.capture(model, torch.ones(2))
    replaced = toolkit.replace_pattern(module, lambda x: torch.add(x, x * 2), lambda x: x * 3)

    assert torch.equal(replaced(torch.ones(2)), model(torch.ones(2)))


def overwrite(x: Tensor) -> None:
    x.zero_()


overwrite.__module__ = "torch_scatter"  # a package whose name begins with torch's
fx.wrap("overwrite")
