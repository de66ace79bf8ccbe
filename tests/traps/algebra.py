"""Traps 57 to 64: literals and algebra."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.traps._catalogue import CUBE, IMAGE, ROWS, WHOLE, linear, trap

SIGNED = torch.tensor([-0.0, 0.0, 1.0, -1.0, float("inf"), float("nan")], dtype=torch.float64)


@trap(57, "x + 1 beside x + 1.0", WHOLE)
def literals(m: Any, x: Any) -> Any:
    return x + 1, x + 1.0, x + True


@trap(57, "x / 0.0 beside x / -0.0", ROWS)
def zeros(m: Any, x: Any) -> Any:
    return x / 0.0, x / -0.0


@trap(58, "x + 0 of -0.0", SIGNED)
def plus_zero(m: Any, x: Any) -> Any:
    return 1 / (x + 0)


@trap(58, "x * 1.0 of integers", WHOLE)
def times_one(m: Any, x: Any) -> Any:
    return x * 1.0


@trap(58, "x * 0 of infinity", SIGNED)
def times_zero(m: Any, x: Any) -> Any:
    return x * 0, x - x, x / x


@trap(59, "a division by three", ROWS)
def division(m: Any, x: Any) -> Any:
    return x / 3


@trap(60, "a cast to float16 and back", ROWS * 1.2345)
def casts(m: Any, x: Any) -> Any:
    return x.half().double(), x.to(torch.float16).to(torch.float64)


@trap(60, "a cast to int32 and back", torch.tensor([2**40, 1]))
def whole_casts(m: Any, x: Any) -> Any:
    return x.int().long()


@trap(61, "where(x > 0, x, 0) of NaN", SIGNED)
def where(m: Any, x: Any) -> Any:
    return torch.where(x > 0, x, 0.0), torch.relu(x), x.clamp(min=0)


@trap(61, "a clamp whose bounds cross", ROWS)
def crossed(m: Any, x: Any) -> Any:
    return x.clamp(1.0, -1.0), x.clamp(0, 6), F.relu6(x)


@trap(62, "max_pool of relu with its indices", IMAGE)
def indices(m: Any, x: Any) -> Any:
    return F.max_pool2d(torch.relu(x), 2, return_indices=True)


@trap(62, "avg_pool of relu", IMAGE)
def average(m: Any, x: Any) -> Any:
    return torch.relu(F.avg_pool2d(x, 2)), F.avg_pool2d(torch.relu(x), 2)


@trap(64, "softmax of a row that is masked out", CUBE, b=lambda: nn.Parameter(torch.ones(4)))
def masked_out(m: Any, x: Any) -> Any:
    scores = x @ x.transpose(-2, -1) * 0.5
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool), float("-inf"))
    return scores.softmax(-1) @ x


@trap(59, "a Linear whose result is divided", ROWS, ROWS[:1], fc=linear())
def divided(m: Any, x: Any) -> Any:
    return (m.fc(x) / 3).exp()
