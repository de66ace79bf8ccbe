"""Traps 38 to 56: writes, aliases, dead code and constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.traps._catalogue import IMAGE, ROWS, conv, linear, norm, trap


def pointwise() -> nn.Module:
    return nn.Conv2d(4, 4, 1)


def renormalizing() -> nn.Module:
    return nn.Embedding(6, 3, max_norm=0.1)


@trap(38, "an in-place method whose result nobody reads", ROWS)
def unread_method(m: Any, x: Any) -> Any:
    x.mul_(0.0)
    return x


@trap(39, "an in-place ReLU whose result nobody reads", ROWS, relu=lambda: nn.ReLU(inplace=True))
def unread_relu(m: Any, x: Any) -> Any:
    y = x * 2
    m.relu(y)
    return y


@trap(39, "F.relu(inplace=True) whose result nobody reads", ROWS)
def unread_function(m: Any, x: Any) -> Any:
    y = x * 2
    F.relu(y, inplace=True)
    return y


@trap(39, "out= whose result nobody reads", ROWS)
def unread_out(m: Any, x: Any) -> Any:
    y = x * 2
    torch.add(y, 1.0, out=y)
    return y


@trap(39, "an in-place ReLU of what a norm reads", IMAGE, c=conv(), bn=norm())
def unread_before_a_norm(m: Any, x: Any) -> Any:
    y = m.c(x)
    F.relu(y, inplace=True)
    return m.bn(y)


@trap(40, "an assignment, which has no readers", ROWS)
def assignment(m: Any, x: Any) -> Any:
    y = x * 2
    y[:, 0] = 1.0
    return y


@trap(40, "an assignment to all of an input", ROWS)
def all_assigned(m: Any, x: Any) -> Any:
    x[...] = x * 2
    return x


@trap(40, "a column of an input that is added to", ROWS, ROWS[:, :2])
def column(m: Any, x: Any) -> Any:
    x[:, 0] += 1
    return x


@trap(41, "a clone that is written", ROWS)
def clone_written(m: Any, x: Any) -> Any:
    y = x.clone()
    y.relu_()
    return x + y


@trap(41, "x + 0 that is written", ROWS)
def sum_written(m: Any, x: Any) -> Any:
    y = x + 0
    y.relu_()
    return x + y


@trap(42, "an in-place ReLU of an input", ROWS)
def input_written(m: Any, x: Any) -> Any:
    return x.relu_()


@trap(42, "an input that is written as its data", ROWS)
def data(m: Any, x: Any) -> Any:
    x.data.add_(1)
    return x * 2


@trap(42, "an input that is written after a pair", IMAGE, rewritten=True, c=pointwise, bn=norm())
def written_after(m: Any, x: Any) -> Any:
    y = m.bn(m.c(x))
    x[x > 0] = 0.0
    return y + x


@trap(43, "a chunk that is written", ROWS)
def chunk(m: Any, x: Any) -> Any:
    first, second = x.chunk(2, -1)
    first.add_(1)
    return first, second, x


@trap(43, "a transpose that cancels and is written", ROWS, rewritten=True)
def transposed(m: Any, x: Any) -> Any:
    y = x * 1
    view = y.T
    view.T.add_(1)
    return y, view


@trap(43, "a view taken before a write", ROWS)
def view_before(m: Any, x: Any) -> Any:
    y = x.clone()
    view = y[0]
    y[y < 0] = 1.0
    return view


@trap(44, "an in-place ReLU after the residual was kept", ROWS)
def residual(m: Any, x: Any) -> Any:
    y = x * 2
    kept = y
    y = y.relu_()
    return y + kept


@trap(
    44,
    "an in-place ReLU after a pair, and a residual",
    IMAGE,
    rewritten=True,
    c=pointwise,
    bn=norm(),
    relu=lambda: nn.ReLU(inplace=True),
)
def residual_of_pairs(m: Any, x: Any) -> Any:
    y = m.relu(m.bn(m.c(x)))
    return m.bn(m.c(y)) + y


@trap(44, "a residual that is added in place", IMAGE, rewritten=True, c=pointwise, bn=norm())
def added_in_place(m: Any, x: Any) -> Any:
    y = m.bn(m.c(x))
    z = y
    z += x
    return y * z


@trap(45, "an input that is returned twice", ROWS)
def input_twice(m: Any, x: Any) -> Any:
    return x, x


@trap(45, "two results that share storage", ROWS, rewritten=True, drop=lambda: nn.Dropout())
def shared_results(m: Any, x: Any) -> Any:
    y = x * 2
    return y, m.drop(y)


@trap(45, "a result that is the input", ROWS, rewritten=True, drop=lambda: nn.Identity())
def result_is_input(m: Any, x: Any) -> Any:
    return m.drop(x)


@trap(47, "a buffer that is read through a view", ROWS, ROWS, b=lambda: nn.Buffer(-torch.ones(4)))
def buffer_view(m: Any, x: Any) -> Any:
    return torch.relu(m.b.expand_as(x)) + m.b + x


@trap(48, "a buffer that counts", ROWS, ROWS, ROWS, b=lambda: nn.Buffer(torch.zeros(())))
def counter(m: Any, x: Any) -> Any:
    m.b += 1
    return x * (m.b * 2)


@trap(49, "an attribute that is read twice", ROWS, w=lambda: nn.Parameter(torch.ones(4)))
def read_twice(m: Any, x: Any) -> Any:
    return x * m.w + m.w.detach()


@trap(50, "a random tensor", ROWS, ROWS)
def random_tensor(m: Any, x: Any) -> Any:
    return x + torch.rand(1, dtype=torch.float64)


@trap(50, "two dropouts in training", ROWS, ROWS)
def two_dropouts(m: Any, x: Any) -> Any:
    return F.dropout(x, training=True) + F.dropout(x, training=True)


@trap(50, "random numbers beside a pair", IMAGE, IMAGE, rewritten=True, c=conv(), bn=norm())
def random_beside(m: Any, x: Any) -> Any:
    return m.bn(m.c(x)) + torch.rand(6) + F.dropout(x[..., 2:, 2:], 0.5, training=True)


@trap(50, "an embedding that renormalizes its weight", torch.arange(4), e=renormalizing)
def renormalized(m: Any, x: Any) -> Any:
    return m.e(x)


@trap(53, "a constant that grows", ROWS, w=lambda: nn.Parameter(torch.ones(1)))
def grows(m: Any, x: Any) -> Any:
    return x.sum() + m.w.expand(2000, 2000).contiguous()[0, 0]


def script(m: Any) -> None:
    m.child = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval().double())


@trap(56, "a scripted child", ROWS, change=script)
def scripted(m: Any, x: Any) -> Any:
    return m.child(x)


@trap(56, "a constant that is returned", ROWS, ROWS, w=lambda: nn.Parameter(torch.ones(4)))
def returned(m: Any, x: Any) -> Any:
    return x, m.w * 2


@trap(53, "a pair beside a written buffer", IMAGE, IMAGE, c=conv(), bn=norm(), fc=linear())
def written_statistics(m: Any, x: Any) -> Any:
    m.bn.running_mean.add_(1.0)
    return m.bn(m.c(x))
