"""batchnorm(layer(x)) -> layer'(x), where layer is a Linear or a Conv."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from optimizer._affine import fold, is_finite
from optimizer._edit import insert_call, insert_module
from optimizer._facts import is_written, rank
from optimizer._graph import module_of, owner
from optimizer._match import call
from optimizer._pass import require, rewrite

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

# The only rank that these accept; BatchNorm1d takes two and must be looked at.
_RANK: dict[type, int] = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}


@rewrite(
    call(*NORMS, args=(call(*LAYERS, name="layer"),), name="norm"),
    numerics="rounding",
    phase="fold",
)
def fold_batchnorm(layer: fx.Node, norm: fx.Node) -> fx.Node:
    """Fold an inference-mode BatchNorm into the Linear or Conv that feeds it.

    In eval mode BatchNorm is y = s * (x - mean) + shift with s = scale / sqrt(var + eps) for
    each index of dimension 1. A Linear on (N, C) and a Conv on (N, C, ...) make dimension 1
    with the rows of their weight W, so W' = s * W and b' = s * (b - mean) + shift absorb it.
    Nobody else may read the layer's output, since it is no longer computed. The fold is
    computed in float64 and rounded once. The layer itself is left as it is, for other calls.
    """
    linear, bn = module_of(layer), module_of(norm)
    require(not bn.training, "BatchNorm is in training mode and uses batch statistics")
    require(_has_statistics(bn), "BatchNorm tracks no running statistics and uses the batch's")
    require(len(layer.users) == 1, "the layer's output is read elsewhere")
    known_rank = _RANK.get(type(bn)) or rank(layer)
    require(known_rank == linear.weight.ndim, "BatchNorm normalizes another axis than the layer's")
    require(linear.weight.shape[0] == bn.num_features, "the number of features differs")
    require(_same_kind(linear.weight, bn.running_var), "dtype or device differ")
    require(not (is_written(layer) or is_written(norm)), "the forward writes their tensors")

    return _call_folded(layer, norm, linear, bn)


def _has_statistics(bn: Any) -> bool:
    return bn.running_mean is not None and bn.running_var is not None


def _same_kind(weight: torch.Tensor, variance: torch.Tensor) -> bool:
    floating = weight.is_floating_point()
    return floating and (weight.dtype, weight.device) == (variance.dtype, variance.device)


def _call_folded(layer: fx.Node, norm: fx.Node, linear: Any, bn: Any) -> fx.Node:
    """Call the folded layer where the layer stood; a pair called twice is folded once."""
    folded_pairs = owner(layer).meta.setdefault("folded_pairs", {})
    pair = (layer.target, norm.target)
    if pair in folded_pairs:
        return insert_call(layer, folded_pairs[pair], layer.args, like=layer)
    folded = fold(linear, bn)
    require(is_finite(folded), "the folded weights overflow")
    stem = f"{layer.target}_folded".replace(".", "_")
    node = insert_module(layer, folded, layer.args, stem, like=layer)
    folded_pairs[pair] = node.target
    return node


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())
    return model.eval(), (torch.randn(1, 3, 16, 16),)
