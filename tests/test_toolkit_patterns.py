"""Patterns that are replaced keep the weights of what they matched; errors say what to do."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import fuse_conv_bn_eval

import optimizer
from optimizer import CaptureError, InputError, toolkit
from optimizer.testing import untouched
from tests.single_pass import Forward as Held
from tests.test_toolkit import Forward, captured, computes


def conv_of(forward: Forward) -> nn.Module:
    return Held(forward, conv=nn.Conv2d(1, 1, 1))


def pair_of(forward: Forward) -> nn.Module:
    return Held(forward, conv=nn.Conv2d(1, 1, 1), bn=nn.BatchNorm2d(1))


def conv_norm() -> nn.Module:
    return pair_of(lambda m, x: m.bn(m.conv(x)))


def block_of(forward: Forward) -> nn.Module:
    return Held(forward, inner=conv_norm())


TWO_BLOCKS: Forward = lambda m, x: m.bn2(m.conv2(m.bn(m.conv(x)).relu()))  # noqa: E731


def test_a_pattern_keeps_the_weights_of_what_it_matched() -> None:
    module = captured(TWO_BLOCKS)

    edited = toolkit.replace_pattern(module, conv_norm(), fuse_conv_bn_eval_of)

    assert toolkit.find(edited, nn.BatchNorm2d) == []
    assert len(toolkit.find(edited, nn.Conv2d)) == 2
    computes(edited, TWO_BLOCKS)


def fuse_conv_bn_eval_of(conv: nn.Conv2d, bn: nn.BatchNorm2d) -> nn.Module:
    return fuse_conv_bn_eval(conv, bn)


def test_modules_of_one_name_are_the_ones_that_were_matched() -> None:
    relu, halved = block_of(lambda m, x: m.inner(x).relu()), block_of(lambda m, x: m.inner(x) * 0.5)
    edited = toolkit.replace_pattern(captured(TWO_BLOCKS), relu, halved)

    computes(edited, lambda m, x: m.bn2(m.conv2(m.bn(m.conv(x)) * 0.5)))


def test_a_function_may_leave_a_match_alone() -> None:
    edited = toolkit.replace_pattern(
        captured(TWO_BLOCKS), conv_norm(), lambda bn: nn.Identity() if bn.eps == 0.5 else None
    )

    computes(edited, lambda m, x: m.bn(m.conv(x)).relu())


def pool() -> nn.Module:
    return Held(lambda m, x: m.pool(m.drop(x)), pool=nn.MaxPool2d(2), drop=nn.Dropout(0.25))


PATTERNS: dict[str, tuple[Forward, Any, Any, Forward]] = {
    "functions of values": (
        lambda m, x: (x + 1).relu() * 2 + F.relu(x + 1),
        lambda a: torch.relu(a + 1),
        lambda a: F.gelu(a - 1),
        lambda m, x: F.gelu(x - 1) * 2 + F.gelu(x - 1),
    ),
    "one input twice": (
        lambda m, x: (x * x) + (x * (x + 1)),
        lambda a: a * a,
        torch.square,
        lambda m, x: x.square() + x * (x + 1),
    ),
    "a pattern inside its own replacement": (
        lambda m, x: torch.exp(torch.exp(x)),
        torch.exp,
        lambda a: torch.exp(a * 0.5),
        lambda m, x: torch.exp(torch.exp(x * 0.5) * 0.5),
    ),
    "settings agree": (
        lambda m, x: m.pool3(m.drop(x)) + m.pool(m.drop(x)).sum(),
        pool(),
        nn.Identity(),
        lambda m, x: m.pool3(x) + x.sum(),
    ),
    "one layer is one layer": (
        lambda m, x: m.conv2(m.conv2(m.conv(x))) + m.conv2(m.conv3(m.conv(x))),
        conv_of(lambda m, x: m.conv(m.conv(x))),
        conv_of(lambda m, x: m.conv(x) * 0.5),
        lambda m, x: m.conv2(m.conv(x)) * 0.5 + m.conv2(m.conv3(m.conv(x))),
    ),
    "slices and lists": (
        lambda m, x: torch.cat([x[:, 1:], x[:, :1]], 1),
        lambda a: torch.cat([a[:, 1:], a[:, :1]], 1),
        lambda a: a.roll(-1, 1),
        lambda m, x: x.roll(-1, 1),
    ),
    "in place": (
        lambda m, x: (y := x * 2, F.relu(y, inplace=True), y)[2],
        lambda a: F.relu(a, inplace=True),
        torch.neg,
        lambda m, x: x * -2,
    ),
    "another constant": (
        lambda m, x: (x + 2).relu(), lambda a: torch.relu(a + 1), torch.neg,
        lambda m, x: (x + 2).relu(),
    ),
    "a slice of another kind": (
        lambda m, x: x[:, 1:], lambda a: a[:, :1], torch.neg, lambda m, x: x[:, 1:],
    ),
    "the inside is read elsewhere": (
        lambda m, x: (y := x + 1).relu() + y,
        lambda a: torch.relu(a + 1),
        torch.neg,
        lambda m, x: (x + 1).relu() + x + 1,
    ),
    "an input is written meanwhile": (
        lambda m, x: (y := x * 2, z := y + 1, y.mul_(3), z.relu() + y)[3],
        lambda a: torch.relu(a + 1),
        lambda a: torch.relu(a) + 1,
        lambda m, x: (x * 2 + 1).relu() + x * 6,
    ),
    "the inside writes an input": (
        lambda m, x: (y := x * 2, z := torch.exp(y.relu_()), y + z)[2],
        lambda a: torch.exp(F.relu(a, inplace=True)),
        torch.exp,
        lambda m, x: (y := (x * 2).relu()).exp() + y,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PATTERNS)
def test_replaces_a_pattern_where_that_is_right(case: str) -> None:
    forward, pattern, replacement, expected = PATTERNS[case]
    module = captured(forward)
    with untouched(module):
        edited = toolkit.replace_pattern(module, pattern, replacement)

    computes(edited, expected)


def counts_up() -> nn.Module:
    """In training mode a BatchNorm writes what the sum around it reads."""
    return Held(
        lambda m, x: (y := x + m.bn.running_mean, m.bn(x), y.relu())[2], bn=nn.BatchNorm1d(3)
    ).double()


def test_a_layer_in_training_mode_writes_meanwhile() -> None:
    module = optimizer.capture(counts_up())

    edited = toolkit.replace_pattern(
        module, lambda a, b: torch.relu(a + b), lambda a, b: (a + b).clamp(min=0)
    )

    x = torch.linspace(-1, 3, 12, dtype=torch.float64).reshape(4, 3)
    assert torch.equal(edited(x), counts_up()(x))


def two_values(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, -x


def never_ending(x: Tensor) -> Tensor:
    return torch.relu(x) + 0


def steered(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


REFUSED: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "no graph": (lambda g: toolkit.find(nn.ReLU(), nn.ReLU), InputError, "optimizer.capture"),
    "a module to find": (lambda g: toolkit.find(g, nn.ReLU()), InputError, "a module's class"),
    "a function with other arguments": (
        lambda g: toolkit.replace_op(g, nn.ReLU, F.nll_loss), InputError, "does not take (conv)",
    ),
    "a builtin with other arguments": (
        lambda g: toolkit.replace_op(g, nn.ReLU, torch.mul), InputError, "does not take (conv)",
    ),
    "a class that needs arguments": (
        lambda g: toolkit.replace_op(g, nn.ReLU, nn.Linear), InputError, "pass a module",
    ),
    "no method": (lambda g: toolkit.replace_op(g, nn.ReLU, "gelu"), InputError, "no method 'gelu'"),
    "after the output": (
        lambda g: toolkit.insert_after(list(g.graph.nodes)[-1], torch.neg), InputError, "output",
    ),
    "an argument from later": (
        lambda g: toolkit.insert_after(list(g.graph.nodes)[1], torch.add, list(g.graph.nodes)[2]),
        InputError,
        "computed after 'conv'",
    ),
    "an input removed": (
        lambda g: toolkit.remove_node(next(iter(g.graph.nodes))), InputError, "signature",
    ),
    "which input": (
        lambda g: toolkit.remove_node(toolkit.find(g, operator.add)[0]),
        InputError,
        "reads relu, conv: name with instead=",
    ),
    "instead of itself": (
        lambda g: toolkit.remove_node(list(g.graph.nodes)[1], instead=list(g.graph.nodes)[2]),
        InputError,
        "not computed before",
    ),
    "a rule that never ends": (
        lambda g: toolkit.decompose(g, {nn.ReLU: never_ending}), InputError, "never end",
    ),
    "a rule of two values": (
        lambda g: toolkit.decompose(g, {nn.ReLU: two_values}), InputError, "one value",
    ),
    "a rule with branches": (
        lambda g: toolkit.decompose(g, {nn.ReLU: steered}), CaptureError, "the rule for F.relu",
    ),
    "weights that would be lost": (
        lambda g: toolkit.replace_pattern(g, conv_norm(), conv_of(lambda m, x: m.conv(x))),
        InputError,
        "has no 'bn'",
    ),
    "a module of another class": (
        lambda g: toolkit.replace_pattern(g, nn.Sequential(nn.ReLU(), nn.Conv2d(1, 1, 1)),
                                          nn.Sequential(nn.ReLU(), nn.Linear(1, 1))),
        InputError,
        "'1' is a Conv2d in the pattern",
    ),
    "an unknown module": (
        lambda g: toolkit.replace_pattern(g, conv_norm(), lambda norm: None), InputError, "'norm'",
    ),
    "no module": (
        lambda g: toolkit.replace_pattern(g, conv_of(lambda m, x: m.conv(x)), lambda conv: 3),
        InputError,
        "made a int",
    ),
    "a pattern of two values": (
        lambda g: toolkit.replace_pattern(g, two_values, torch.neg), InputError, "one value",
    ),
    "a pattern of nothing": (
        lambda g: toolkit.replace_pattern(g, lambda x: x, torch.neg), InputError, "one value",
    ),
    "a pattern with an effect": (
        lambda g: toolkit.replace_pattern(g, lambda x: (x.neg(), torch.exp(x))[1], torch.neg),
        InputError,
        "nothing that this does not need",
    ),
    "another number of inputs": (
        lambda g: toolkit.replace_pattern(g, lambda x: torch.relu(x), lambda x, y: x + y),
        InputError,
        "another number of inputs",
    ),
    "a replacement of two values": (
        lambda g: toolkit.replace_pattern(g, lambda x: torch.relu(x), two_values),
        InputError,
        "one value",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_and_says_what_to_do(case: str) -> None:
    verb, kind, message = REFUSED[case]
    module = captured(lambda m, x: m.relu(y := m.conv(x)) + y)
    code = module.code

    with pytest.raises(kind) as raised:
        verb(module)

    assert message in str(raised.value)
    assert str(raised.value).endswith(".") or kind is CaptureError
    module.recompile()
    assert module.code == code


def overwrite(x: Tensor) -> None:
    x.zero_()


overwrite.__module__ = "torch_scatter"  # a package whose name begins with torch's
fx.wrap("overwrite")


def overwritten(m: Any, x: Tensor) -> Tensor:
    x = x + 0.5
    y = x * 2
    overwrite(x)
    return torch.add(x, y)


def test_code_of_a_package_called_like_torch_may_write() -> None:
    module = optimizer.capture(Held(overwritten), torch.ones(2))

    replaced = toolkit.replace_pattern(module, lambda x: torch.add(x, x * 2), lambda x: x * 3)

    assert torch.equal(replaced(torch.ones(2)), Held(overwritten)(torch.ones(2)))
