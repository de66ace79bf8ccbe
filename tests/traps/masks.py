"""Traps 75 to 81: masked assignment."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.traps._catalogue import CUBE, IMAGE, ROWS, SQUARE, WHOLE, trap


@trap(75, "as many values as the mask has", ROWS)
def values(m: Any, x: Any) -> Any:
    y = x * 2
    y[x > 1.0] = torch.tensor([5.0, 6.0, 7.0], dtype=torch.float64)[:3]
    return y


@trap(76, "a mask of rows over a square", SQUARE, ROWS)
def rows(m: Any, x: Any) -> Any:
    y = x * 2
    y[x[:, 0] > 0] = 0.0
    return y


@trap(76, "a mask of lower rank over a cube", CUBE, CUBE[:2])
def lower_rank(m: Any, x: Any) -> Any:
    y = x * 2
    y[x[:, :, 0] > 0] = 0.0
    return y


@trap(77, "a fraction into integers", WHOLE)
def truncated(m: Any, x: Any) -> Any:
    y = x * 2
    y[x > 5] = 1.7
    return y


@trap(77, "a negative fraction into integers", WHOLE)
def truncated_below(m: Any, x: Any) -> Any:
    y = x * 2
    y[x > 5] = -1.7
    return y


@trap(77, "a number into booleans", WHOLE)
def into_booleans(m: Any, x: Any) -> Any:
    y = x > 3
    y[x > 5] = 2
    return y


@trap(78, "an index that is no mask", SQUARE, i=lambda: torch.tensor([0, 2]))
def index(m: Any, x: Any) -> Any:
    y = x * 2
    y[m.i] = 0.0
    return y


@trap(78, "a mask and an index", ROWS)
def mask_and_index(m: Any, x: Any) -> Any:
    y = x * 2
    y[x[:, 0] > 0, 0] = 0.0
    return y


@trap(78, "y[m] += v", ROWS, ROWS[:2])
def added(m: Any, x: Any) -> Any:
    y = x * 2
    y[x > 0] += 1.0
    return y


@trap(79, "a mask without dimensions", ROWS, -ROWS)
def no_dimensions(m: Any, x: Any) -> Any:
    y = x * 2
    y[x.sum() > 0.0] = 1.0
    return y


@trap(79, "a mask that is empty", ROWS, ROWS + 9, rewritten=True)
def empty(m: Any, x: Any) -> Any:
    y = x * 2
    y[x > 5] = 1.0
    return y


@trap(80, "a tensor that is expanded", ROWS)
def expanded(m: Any, x: Any) -> Any:
    y = (x[:1] * 2).expand(3, 4)
    y[x > 0] = 1.0
    return y


@trap(81, "the strides of a transposed tensor", SQUARE, IMAGE[0, 0])
def strides(m: Any, x: Any) -> Any:
    y = x.t() * 2
    y[x > 0] = 1.0
    return y


@trap(79, "a mask beside an integer that is given", (ROWS, 0), (ROWS, 2), rewritten=True)
def beside_an_integer(m: Any, x: Any, n: Any) -> Any:
    y = x * n + 1
    y[y < 0] = 0.0
    return y


class OpaqueView(nn.Module):
    def forward(self, y: Any) -> Any:
        return y if float(y.sum()) > 1e9 else y.view(-1)


@trap(80, "a view that opaque code makes", ROWS, child=OpaqueView)
def opaque_view(m: Any, x: Any) -> Any:
    y = x * 2
    view = m.child(y)
    y[y < 0] = 0.0
    return view
