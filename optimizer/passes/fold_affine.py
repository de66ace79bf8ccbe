"""Scale and shift by channel become part of the layer before or after them."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvTransposeNd

from optimizer.core.node import arg, callee, module_of
from optimizer.facts.facts import dtype, is_unchanged, is_written, rank, tensor
from optimizer.rewrite.affine import Affine, Layer, absorbed_after, absorbed_before, channels
from optimizer.rewrite.channels import (
    AFFINES,
    LAYERS,
    affine_over,
    call_folded,
    keeps_single_elements,
    may_keep_odd_strides,
    operand,
    require_moderate_shift,
    require_only_reader,
)
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import insert_function, supersede
from optimizer.rewrite.pattern import call


@rewrite(call(*AFFINES, name="affine"), numerics="rounding", phase="fold")
def fold_affine(affine: fx.Node) -> fx.Node | None:
    """Fold an inference-mode BatchNorm, or constants per channel, into the layer that feeds it.

    scale * layer(x) + shift -> layer'(x), where layer is a Linear, a Conv or a ConvTranspose.

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


@rewrite(
    call(*LAYERS, args=(call(*AFFINES, name="affine"),), name="layer"),
    numerics="rounding",
    phase="fold",
)
def fold_affine_forward(affine: fx.Node, layer: fx.Node) -> fx.Node | None:
    """Fold an inference-mode BatchNorm, or constants per channel, into the layer that reads it.

    layer(scale * x + shift) -> layer'(x), where layer is a Linear, a Conv or a ConvTranspose.

    What is y = s * x + t for each input channel of a layer with weight W and bias b leaves it
    with W' = W * s and b' = b + the sum of W * t over inputs and taps, since Linear and Conv are
    linear. A tap on a zero that pads the input adds no W * t, and a ConvTranspose has fewer taps
    at its border: these absorb no shift. Padding by reflection and the like repeats shifted
    values. W' * x and b' cancel where the values were centred by a shift far beyond their size,
    which eager rounds before and this after: such a shift stays. Nobody else may read the
    affine values. A convolution lays its output out as its input lies, which a BatchNorm may
    change: its input must lie alike. The new layer is called where they were computed, and reads
    what they read; if that may have one channel in another call, it is expanded to as many as the
    constants have.
    """
    source = operand(affine)
    if source is None or len(layer.args) != 1 or layer.kwargs:
        return None
    linear = module_of(layer)
    transform = affine_over(affine, linear, channels(linear)[1])
    require(not is_written(layer), "the forward writes their tensors")
    require_only_reader(affine, layer)
    kept = is_unchanged(source, affine)
    require(kept, "what the layer would keep for gradients is written later")
    require(dtype(source) == linear.weight.dtype, "dtype or device differ")
    require(_keeps_shape(affine, source), "the constant changes the shape")
    require(_commutes(linear, transform), "the layer pads with zeros, which are not shifted")
    require_moderate_shift(transform)
    alike = tensor(source).stride() == tensor(affine).stride()
    require(alike or isinstance(linear, nn.Linear), "the affine lays its output out otherwise")

    constants = affine.op != "call_module" and transform.scale.numel() > 1
    wide = _widened(affine, source, 1 - linear.weight.ndim) if constants else source
    folded = call_folded(affine, (layer, affine), (wide,), absorbed_before, transform)
    supersede(affine, wide)
    return folded


def _widened(reader: fx.Node, source: fx.Node, axis: int) -> fx.Node:
    """The values that constants are combined with, one channel repeated as they would repeat it.

    Done ahead of other affine nodes, which then still meet the layer.
    """
    sizes = [-1] * rank(source)
    sizes[axis] = tensor(source).shape[axis]
    is_wide = (source.target, source.args[1:]) == ("expand", tuple(sizes))
    if is_wide or _channels_axis(source) == axis:
        return source
    before = operand(source) if callee(source) in AFFINES else None
    if before is None or len(source.users) > 1 or not _keeps_shape(source, before):
        return insert_function(reader, "expand", (source, *sizes))
    source.replace_input_with(before, _widened(source, before, axis))
    return source


def _channels_axis(node: fx.Node) -> int | None:
    """Where a layer has as many channels in every call, counted from the last axis.

    A BatchNorm does not: it takes any number of them if there are no elements.
    """
    module = module_of(node) if node.op == "call_module" else None
    return 1 - module.weight.ndim if isinstance(module, LAYERS) else None


def _keeps_shape(affine: fx.Node, source: fx.Node) -> bool:
    if affine.op == "call_module":
        return True  # as every BatchNorm does
    return rank(source) == rank(affine) and tensor(source).shape == tensor(affine).shape


def _commutes(layer: Layer, affine: Affine) -> bool:
    """Whether every output sees every tap on a shifted value."""
    if not affine.shift.any() or isinstance(layer, nn.Linear):
        return True
    if isinstance(layer, _ConvTransposeNd):
        return False
    return layer.padding_mode != "zeros" or not any(layer._reversed_padding_repeated_twice)
