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
from optimizer.toolkit import find, insert_after, replace_op, replace_pattern, table
from tests.single_pass import Forward, ForwardOfTwo, rows

X = inputs_like([(2, 3, 5, 5)], "random", 0)


def model_of(forward: str) -> nn.Module:
    """A model that runs a text over layers of its own."""
    held = {"conv": nn.Conv2d(3, 4, 3), "conv2": nn.Conv2d(4, 4, 1, bias=False)}
    held |= {"conv3": nn.Conv2d(4, 4, 1), "linear": nn.Linear(5, 2), "drop": nn.Dropout(0.25)}
    held |= {"bn": nn.BatchNorm2d(4, eps=0.125), "bn2": nn.BatchNorm2d(4, eps=0.5)}
    held |= {"pool": nn.MaxPool2d(2), "pool3": nn.MaxPool2d(3)}
    held |= {"relu": nn.ReLU(), "inplace": nn.ReLU(inplace=True)}
    return randomize(Forward(" ".join(forward.split()), **held).double().eval())


def captured(forward: str, *inputs: Tensor) -> Any:
    return optimizer.capture(model_of(forward), inputs or None)


def computes(module: nn.Module, forward: str) -> None:
    """Assert that an edited module computes what another forward does, on any data."""
    assert_equivalent(model_of(forward), module, X)


def run(verb: str, g: Any) -> Any:
    """What the text of a call of a verb makes of the graph `g`, of the nodes `n`."""
    return eval(
        verb, {**vars(toolkit), **globals(), "g": g, "n": list(getattr(g, "graph", g).nodes)}
    )


NETWORK = "F.relu(m.bn(m.conv(x))).relu() + 1"
BLOCKS = "m.bn2(m.conv2(m.bn(m.conv(x)).relu()))"
CONV, LINEAR = "m.relu(m.conv(x))", "m.linear(x) + m.linear(-x)"


@pytest.mark.parametrize("target", [torch.relu, F.relu, "relu", "relu_", nn.ReLU, torch.relu_])
def test_finds_every_spelling_by_any_spelling(target: Any) -> None:
    found = find(captured("m.relu(x).relu() + F.relu(torch.relu(x))"), target)

    assert [node.name for node in found] == ["relu", "relu_1", "relu_2", "relu_3"]
    assert [node.name for node in found[0].all_input_nodes] == ["x"]
    assert [node.name for node in found[0].users] == ["relu_1"]


FOUND: dict[Any, list[str]] = {
    nn.Conv2d: ["conv"],
    "mean": ["mean"],
    nn.Dropout: ["drop"],
    torch.add: ["add", "add_1"],
    (torch.add, operator.add): ["add", "add_1"],
    nn.Module: [],
}


@pytest.mark.parametrize("target", FOUND)
def test_finds_modules_methods_and_functions(target: Any) -> None:
    module = captured("torch.add(m.drop(m.conv(x)).mean(), 1) + 2")

    assert [node.name for node in find(module, target)] == FOUND[target]


def test_a_table_has_a_row_for_each_node() -> None:
    module = captured("m.conv(x).relu().sum()", *X)

    assert table(module).splitlines() == [
        "name    calls   reads  read by  shape",
        "x       x              conv     2x3x5x5",
        "conv    Conv2d  x      relu     2x4x3x3",
        "relu    F.relu  conv   sum_1    2x4x3x3",
        "sum_1   .sum    relu   output   scalar",
        "output  output  sum_1",
    ]
    assert table(find(module, nn.Conv2d)).count("\n") == 1


