"""The verbs for editing a graph by hand: what they change, what they keep, what they refuse."""

from __future__ import annotations

import copy
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
    return randomize(Forward(forward, **held).double().eval())


def captured(forward: str, *inputs: Tensor) -> Any:
    return optimizer.capture(model_of(forward), inputs or None)


def run(verb: str, g: Any) -> Any:
    """What the text of a call of a verb makes of the graph `g`, of the nodes `n`."""
    return eval(verb, {**vars(toolkit), **globals(), "g": g, "n": list(g.graph.nodes)})


FOUND: dict[str, tuple[Any, str]] = {
    "by any spelling": ((torch.relu, "relu_", nn.ReLU), "relu relu_1 relu_2"),
    "a layer, by no class of all layers": ((nn.Conv2d, (nn.Conv2d, nn.Module)), "conv"),
    "an operator": ((torch.add, operator.add), "add add_1"),
}


@rows("targets names", FOUND)
def test_finds_every_spelling_by_any_spelling(targets: Any, names: str) -> None:
    module = captured("torch.add(m.relu(m.conv(x)).relu().mean(), 1) + F.relu(x)")
    for target in targets:
        assert [node.name for node in find(module, target)] == names.split()


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


BLOCKS = "m.bn2(m.conv2(m.bn(m.conv(x)).relu()))"
# A forward, what is done to it, and what it is then.
REPLACED = {
    "functions and operators":
        ("torch.add(x, 3) + x", "replace_op(g, (torch.add, operator.add), torch.mul)", "x * 3 * x"),
    "by a module":
        ("m.relu(x)", "replace_op(g, 'relu', nn.LeakyReLU(0.5))", "F.leaky_relu(x, 0.5)"),
    "a method": ("x.sum(dim=1)", "replace_op(g, 'sum', 'mean')", "x.mean(dim=1)"),
    "an identity": ("m.drop(x) + 1", "replace_op(g, nn.Dropout, nn.Identity)", "x + 1"),
    "a view": (
        "y = m.conv(x); F.relu(y[0], inplace=True); return y",
        "replace_pattern(g, lambda a: F.relu(a[0], inplace=True), lambda a: F.gelu(a[0]))",
        "y = m.conv(x); y[0].copy_(F.gelu(y[0])); return y"),
    "a view of a result of a layer": (
        "y = m.conv(x); v = y.view(-1); F.relu(y, inplace=True); return v * 1",
        "replace_op(g, F.relu, nn.ReLU)", "y = m.conv(x); return F.relu(y).view(-1) * 1"),
    "an input": ("m.inplace(x)", "replace_op(g, nn.ReLU, torch.neg)", "x.copy_(-x)"),
}  # fmt: skip
DECOMPOSED = {
    "rules that need another": (
        "F.hardtanh(x) + x.relu()",
        "decompose(g, {F.hardtanh: lambda x: 1 - torch.relu(2 - F.relu(x + 1)),"
        "nn.ReLU: lambda x: torch.where(x > 0, x, torch.zeros(()))})",
        "x.clamp(-1, 1) + x.clamp(min=0)"),
    "a layer": (
        "m.linear(-x)", "decompose(g, {nn.Linear: lambda a, x: x @ a.weight.t() + a.bias})",
        "m.linear(-x)"),
    "its settings, in place": (
        "y = x * 2; F.elu(y, 0.5, inplace=True); return y",
        "decompose(g, {F.elu: lambda x, alpha: torch.where(x > 0, x, alpha * x.expm1())})",
        "F.elu(2 * x, 0.5)"),
    "of any number of values": (
        "torch.einsum('bcij,bcij->bcij', x, x)",
        "decompose(g, {torch.einsum: lambda equation, a, b: a * b})", "x * x"),
    "to its own input":
        ("m.drop(x) + 1", "decompose(g, {nn.Dropout: lambda x, **settings: x})", "x + 1"),
}  # fmt: skip


def fused(conv, bn):
    return fuse_conv_bn_eval(conv, bn)


def relu_of_next(a):
    return torch.relu(a + 1)


def two_values(x):
    return x, -x


