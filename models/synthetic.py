"""Models of any size, each made of one pattern that a pass is for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ._registry import Built, workload

_FAMILY = "synthetic"


@workload(_FAMILY, sizes=(10, 100))
def linear_bn_relu(generator: torch.Generator, depth: int, width: int = 64) -> Built:
    """`depth` times Linear, BatchNorm, ReLU, all `width` wide."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
    return nn.Sequential(*layers), (torch.randn(16, width, generator=generator),)


_TRANSPOSES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.transpose(1, 2),
    lambda x: torch.transpose(x, -1, -2),
    lambda x: x.permute(0, 2, 3, 1),
    lambda x: torch.permute(x, dims=(0, 3, 1, 2)),
    lambda x: x.swapaxes(1, -1),
    lambda x: x.movedim(1, -1),
    lambda x: x.mT,
)
_TRANSPOSES_IN_A_RUN = 3


class TransposeChain(nn.Module):
    """Runs of three transposes in ever different spellings, an elementwise operation after each.

    The elementwise operations undo one another every four runs, so values keep their size.
    """

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        for position in range(self.depth):
            x = _TRANSPOSES[position % len(_TRANSPOSES)](x)
            run, place = divmod(position, _TRANSPOSES_IN_A_RUN)
            if place == _TRANSPOSES_IN_A_RUN - 1:
                x = -x if run % 2 else x + 0.5
        return x


@workload(_FAMILY, sizes=(10, 100))
def transpose_chain(generator: torch.Generator, depth: int) -> Built:
    """`depth` transposes and permutes of a (2, 16, 24, 32) tensor."""
    return TransposeChain(depth), (torch.randn(2, 16, 24, 32, generator=generator),)


class MaskedPostprocess(nn.Module):
    """What a detector does after its head: clip boxes, drop weak scores and tiny boxes.

    Boxes are (x1, y1, x2, y2) in units of the image, (N, 4); logits are (N, classes). Four of
    the five assignments have a mask of the shape of what they write; the last mask, (N,),
    selects whole rows.
    """

    def forward(self, logits: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        clipped = boxes.clone()
        clipped[boxes < 0.0] = 0.0
        clipped[boxes > 1.0] = 1.0

        scores = logits.sigmoid()
        strong = scores.clone()
        strong[scores < 0.3] = 0.0

        best = strong.amax(dim=1, keepdim=True)
        leading = strong.clone()
        leading[strong < best] = -1.0

        left, top, right, bottom = clipped.unbind(dim=1)
        kept = leading.clone()
        kept[(right - left) * (bottom - top) < 0.01] = 0.0
        return clipped, kept


@workload(_FAMILY, sizes=(256, 4096))
def masked_postprocess(generator: torch.Generator, boxes: int, classes: int = 16) -> Built:
    """Masked post-processing of `boxes` candidate boxes with scores for `classes` classes."""
    corner = torch.rand(boxes, 2, generator=generator) * 1.2 - 0.2
    extent = torch.rand(boxes, 2, generator=generator) * 0.4
    logits = torch.randn(boxes, classes, generator=generator)
    return MaskedPostprocess(), (logits, torch.cat([corner, corner + extent], dim=1))
