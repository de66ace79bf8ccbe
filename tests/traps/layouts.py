"""Traps 65 to 74: transposes and views."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.traps._catalogue import CUBE, DEEP, IMAGE, ROWS, SQUARE, linear, trap


@trap(65, "axes that cancel in four dimensions", IMAGE, IMAGE[:1], rewritten=True)
def cancels(m: Any, x: Any) -> Any:
    return x.transpose(1, -1).transpose(-3, 3).exp()


@trap(65, "axes that do not cancel in three", DEEP, rewritten=True)
def does_not_cancel(m: Any, x: Any) -> Any:
    return x.transpose(1, -1).transpose(-3, 2).exp()


@trap(66, "one cycle twice", CUBE, DEEP, rewritten=True)
def cycle(m: Any, x: Any) -> Any:
    return x.permute(1, 2, 0).permute(1, 2, 0)


@trap(67, "every spelling of a permute", DEEP, rewritten=True)
def spellings(m: Any, x: Any) -> Any:
    y = x.permute((1, 0, 2)).permute(dims=(1, 0, 2)).swapaxes(0, 1).movedim(0, 1)
    return torch.transpose(input=y.mT, dim0=1, dim1=2) + torch.permute(x, [0, 1, 2])


@trap(68, "t() of a vector", ROWS[0], rewritten=True)
def vector(m: Any, x: Any) -> Any:
    return x.t().t().exp()


@trap(69, "permute, contiguous, permute, view", DEEP)
def contiguous(m: Any, x: Any) -> Any:
    y = x.permute(0, 2, 1).contiguous().permute(0, 2, 1)
    return y, y.permute(0, 2, 1).view(-1)


@trap(70, "a transposed weight", ROWS, fc=linear(4, 4))
def weight(m: Any, x: Any) -> Any:
    return x @ m.fc.weight + x @ m.fc.weight.t() + F.linear(x, m.fc.weight.t())


@trap(
    71,
    "a sum with a vector between transposes",
    CUBE,
    DEEP[:, :, :1].expand(2, 3, 4)[:, :, :4],
    k=lambda: nn.Parameter(torch.arange(4.0)),
)
def broadcast(m: Any, x: Any) -> Any:
    y = x.permute(0, 2, 1)
    return (y + y.mean()).permute(0, 2, 1) + m.k


@trap(
    71, "a vector added in the transposed layout", CUBE, k=lambda: nn.Parameter(torch.arange(4.0))
)
def broadcast_inside(m: Any, x: Any) -> Any:
    return (x.permute(0, 2, 1) + m.k).permute(0, 2, 1)


@trap(72, "a reshape that is written", ROWS)
def reshape_written(m: Any, x: Any) -> Any:
    y = x * 2
    y.reshape(-1).add_(1.0)
    y.t().reshape(-1).add_(1.0)
    return y


@trap(72, "a reshape to the shape of another", DEEP, DEEP[:1], rewritten=False)
def reshape_as(m: Any, x: Any) -> Any:
    return x.flatten(0, 1).reshape_as(x), x.reshape(-1).reshape(x.shape)


@trap(73, "a permute that is returned twice", DEEP, rewritten=True)
def returned_twice(m: Any, x: Any) -> Any:
    y = x.permute(0, 2, 1)
    return y, y, y.permute(0, 2, 1)


@trap(
    74,
    "channels_last strides",
    IMAGE.to(memory_format=torch.channels_last),
    c=lambda: nn.Conv2d(4, 4, 1),
)
def strides(m: Any, x: Any) -> Any:
    y = m.c(x)
    return y, y.is_contiguous(memory_format=torch.channels_last)


@trap(74, "strides after a transposed sum", SQUARE)
def transposed_sum(m: Any, x: Any) -> Any:
    return torch.relu(x.t()), (x.t() + 1).t().contiguous()
