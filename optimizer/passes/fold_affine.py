"""Scale and shift by channel become part of the layer before or after them."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvTransposeNd

from optimizer.core.errors import require
from optimizer.core.node import adopt, arg, attribute_of, callee, is_attribute, module_of, owner
from optimizer.core.ops import LINEAR_LAYERS
from optimizer.facts.facts import dtype, is_read_only, is_unchanged, rank, tensor, weights_exposed
from optimizer.rewrite.affine import (
    Affine,
    Layer,
    absorbed,
    channels,
    reads_odd_strides,
    require_only_reader,
    wide,
)
from optimizer.rewrite.contract import call, rewrite
from optimizer.rewrite.edit import insert, insert_function, supersede

AFFINES = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    operator.add, operator.sub, operator.mul, operator.truediv,
)  # fmt: skip

# The only rank that these accept; BatchNorm1d takes two and must be looked at.
_RANK: dict[type, int] = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}
_LARGEST_SHIFT = 4.0  # root mean square


@rewrite(call(*AFFINES, name="affine"), numerics="rounding", phase="fold")
def fold_affine(affine: fx.Node) -> fx.Node | None:
    """Fold an inference-mode BatchNorm, or constants per channel, into the layer that feeds it.

    scale * layer(x) + shift -> layer'(x), where layer is a Linear, a Conv or a ConvTranspose.

    In eval mode BatchNorm is y = s * x + t with s = gain / sqrt(var + eps), t = shift - s * mean
    for each index of dimension 1; so are sums, products and quotients with a constant that has
    one number for each channel. A Linear on (N, C) and a Conv on (N, C, ...) make dimension 1
    with the outputs of their weight W, so W' = s * W and b' = s * b + t absorb it. Flattening
    all but the last dimension leaves the outputs of a Linear in the last one. The layer's
    output is no longer computed, so nothing else may read it; its shape stays. The fold is computed
    in float64 and rounded once. The layer itself is left as it is, for other calls.
    """
    source = _operand(affine)
    if source is None:
        return None
    flat = source if callee(source) is torch.flatten else None
    layer = source if flat is None else flat.all_input_nodes[0]
    if callee(layer) not in LINEAR_LAYERS or layer.kwargs:
        return None
    linear = module_of(layer)
    transform = _affine_over(affine, linear, channels(linear)[0])
    require(not weights_exposed(layer), "the forward writes their tensors")
    require_only_reader(layer, flat or affine)
    if flat is not None:
        require_only_reader(flat, affine)
        dimensions, last = rank(layer), arg(flat, 2)
        fixed = isinstance(linear, nn.Linear) and isinstance(last, int)
        unmixed = fixed and last % dimensions < dimensions - 1
        require(unmixed, "flattening mixes the layer's outputs")
    is_norm = affine.op == "call_module"
    require(not (is_norm and _is_one_place(layer)), "its output may be laid out otherwise")
    # Of length 1, a Conv1d lays its output out as if channels came last; a BatchNorm does not.
    laid_out_anew = is_norm and linear.weight.ndim == 3 and reads_odd_strides(layer)
    path = _folded_pair(layer, affine, transform)
    folded = insert(layer, "call_module", path, layer.args, like=layer)
    supersede(layer, folded)
    if laid_out_anew:
        return insert_function(affine, "contiguous", (folded,))
    if flat is None:
        return folded
    flattened = insert_function(flat, torch.flatten, (folded, *flat.args[1:]))
    supersede(flat, flattened)
    return flattened


def _is_one_place(layer: fx.Node) -> bool:
    """Return whether an image of one place has strides that a BatchNorm, but no copy, changes."""
    result = layer.meta.get("fact")
    if result is None or result.error or result.value.ndim not in _RANK.values():
        return False
    _, channels, *places = result.value.shape
    return (channels == 1 or math.prod(places) == 1) and reads_odd_strides(layer)


@rewrite(
    call(*LINEAR_LAYERS, args=(call(*AFFINES, name="affine"),), name="layer"),
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
    which eager rounds before and this after: such a shift stays. Nothing else may read the
    affine values. A convolution lays its output out as its input lies, which a BatchNorm may
    change: its input must lie alike. The new layer is called where they were computed, and reads
    what they read, expanded to as many channels as the constants have if another call may have one.
    """
    source = _operand(affine)
    if source is None or len(layer.args) != 1 or layer.kwargs:
        return None
    linear = module_of(layer)
    transform = _affine_over(affine, linear, channels(linear)[1])
    require(not weights_exposed(layer), "the forward writes their tensors")
    require_only_reader(affine, layer)
    unchanged = is_unchanged(source, affine)
    require(unchanged, "what the layer would keep for gradients is written later")
    require(dtype(source) == linear.weight.dtype, "dtype or device differ")
    require(_keeps_shape(affine, source), "the constant changes the shape")
    zeros = getattr(linear, "padding_mode", "") == "zeros"
    at_border = isinstance(linear, _ConvTransposeNd) or (
        zeros and any(linear._reversed_padding_repeated_twice)
    )
    unshifted = at_border and bool(transform.shift.any())
    require(not unshifted, "the layer pads with zeros, which are not shifted")
    moderate = bool(transform.shift.square().mean().sqrt() <= _LARGEST_SHIFT)
    require(moderate, "the shift is so large that it would cancel after the layer only")
    alike = tensor(source).stride() == tensor(affine).stride()
    require(alike or isinstance(linear, nn.Linear), "the affine lays its output out otherwise")
    constants, path = affine.op != "call_module", _folded_pair(layer, affine, transform)
    widens = constants and transform.scale.numel() > 1
    read = _widened(affine, source, 1 - linear.weight.ndim) if widens else source
    folded = insert(affine, "call_module", path, (read,), like=layer)
    supersede(affine, read)
    return folded


