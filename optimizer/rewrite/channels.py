"""Which nodes map each channel of a layer by y = scale * x + shift, and who may see it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx, nn

from optimizer.core.node import arg, attribute_of, is_attribute, module_of, owner
from optimizer.core.ops import CONVOLUTIONS
from optimizer.facts.facts import is_read_only, is_written, rank, tensor
from optimizer.rewrite.affine import Affine, Layer, device_of_float64
from optimizer.rewrite.contract import require
from optimizer.rewrite.edit import insert_call, insert_module

LAYERS = (
    nn.Linear, *CONVOLUTIONS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
AFFINES = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    operator.add, operator.sub, operator.mul, operator.truediv,
)  # fmt: skip

# The only rank that these accept; BatchNorm1d takes two and must be looked at.
_RANK: dict[type, int] = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_LARGEST_SHIFT = 4.0  # root mean square
Absorbed = TypeVar("Absorbed")


def operand(node: fx.Node) -> fx.Node | None:
    """The one value that an affine node maps, or None where it maps two or divides by it."""
    values = [each for each in node.args if isinstance(each, fx.Node) and not _is_constant(each)]
    constants = [each for each in node.args if _is_constant(each)]
    if node.op == "call_module":
        return values[0] if values else None
    inverse = node.target is operator.truediv and _is_constant(node.args[0])
    return values[0] if len(values) == len(constants) == 1 and not inverse else None


def _is_constant(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return is_attribute(value) and isinstance(attribute_of(value), torch.Tensor)
    return type(value) in (int, float)


def affine_over(node: fx.Node, layer: Layer, channels: int) -> Affine:
    """What an affine node with an `operand` does to the channels that a layer writes or reads.

    They are dimension `1 - layer.weight.ndim` of its value, in the layer's dtype.

    Raises:
        Refused: it does something else, or may do so in another call.
    """
    if node.op == "call_module":
        return _of_batchnorm(node, layer, channels)
    comes_first = _is_constant(node.args[0])
    constant: Any = node.args[0 if comes_first else 1]
    if isinstance(constant, fx.Node):
        value = _constant_of(constant, operand(node), layer, channels)
    else:
        require(layer.weight.is_floating_point(), "dtype or device differ")
        value = torch.full((), constant, dtype=torch.float64, device=device_of_float64(layer))
    name = node.target.__name__  # type: ignore[union-attr]
    return Affine.of_constant(name, value, comes_first=comes_first)


def _of_batchnorm(node: fx.Node, layer: Layer, channels: int) -> Affine:
    bn = module_of(node)
    require(not bn.training, "BatchNorm is in training mode and uses batch statistics")
    tracks = bn.running_mean is not None and bn.running_var is not None
    require(tracks, "BatchNorm tracks no running statistics and uses the batch's")
    known_rank = _RANK.get(type(bn)) or rank(node.all_input_nodes[0])
    require(known_rank == layer.weight.ndim, "BatchNorm normalizes another axis than the layer's")
    require(channels == bn.num_features, "the number of features differs")
    require(_fits(layer.weight, bn.running_var), "dtype or device differ")
    require(not is_written(node), "the forward writes their tensors")
    return Affine.of_batchnorm(bn)


def _constant_of(node: fx.Node, mapped: Any, layer: Layer, channels: int) -> torch.Tensor:
    """The tensor that a node reads, which must hold one number, or one for each channel."""
    require(is_read_only(node), "the forward writes their tensors")
    value: torch.Tensor = attribute_of(node)
    require(_fits(layer.weight, value), "dtype or device differ")
    narrowed = value.dim() > 0 and torch.is_autocast_enabled(value.device.type)
    require(not narrowed, "autocast gives the layer another dtype than the constant")
    axis = 1 - layer.weight.ndim
    size = value.shape[axis] if value.dim() >= -axis else 1
    require(value.numel() == size in (1, channels), "the constant is not one number a channel")
    widens = value.dim() > -axis and value.dim() > rank(mapped)
    require(not widens, "the constant has more dimensions than what it is combined with")
    return value


def _fits(weight: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a value of the weight's dtype and device keeps them, combined with another."""
    floating = weight.is_floating_point() and other.is_floating_point()
    same = torch.result_type(weight, other) == weight.dtype
    return floating and same and weight.device == other.device


def require_moderate_shift(affine: Affine) -> None:
    """Refuse a shift of which rms(shift) > 4: W x and the new bias would cancel after rounding."""
    moderate = bool(affine.shift.square().mean().sqrt() <= _LARGEST_SHIFT)
    require(moderate, "the shift is so large that it would cancel after the layer only")


def require_only_reader(node: fx.Node, reader: fx.Node) -> None:
    """Refuse if a node other than `reader` reads more of a value than its shape."""
    others = [user for user in node.users if user is not reader]
    of_shape = all(_reads_shape(user, node) for user in others)
    require(of_shape, "the layer's output is read elsewhere")


def _reads_shape(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node asks another one for its shape or dtype only."""
    if user.target is getattr:
        return user.args[1] in ("shape", "ndim", "dtype", "device")
    if user.op == "call_method" and user.target in ("reshape_as", "view_as", "expand_as"):
        return user.args[0] is not node
    return user.op == "call_method" and user.target in ("size", "dim", "numel")


def may_keep_odd_strides(layer: fx.Node) -> bool:
    """Whether the layer lays out an input of length 1 as if channels came last; others do not."""
    return isinstance(module_of(layer), nn.Conv1d | nn.ConvTranspose1d) and _reads_odd_strides(
        layer
    )


def keeps_single_elements(layer: fx.Node) -> bool:
    """Whether an image of single elements keeps strides that a BatchNorm, but no copy, changes."""
    known = layer.meta.get("fact")
    if known is None or known.error or known.value.ndim not in _CHANNELS_LAST:
        return False
    plain = torch.empty(known.value.shape, device="meta")
    single = plain.is_contiguous(memory_format=_CHANNELS_LAST[plain.ndim])
    return single and _reads_odd_strides(layer)


def _reads_odd_strides(layer: fx.Node) -> bool:
    given = tensor(arg(layer, 0))
    return given.stride() != torch.empty(given.shape, device="meta").stride()


def call_folded(
    before: fx.Node,
    pair: tuple[fx.Node, fx.Node],
    args: tuple[Any, ...],
    absorb: Callable[[Layer, Absorbed], Layer],
    transform: Absorbed,
) -> fx.Node:
    """Call `absorb(layer, transform)` before a node; a pair of calls is folded only once.

    The pair is the call of the layer and the call that computes `transform`.
    """
    layer, absorbed = pair
    done = owner(layer).meta.setdefault("folded_pairs", {})
    key = (absorb.__name__, layer.target, absorbed.target, *map(_identity, absorbed.args))
    if key not in done:
        folded = absorb(module_of(layer), transform)
        node = insert_module(before, folded, args, f"{layer.target}_folded", like=layer)
        done[key] = node.target
        return node
    return insert_call(before, done[key], args, like=layer)


def _identity(value: Any) -> Any:
    """What tells one constant from another; nothing for a value that is computed."""
    if isinstance(value, fx.Node):
        return value.target if _is_constant(value) else None
    return value
