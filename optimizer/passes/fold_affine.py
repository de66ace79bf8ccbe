"""scale * layer(x) + shift -> layer'(x), where layer is a Linear, a Conv or a ConvTranspose."""

from __future__ import annotations

import torch
from torch import fx, nn

from optimizer.core.node import arg, callee, module_of
from optimizer.facts.facts import is_written, rank
from optimizer.rewrite.affine import absorbed_after, channels
from optimizer.rewrite.channels import (
    AFFINES,
    LAYERS,
    affine_over,
    call_folded,
    keeps_single_elements,
    may_keep_odd_strides,
    operand,
    require_only_reader,
)
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import insert_function, supersede
from optimizer.rewrite.pattern import call


@rewrite(call(*AFFINES, name="affine"), numerics="rounding", phase="fold")
def fold_affine(affine: fx.Node) -> fx.Node | None:
    """Fold an inference-mode BatchNorm, or constants per channel, into the layer that feeds it.

    In eval mode BatchNorm is y = s * x + t with s = gain / sqrt(var + eps), t = shift - s * mean
    for each index of dimension 1; so are sums, products and quotients with a constant that has
    one number for each channel. A Linear on (N, C) and a Conv on (N, C, ...) make dimension 1
    with the outputs of their weight W, so W' = s * W and b' = s * b + t absorb it. Flattening
    all but the last dimension leaves the outputs of a Linear in the last one. Nobody else may
    read the layer's output, since it is no longer computed; its shape stays what it was. The
    fold is computed in float64 and rounded once. The layer itself is left as it is, for other
    calls.
    """
    source = operand(affine)
    if source is None:
        return None
    flat = source if callee(source) is torch.flatten else None
    layer = source if flat is None else flat.all_input_nodes[0]
    if callee(layer) not in LAYERS or layer.kwargs:
        return None
    linear = module_of(layer)
    transform = affine_over(affine, linear, channels(linear)[0])
    require(not is_written(layer), "the forward writes their tensors")
    require_only_reader(layer, flat or affine)
    if flat is not None:
        require_only_reader(flat, affine)
        require(_keeps_last_dimension(flat, linear), "flattening mixes the layer's outputs")
    is_norm = affine.op == "call_module"
    require(not is_norm or not keeps_single_elements(layer), "its output may be laid out otherwise")
    laid_out_anew = is_norm and may_keep_odd_strides(layer)
    folded = call_folded(layer, (layer, affine), layer.args, absorbed_after, transform)
    supersede(layer, folded)
    if laid_out_anew:
        return insert_function(affine, "contiguous", (folded,))
    if flat is None:
        return folded
    flattened = insert_function(flat, torch.flatten, (folded, *flat.args[1:]))
    supersede(flat, flattened)
    return flattened


def _keeps_last_dimension(flat: fx.Node, layer: nn.Module) -> bool:
    dimensions, last = rank(flat.all_input_nodes[0]), arg(flat, 2)
    fixed = isinstance(layer, nn.Linear) and isinstance(last, int)
    return fixed and last % dimensions < dimensions - 1


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    model = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())
    return model.eval(), (torch.randn(1, 3, 16, 16),)