# A forward, what is done to it, and what it is then.
REPLACED = {
    "a function": ("torch.add(x, x)", "replace_op(g, torch.add, torch.mul)", "x * x"),
    "an operator":
        ("torch.add(x, 3) + x", "replace_op(g, (torch.add, operator.add), torch.mul)", "x * 3 * x"),
    "by a function": (CONV, "replace_op(g, nn.ReLU, F.gelu)", "F.gelu(m.conv(x))"),
    "by a class": ("F.relu(x).relu()", "replace_op(g, nn.ReLU, nn.GELU)", "F.gelu(F.gelu(x))"),
    "by a module":
        ("m.relu(x)", "replace_op(g, 'relu', nn.LeakyReLU(0.5))", "F.leaky_relu(x, 0.5)"),
    "a method": ("x.sum(dim=1)", "replace_op(g, 'sum', 'mean')", "x.mean(dim=1)"),
    "settings": (
        "F.softmax(x, dim=1)", "replace_op(g, F.softmax, F.log_softmax)", "F.log_softmax(x, dim=1)"
    ),
    "an identity": ("m.drop(x) + 1", "replace_op(g, nn.Dropout, nn.Identity)", "x + 1"),
    "in place": ("m.inplace(m.conv(x))", "replace_op(g, nn.ReLU, F.gelu)", "F.gelu(m.conv(x))"),
    "read again": (
        "(y := m.conv(x), m.inplace(y))[0] + y", "replace_op(g, nn.ReLU, F.gelu)",
        "2 * F.gelu(m.conv(x))",
    ),
    "a view": (
        "y = m.conv(x); F.relu(y[0], inplace=True); return y", "replace_op(g, nn.ReLU, nn.GELU)",
        "y = m.conv(x); y[0].copy_(F.gelu(y[0])); return y",
    ),
    "an input": ("m.inplace(x)", "replace_op(g, nn.ReLU, torch.neg)", "x.copy_(-x)"),
    "nothing": (NETWORK, "replace_op(g, nn.GELU, nn.ReLU)", NETWORK),
}  # fmt: skip
DECOMPOSED = {
    "relu": (CONV, "decompose(g, {F.relu: lambda x: (x > 0) * x})", "(y := m.conv(x)) * (y > 0)"),
    "a rule that needs another": (
        "F.hardtanh(x) + x.relu()",
        "decompose(g, {F.hardtanh: lambda x: 1 - torch.relu(2 - F.relu(x + 1)),"
        "nn.ReLU: lambda x: torch.where(x > 0, x, torch.zeros(()))})",
        "x.clamp(-1, 1) + x.clamp(min=0)",
    ),
    "a layer":
        (LINEAR, "decompose(g, {nn.Linear: lambda a, x: x @ a.weight.t() + a.bias})", LINEAR),
    "its settings": (
        "F.softmax(x, dim=1)", "decompose(g, {F.softmax: lambda x, dim: x.log_softmax(dim).exp()})",
        "F.softmax(x, 1)",
    ),
    "what is in place": (
        "(y := x * 2, m.inplace(y))[0] - 1", "decompose(g, {'relu': lambda x: (x > 0) * x})",
        "(2 * x).relu() - 1",
    ),
    "to its own input":
        ("m.drop(x) + 1", "decompose(g, {nn.Dropout: lambda x, **settings: x})", "x + 1"),
    "by an assignment": (
        "x.abs()",
        "decompose(g, {'abs': lambda x: (y := x.clone(), operator.setitem(y, x < 0, 0.0))[0]})",
        "x.relu()",
    ),
}  # fmt: skip


def of_conv(forward: str) -> nn.Module:
    return Forward(forward, conv=nn.Conv2d(1, 1, 1))


def fused(conv: nn.Conv2d, bn: nn.BatchNorm2d) -> nn.Module:
    return fuse_conv_bn_eval(conv, bn)


def relu_of_next(a: Tensor) -> Tensor:
    return torch.relu(a + 1)


