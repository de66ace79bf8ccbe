"""Traps 82 to 95: recording a forward."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.traps._catalogue import DEEP, IMAGE, ROWS, SQUARE, conv, linear, norm, norm1, trap

Pair = namedtuple("Pair", ["first", "second"])


@trap(82, "control flow on data", ROWS, -ROWS, fc=linear(), bn=norm1())
def control_flow(m: Any, x: Any) -> Any:
    return m.bn(m.fc(x)) if x[0].sum() > 0 else x


@trap(82, "an optional argument that is left out", ROWS)
@trap(82, "an optional argument that is given", (ROWS, ROWS), (ROWS[:1], ROWS))
def optional(m: Any, x: Any, y: Any = None) -> Any:
    return x if y is None else x + y


@trap(82, "a rank inside a dict", {"x": ROWS}, {"x": ROWS[:2]}, fc=linear(), bn=norm1())
def rank_in_a_dict(m: Any, given: Any) -> Any:
    return m.bn(m.fc(given["x"]))


@trap(82, "containers of every kind", ROWS, rewritten=True, fc=linear(), bn=norm1())
def containers(m: Any, x: Any) -> Any:
    y = m.bn(m.fc(x))
    return {"b": OrderedDict(b=y, a=x), "a": [x + 1, (y, {"y": Pair(y, x + 1)})]}


@trap(82, "a cache in a dict that is given", (ROWS, {}))
def cache_in_a_dict(m: Any, x: Any, cache: Any) -> Any:
    cache["k"] = x * 2
    return x + 1


@trap(82, "a cache in a list that is given", (ROWS, []))
def cache_in_a_list(m: Any, x: Any, cache: Any) -> Any:
    cache.append(x * 2)
    return x + 1


@trap(83, "dropout by self.training", ROWS, rewritten=True)
def training_flag(m: Any, x: Any) -> Any:
    return F.dropout(x, 0.5, m.training) * 2


@trap(
    84, "a dropout in training mode", ROWS, ROWS, change=lambda m: m.drop.train(), drop=nn.Dropout
)
def dropout_trains(m: Any, x: Any) -> Any:
    return m.drop(x)


@trap(
    84,
    "dropouts of every kind, by keyword",
    IMAGE,
    rewritten=True,
    drop=nn.Dropout2d,
    a=nn.AlphaDropout,
)
def dropouts(m: Any, x: Any) -> Any:
    return F.dropout(input=m.a(m.drop(input=x)), training=False) * 2


@trap(84, "an LSTM", DEEP, DEEP[:, :2], layer=lambda: nn.LSTM(4, 5, 2, batch_first=True))
def lstm(m: Any, x: Any) -> Any:
    return m.layer(x)[0]


@trap(88, "a value behind an opaque function", SQUARE, SQUARE)
def opaque(m: Any, x: Any) -> Any:
    return torch.linalg.qr(x)[1].abs()


def pair() -> nn.Module:
    return nn.Sequential(conv()(), norm()())


def share(m: Any) -> None:
    m.second = nn.ModuleList([*m.first])


@trap(90, "a layer below two parents", IMAGE, rewritten=True, change=share, first=pair)
def two_parents(m: Any, x: Any) -> Any:
    return m.first(x) + m.second[1](m.second[0](x))


COMPLEX = torch.ones(4, 4, dtype=torch.complex128)


@trap(95, "complex weights", SQUARE.to(COMPLEX), w=lambda: nn.Parameter(COMPLEX.clone()))
def complex_weights(m: Any, x: Any) -> Any:
    return F.linear(x, m.w.to(torch.complex128)).abs()


def hold_sparse(m: Any) -> None:
    m.s = torch.eye(4).double().to_sparse()


@trap(95, "a sparse buffer", SQUARE, change=hold_sparse)
def sparse(m: Any, x: Any) -> Any:
    return torch.sparse.mm(m.s, x)