# Made before they are needed, for they draw random numbers.
PAIR = Forward("m.bn(m.conv(x))", conv=nn.Conv2d(1, 1, 1), bn=nn.BatchNorm2d(1))
RELU_OF_PAIR, HALF_OF_PAIR = Forward("m.p(x).relu()", p=PAIR), Forward("m.p(x) * 0.5", p=PAIR)
A_CONV, TWO, HALF = (
    Forward(text, conv=nn.Conv2d(1, 1, 1))
    for text in ("m.conv(x)", "m.conv(m.conv(x))", "m.conv(x) * 0.5")
)
POOL = Forward("m.pool(m.drop(x))", pool=nn.MaxPool2d(2), drop=nn.Dropout(0.25))
LEAKY = Forward("m.pool(x)", pool=nn.LeakyReLU(0.5))
LAYERS = [nn.Sequential(nn.ReLU(), last) for last in (nn.Conv2d(1, 1, 1), nn.Linear(1, 1))]
OF_NEXT = "replace_pattern(g, relu_of_next, torch.neg)"
PATTERNS = {
    "layers with weights": (BLOCKS, "replace_pattern(g, PAIR, fused)", BLOCKS),
    "modules of one name are the ones that were matched": (
        BLOCKS, "replace_pattern(g, RELU_OF_PAIR, HALF_OF_PAIR)",
        "m.bn2(m.conv2(m.bn(m.conv(x)) * 0.5))"),
    "a layer of the replacement that is called as one of the model": (
        "m.pool(F.relu(x))", "replace_pattern(g, F.relu, LEAKY)", "m.pool(F.leaky_relu(x, 0.5))"),
    "a function may leave a match alone": (
        BLOCKS, "replace_pattern(g, PAIR, lambda bn: nn.Identity() if bn.eps == 0.5 else None)",
        "m.bn(m.conv(x)).relu()"),
    "one input twice": (
        "(x * x) + (x * (x + 1))", "replace_pattern(g, lambda a: a * a, torch.square)",
        "x.square() + x * (x + 1)"),
    "a pattern inside its own replacement": (
        "torch.exp(torch.exp(x))", "replace_pattern(g, torch.exp, lambda a: torch.exp(a * 0.5))",
        "torch.exp(torch.exp(x * 0.5) * 0.5)"),
    "settings agree": (
        "m.pool3(m.drop(x)) + m.pool(m.drop(x)).sum()", "replace_pattern(g, POOL, nn.Identity())",
        "m.pool3(x) + x.sum()"),
    "one layer is one layer": (
        "m.conv2(m.conv2(m.conv(x))) + m.conv2(m.conv3(m.conv(x)))",
        "replace_pattern(g, TWO, HALF)", "m.conv2(m.conv(x)) * 0.5 + m.conv2(m.conv3(m.conv(x)))"),
    "slices and lists": (
        "torch.cat([x[:, 1:], x[:, :1]], 1) + torch.cat(x.split(1, 1), 1)"
        "+ torch.cat([x[:, 1:]], 1).sum()",
        "replace_pattern(g, lambda a: torch.cat([a[:, 1:], a[:, :1]], 1), lambda a: a.roll(-1, 1))",
        "x.roll(-1, 1) + x + x[:, 1:].sum()"),
    "another constant": ("(x + 2).relu() + (x + 1).relu()", OF_NEXT, "(x + 2).relu() - x"),
    "the inside is read elsewhere": ("(y := x + 1).relu() + y", OF_NEXT, "(x + 1).relu() + x + 1"),
    **{f"an input is written meanwhile: {write}": (
        f"y = x * 2; z = y + 1; {write}; return z.relu() + y",
        "replace_pattern(g, relu_of_next, lambda a: torch.relu(a) + 1)",
        "(x * 2 + 1).relu() - x * 2")
       for write in ("y.neg_()", "torch.neg_(y)", "y *= -1", "torch.neg(y, out=y)")},
    "the inside writes an input": (
        "y = x * 2; z = torch.exp(y.relu_()); return y + z",
        "replace_pattern(g, lambda a: torch.exp(F.relu(a, inplace=True)), torch.exp)",
        "(y := (x * 2).relu()).exp() + y"),
}  # fmt: skip


@rows("forward verb to", REPLACED, DECOMPOSED, PATTERNS)
def test_edits_where_that_is_right_and_leaves_the_graph_itself_alone(forward, verb, to):
    module = captured(forward)
    code = module.code

    with untouched(module):
        edited = run(verb, module)
    assert module.code == code
    assert_equivalent(model_of(to), edited, X)
    if "decompose" in verb:
        assert not find(edited, (F.hardtanh, F.elu, nn.Dropout, nn.Linear, nn.ReLU))
    assert "fused" not in verb or not find(edited, nn.BatchNorm2d)


FORWARD = "m.conv(x) + x.sum()"
EDITED = {
    "after a node": ("insert_after(n[1], torch.mul, 2)", "m.conv(x) * 2 + x.sum()"),
    "a layer goes": ("remove_node(n[1])", "x + x.sum()"),
    "what is not read": ("remove_node(insert_after(n[1], torch.add, n[0], readers=[]))", FORWARD),
    "another is read": ("remove_node(n[3], instead=n[1])", "m.conv(x)"),
}