def two_values(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, -x


# Made before they are needed, for they draw random numbers.
PAIR = Forward("m.bn(m.conv(x))", conv=nn.Conv2d(1, 1, 1), bn=nn.BatchNorm2d(1))
RELU_OF_PAIR, HALF_OF_PAIR = Forward("m.p(x).relu()", p=PAIR), Forward("m.p(x) * 0.5", p=PAIR)
A_CONV, TWO, HALF = of_conv("m.conv(x)"), of_conv("m.conv(m.conv(x))"), of_conv("m.conv(x) * 0.5")
POOL = Forward("m.pool(m.drop(x))", pool=nn.MaxPool2d(2), drop=nn.Dropout(0.25))
OF_NEXT = "replace_pattern(g, relu_of_next, torch.neg)"
PATTERNS = {
    "layers with weights": (BLOCKS, "replace_pattern(g, PAIR, fused)", BLOCKS),
    "modules of one name are the ones that were matched": (
        BLOCKS,
        "replace_pattern(g, RELU_OF_PAIR, HALF_OF_PAIR)",
        "m.bn2(m.conv2(m.bn(m.conv(x)) * 0.5))",
    ),
    "a function may leave a match alone": (
        BLOCKS,
        "replace_pattern(g, PAIR, lambda bn: nn.Identity() if bn.eps == 0.5 else None)",
        "m.bn(m.conv(x)).relu()",
    ),
    "functions of values": (
        "(x + 1).relu() * 2 + F.relu(x + 1)",
        "replace_pattern(g, relu_of_next, lambda a: F.gelu(a - 1))",
        "F.gelu(x - 1) * 2 + F.gelu(x - 1)",
    ),
    "one input twice": (
        "(x * x) + (x * (x + 1))", "replace_pattern(g, lambda a: a * a, torch.square)",
        "x.square() + x * (x + 1)",
    ),
    "a pattern inside its own replacement": (
        "torch.exp(torch.exp(x))",
        "replace_pattern(g, torch.exp, lambda a: torch.exp(a * 0.5))",
        "torch.exp(torch.exp(x * 0.5) * 0.5)",
    ),
    "settings agree": (
        "m.pool3(m.drop(x)) + m.pool(m.drop(x)).sum()", "replace_pattern(g, POOL, nn.Identity())",
        "m.pool3(x) + x.sum()",
    ),
    "one layer is one layer": (
        "m.conv2(m.conv2(m.conv(x))) + m.conv2(m.conv3(m.conv(x)))",
        "replace_pattern(g, TWO, HALF)",
        "m.conv2(m.conv(x)) * 0.5 + m.conv2(m.conv3(m.conv(x)))",
    ),
    "slices and lists": (
        "torch.cat([x[:, 1:], x[:, :1]], 1)",
        "replace_pattern(g, lambda a: torch.cat([a[:, 1:], a[:, :1]], 1), lambda a: a.roll(-1, 1))",
        "x.roll(-1, 1)",
    ),
    "a pattern in place": (
        "(y := x * 2, F.relu(y, inplace=True), y)[2]",
        "replace_pattern(g, lambda a: F.relu(a, inplace=True), torch.neg)", "x * -2",
    ),
    "another constant": ("(x + 2).relu()", OF_NEXT, "(x + 2).relu()"),
    "a slice of another kind":
        ("x[:, 1:]", "replace_pattern(g, lambda a: a[:, :1], torch.neg)", "x[:, 1:]"),
    "the inside is read elsewhere": ("(y := x + 1).relu() + y", OF_NEXT, "(x + 1).relu() + x + 1"),
    "an input is written meanwhile": (
        "(y := x * 2, z := y + 1, y.mul_(3), z.relu() + y)[3]",
        "replace_pattern(g, relu_of_next, lambda a: torch.relu(a) + 1)",
        "(x * 2 + 1).relu() + x * 6",
    ),
    "the inside writes an input": (
        "(y := x * 2, z := torch.exp(y.relu_()), y + z)[2]",
        "replace_pattern(g, lambda a: torch.exp(F.relu(a, inplace=True)), torch.exp)",
        "(y := (x * 2).relu()).exp() + y",
    ),
}  # fmt: skip


@rows("forward verb to", REPLACED, DECOMPOSED, PATTERNS)
def test_edits_where_that_is_right_and_leaves_the_graph_itself_alone(
    forward: str, verb: str, to: str
) -> None:
    module = captured(forward)
    code = module.code

    with untouched(module):
        edited = run(verb, module)

    assert module.code == code
    computes(edited, to)
    if "decompose" in verb:
        assert not find(edited, (F.hardtanh, F.softmax, nn.Dropout, nn.Linear, "abs", "relu"))
    assert "fused" not in verb or not find(edited, nn.BatchNorm2d)


def test_an_edited_module_keeps_its_weights_drops_others_and_is_optimized_as_any_other() -> None:
    module = captured(NETWORK, *X)

    edited = replace_op(module, nn.ReLU, F.gelu)
    without = replace_op(module, nn.Conv2d, nn.Identity)
    fast = optimizer.optimize(edited, X, level=1)

    assert edited.conv.weight is module.conv.weight
    assert "conv.weight" not in without.state_dict()
    assert not without.identity.training
    assert "2x3x5x5" in table(module)
    assert "2x3x5x5" not in table(edited), "shapes may be others now"
    assert fast.report.counts()
    computes(fast, "F.gelu(F.gelu(m.bn(m.conv(x)))) + 1")


# These edit the graph that is given.
IN_PLACE = {
    "after a node": ("m.conv(x) + x.sum()", "insert_after(n[1], torch.mul, 2)",
                     "m.conv(x) * 2 + x.sum()"),
    "a node goes": ("m.relu(m.conv(x)) + 1", "remove_node(n[2])", "m.conv(x) + 1"),
    "a layer goes": ("m.conv(x) + 1", "remove_node(n[1])", "x + 1"),
    "one of several inputs is left": ("(m.conv(x) + m.conv(-x)).relu()",
                                      "remove_node(n[4], instead=n[3])", "m.conv(-x).relu()"),
}  # fmt: skip


@rows("forward verb to", IN_PLACE)
def test_inserts_and_removes(forward: str, verb: str, to: str) -> None:
    module = captured(forward)

    run(verb, module)

    computes(module, to)
    assert ("conv" in to) is bool(module.state_dict())


def test_inserts_for_some_readers_only_and_after_every_input() -> None:
    module = optimizer.capture(ForwardOfTwo("torch.neg(x) * x").eval())
    first, second, *_ = module.graph.nodes

    insert_after(first, "add", second, readers=find(module, torch.neg))

    x, y = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(module(x, y), -(x + y) * x)


def test_a_layer_in_training_mode_writes_meanwhile() -> None:
    """A BatchNorm writes what the sum around it reads."""

    def counts_up() -> nn.Module:
        forward = "(y := x + m.bn.running_mean, m.bn(x), y.relu())[2]"
        return Forward(forward, bn=nn.BatchNorm1d(3)).double()

    module, clamped = optimizer.capture(counts_up()), lambda a, b: (a + b).clamp(min=0)
    edited = replace_pattern(module, lambda a, b: torch.relu(a + b), clamped)

    x = torch.linspace(-1, 3, 12, dtype=torch.float64).reshape(4, 3)
    assert torch.equal(edited(x), counts_up()(x))


LAYERS = [nn.Sequential(nn.ReLU(), last) for last in (nn.Conv2d(1, 1, 1), nn.Linear(1, 1))]
NOT_TAKEN, NOT_ONE = "does not take (conv)", "one value"
# Calls on x, conv, relu, add and output, and words of the error.
REFUSED = {
    "find(nn.ReLU(), nn.ReLU)": "optimizer.capture",
    "find(g, nn.ReLU())": "a module's class",
    "replace_op(g, nn.ReLU, F.nll_loss)": NOT_TAKEN,
    "replace_op(g, nn.ReLU, torch.mul)": NOT_TAKEN,
    "replace_op(g, nn.ReLU, nn.Linear)": "pass a module",
    "replace_op(g, nn.ReLU, 'gelu')": "no method 'gelu'",
    "insert_after(n[-1], torch.neg)": "output",
    "insert_after(n[1], torch.add, n[2])": "computed after 'conv'",
    "remove_node(n[0])": "signature",
    "remove_node(n[3])": "reads relu, conv: name with instead=",
    "remove_node(n[1], instead=n[2])": "not computed before",
    "decompose(g, {nn.ReLU: lambda x: torch.relu(x) + 0})": "never end",
    "decompose(g, {nn.ReLU: two_values})": NOT_ONE,
    "decompose(g, {nn.ReLU: lambda x: x if x.sum() > 0 else -x})": "the rule for F.relu",
    "replace_pattern(g, PAIR, A_CONV)": "has no 'bn'",
    "replace_pattern(g, *LAYERS)": "'1' is a Conv2d in the pattern",
    "replace_pattern(g, PAIR, lambda norm: None)": "'norm'",
    "replace_pattern(g, A_CONV, lambda conv: 3)": "made a int",
    "replace_pattern(g, two_values, torch.neg)": NOT_ONE,
    "replace_pattern(g, lambda x: x, torch.neg)": NOT_ONE,
    "replace_pattern(g, lambda x: (x.neg(), torch.exp(x))[1], torch.neg)": (
        "nothing that this does not need"
    ),
    "replace_pattern(g, torch.relu, lambda x, y: x + y)": "another number of inputs",
    "replace_pattern(g, torch.relu, two_values)": NOT_ONE,
}


@pytest.mark.parametrize("verb", REFUSED)
def test_refuses_and_says_what_to_do(verb: str) -> None:
    kind = CaptureError if "the rule" in REFUSED[verb] else InputError
    module = captured("m.relu(y := m.conv(x)) + y")
    code = module.code

    with pytest.raises(kind) as raised:
        run(verb, module)

    assert REFUSED[verb] in str(raised.value)
    assert str(raised.value).endswith(".") or kind is CaptureError
    module.recompile()
    assert module.code == code


def test_code_of_a_package_called_like_torch_may_write() -> None:
    model = Forward(lambda m, x: (x := x + 0.5, y := x * 2, overwrite(x), torch.add(x, y))[3])

    module = optimizer.capture(model, torch.ones(2))
    replaced = replace_pattern(module, lambda x: torch.add(x, x * 2), lambda x: x * 3)

    assert torch.equal(replaced(torch.ones(2)), model(torch.ones(2)))


def overwrite(x: Tensor) -> None:
    x.zero_()


overwrite.__module__ = "torch_scatter"  # a package whose name begins with torch's
fx.wrap("overwrite")
