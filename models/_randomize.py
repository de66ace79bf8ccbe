"""Random parameters and statistics under which a model's output means something.

Default initialization hides mistakes: zero biases, BatchNorm statistics of exactly (0, 1), and
in torchvision's vit_b_16 a zero head whose output is zero whatever happened before it.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

_OFFSET_STD = 0.2
_NEGATIVE_SCALES = 0.1


@torch.no_grad()
def randomize(module: nn.Module, generator: torch.Generator) -> None:
    """Redraw every floating-point parameter and buffer of `module`, in place.

    The draws keep the size of activations over any depth of Linear or Conv, norm and ReLU: the
    weights double the variance that ReLU halves, and a norm's scale² / variance averages one.
    """
    for path, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.is_floating_point():
            _redraw(path.rpartition(".")[2], tensor, generator)


def _redraw(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    if name == "running_var":
        tensor.uniform_(0.5, 2.0, generator=generator)
    elif not name.endswith("weight"):
        # Biases, running means, class tokens, embeddings, layer scales, lookup tables.
        tensor.normal_(std=_OFFSET_STD, generator=generator)
    elif tensor.dim() < 2:
        _redraw_norm_scale(tensor, generator)
    else:
        fan_in = tensor[0].numel()
        tensor.normal_(std=(2.0 / fan_in) ** 0.5, generator=generator)


def _redraw_norm_scale(tensor: torch.Tensor, generator: torch.Generator) -> None:
    negative = torch.rand(tensor.shape, generator=generator) < _NEGATIVE_SCALES
    tensor.uniform_(0.75, 1.3, generator=generator)
    tensor[negative] *= -1.0