def _widened(reader: fx.Node, source: fx.Node, axis: int) -> fx.Node:
    """Return the values that constants scale or shift, with one channel repeated as they do.

    Done ahead of other affine nodes, which then still meet the layer. A layer has as many
    channels in every call; a BatchNorm takes any number of them if there are no elements.
    """
    sizes = [-1] * rank(source)
    sizes[axis] = tensor(source).shape[axis]
    module = module_of(source) if source.op == "call_module" else None
    is_wide = isinstance(module, LINEAR_LAYERS) and 1 - module.weight.ndim == axis
    if is_wide or (source.target, source.args[1:]) == ("expand", tuple(sizes)):
        return source
    before = _operand(source) if callee(source) in AFFINES else None
    if before is None or len(source.users) > 1 or not _keeps_shape(source, before):
        return insert_function(reader, "expand", (source, *sizes))
    source.replace_input_with(before, _widened(source, before, axis))
    return source


def _keeps_shape(affine: fx.Node, source: fx.Node) -> bool:
    if affine.op == "call_module":
        return not module_of(affine).training  # else its statistics are of what is not repeated
    return rank(source) == rank(affine) and tensor(source).shape == tensor(affine).shape


def _operand(node: fx.Node) -> fx.Node | None:
    """Return the value that an affine node maps, or None where it maps two or divides by it."""
    values = [each for each in node.args if isinstance(each, fx.Node) and not _is_constant(each)]
    constants = sum(map(_is_constant, node.args))
    one = len(values) == 1 and constants == (node.op == "call_function")
    inverse = node.target is operator.truediv and _is_constant(node.args[0])
    return values[0] if one and not inverse else None


def _is_constant(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return is_attribute(value) and isinstance(attribute_of(value), torch.Tensor)
    return type(value) in (int, float)


def _affine_over(node: fx.Node, layer: Layer, channels: int) -> Affine:
    """Return what an affine node does to a layer's channels, dimension `1 - layer.weight.ndim`."""
    if node.op == "call_module":
        return _of_batchnorm(node, layer, channels)
    comes_first = _is_constant(node.args[0])
    value = _constant(node, node.args[0 if comes_first else 1], layer, channels)
    one, zero = torch.ones_like(value), torch.zeros_like(value)
    if node.target is operator.mul:
        return Affine(value, zero)
    if node.target is operator.truediv:
        return Affine(1 / value, zero)
    if node.target is operator.add:
        return Affine(one, value)
    return Affine(-one, value) if comes_first else Affine(one, -value)


@torch.no_grad()
def _of_batchnorm(node: fx.Node, layer: Layer, channels: int) -> Affine:
    bn = module_of(node)
    require(not bn.training, "BatchNorm is in training mode and uses batch statistics")
    tracks = bn.running_mean is not None and bn.running_var is not None
    require(tracks, "BatchNorm tracks no running statistics and uses the batch's")
    dimensions = _RANK.get(type(bn)) or rank(node.all_input_nodes[0])
    require(dimensions == layer.weight.ndim, "BatchNorm normalizes another axis than the layer's")
    require(channels == bn.num_features, "the number of features differs")
    require(_fits(layer.weight, bn.running_var), "dtype or device differ")
    require(not weights_exposed(node), "the forward writes their tensors")
    scale = (1.0 if bn.weight is None else wide(bn.weight)) / (wide(bn.running_var) + bn.eps).sqrt()
    shift = (0.0 if bn.bias is None else wide(bn.bias)) - scale * wide(bn.running_mean)
    return Affine(scale, shift)


@torch.no_grad()
def _constant(node: fx.Node, constant: Any, layer: Layer, channels: int) -> torch.Tensor:
    """Return a node's constant in float64; refuse if it is not one number, or one a channel."""
    if not isinstance(constant, fx.Node):
        require(layer.weight.is_floating_point(), "dtype or device differ")
        return torch.full_like(wide(layer.weight.new_empty(1)), constant)
    require(is_read_only(constant), "the forward writes their tensors")
    value: torch.Tensor = attribute_of(constant)
    require(_fits(layer.weight, value), "dtype or device differ")
    narrowed = value.dim() > 0 and torch.is_autocast_enabled(value.device.type)
    require(not narrowed, "autocast gives the layer another dtype than the constant")
    axis = 1 - layer.weight.ndim
    size = value.shape[axis] if value.dim() >= -axis else 1
    require(value.numel() == size in (1, channels), "the constant is not one number a channel")
    operand: Any = _operand(node)
    widens = value.dim() > -axis and value.dim() > rank(operand)
    require(not widens, "the constant has more dimensions than what it is combined with")
    if value.dim() and isinstance(layer, _ConvTransposeNd):
        dtype(operand)  # which without elements may be any: the constant then promotes it
    return wide(value).reshape(-1)


def _fits(weight: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a value of the weight's dtype and device keeps them beside another."""
    floating = weight.is_floating_point() and other.is_floating_point()
    same = torch.result_type(weight, other) == weight.dtype
    return floating and same and weight.device == other.device


def _folded_pair(layer: fx.Node, affine: fx.Node, transform: Affine) -> str:
    """Return the path of a layer that also does what `affine` computes; a pair is folded once."""
    first, operand = min(layer, affine), _operand(affine)
    paths: dict[Any, str] = owner(layer).meta.setdefault("folded_pairs", {})
    constants = ("" if n is operand else str(getattr(n, "target", n)) for n in affine.args)
    key = (first is layer, layer.target, affine.target, *constants)
    if key not in paths:
        folded = absorbed(module_of(layer), transform, over_outputs=first is layer)
        paths[key] = adopt(layer.graph, f"{layer.target}_folded", folded)
    return paths[key]