@rows("verb to", EDITED)
def test_inserts_and_removes_in_the_graph_itself(verb: str, to: str) -> None:
    module = captured(FORWARD)
    run(verb, module)
    assert_equivalent(model_of(to), module, X)
    assert ("conv" in to) is bool(module.state_dict())


def test_an_edited_module_keeps_its_weights_and_forgets_the_shapes() -> None:
    module = captured("F.relu(m.conv(x))", *X)
    edited = replace_op(module, nn.ReLU, F.gelu)
    assert edited.conv.weight is module.conv.weight
    assert "2x3x5x5" in table(module)
    assert "2x3x5x5" not in table(edited), "they may be others now"


def test_inserts_for_some_readers_only_and_after_every_input() -> None:
    module = optimizer.capture(ForwardOfTwo("torch.neg(x) * x").eval())
    first, second, *_ = module.graph.nodes
    insert_after(first, "add", second, readers=find(module, torch.neg))
    x, y = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(module(x, y), -(x + y) * x)


@fx.wrap
def overwrite(x: Tensor) -> None:
    x.zero_()


overwrite.__module__ = "torch_scatter"  # a package whose name begins with torch's


@rows("call", {"statistics": (lambda m, x: m.bn(x),), "unknown code": (lambda m, x: overwrite(x),)})
def test_what_may_write_meanwhile_leaves_a_match_alone(call):
    model = Forward(lambda m, x: (y := x + m.bn.running_mean, call(m, x), y.relu() + x)[2])
    model.bn = nn.BatchNorm1d(3)
    module, again = (optimizer.capture(copy.deepcopy(model)) for _ in range(2))
    x = torch.linspace(-3, 3, 12).reshape(4, 3)
    edited = replace_pattern(module, lambda a, b: torch.relu(a + b), lambda a, b: F.relu6(a + b))
    assert torch.equal(edited(x.clone()), again(x.clone()))


# Calls on x, conv, relu, add and output, and words of the error.
REFUSED = {
    "find(nn.ReLU(), nn.ReLU)": "optimizer.capture",
    "find(g, nn.ReLU())": "a module's class",
    "replace_op(g, nn.ReLU, F.nll_loss)": "does not take (conv)",
    "replace_op(g, nn.ReLU, nn.Linear)": "pass a module",
    "replace_op(g, nn.ReLU, 'gelu')": "no method 'gelu'",
    "insert_after(n[-1], torch.neg)": "output",
    "insert_after(n[1], torch.add, n[2])": "computed after 'conv'",
    "insert_after(n[1], lambda a, b: b[0], [n[2]])": "computed after 'conv'",
    "insert_after(n[1], 3)": "no method '3'",
    "insert_after(n[1], torch.neg, readers=[n[1]])": "does not read 'conv'",
    "remove_node(n[0])": "signature",
    "remove_node(n[3])": "reads relu, conv: name with instead=",
    "remove_node(n[1], instead=n[2])": "not computed before",
    "decompose(g, {nn.ReLU: lambda x: torch.relu(x) + 0})": "never end",
    "decompose(g, {nn.ReLU: two_values})": "one value",
    "decompose(g, {nn.ReLU: lambda x: x if x.sum() > 0 else -x})": "the rule for F.relu",
    "replace_pattern(g, PAIR, A_CONV)": "the weights of 'bn'",
    "replace_pattern(g, *LAYERS)": "'1' is a Conv2d in the pattern",
    "replace_pattern(g, PAIR, lambda norm: None)": "'norm'",
    "replace_pattern(g, two_values, torch.neg)": "one value",
    "replace_pattern(g, torch.relu, lambda x, y: x + y)": "another number of inputs",
    "replace_pattern(g, torch.relu, lambda x: (x, x))": "has to return one value",
    "replace_pattern(g, lambda x: x, torch.neg)": "a pattern returns one value",
    "replace_pattern(g, Forward('x * m.w', w=X[0]), nn.Identity())": "the weights of 'w'",
    "replace_pattern(g, A_CONV, lambda conv: 3)": "the replacement made a int",
}


@pytest.mark.parametrize("verb", REFUSED)
def test_refuses_and_says_what_to_do(verb: str) -> None:
    kind = CaptureError if "the rule" in REFUSED[verb] else InputError
    module = captured("m.relu(y := m.conv(x)) + y")
    code = module.code

    with pytest.raises(kind) as raised:
        run(verb, module)

    assert REFUSED[verb] in str(raised.value)
    module.recompile()
    assert module.code == code
