"""Padding before a convolution, and pools after one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.utils import _reverse_repeat_tuple, _single

from optimizer.core.errors import require
from optimizer.core.node import arg, callee, has_plain_tensors, module_of, named_arguments
from optimizer.core.ops import CONVOLUTIONS
from optimizer.facts.facts import is_unchanged, tensor, weights_exposed
from optimizer.rewrite.affine import layer_like, reads_odd_strides, require_only_reader
from optimizer.rewrite.contract import call, rewrite
from optimizer.rewrite.edit import insert_copy, insert_module

LAYERS = (
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d,
    nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
)  # fmt: skip
POOLS: dict[Any, int] = {
    nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3,
    F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3,
}  # fmt: skip
ADAPTIVE: dict[Any, int] = {
    nn.AdaptiveAvgPool1d: 1, nn.AdaptiveAvgPool2d: 2, nn.AdaptiveAvgPool3d: 3,
    F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3,
}  # fmt: skip
_ADAPTIVE_DEFAULTS = {"input": None, "output_size": None}
_DEFAULTS = {
    "input": None, "kernel_size": None, "stride": None, "padding": 0, "ceil_mode": False,
    "count_include_pad": True, "divisor_override": None,
}  # fmt: skip
# Products of a convolution in the time that averaging one value takes: 20 on images in
# channels_last, and 70 on others (an AMD EPYC).
_AVERAGE = 100


@rewrite(
    call(*CONVOLUTIONS, args=(call(F.pad, *LAYERS, name="pad"),), name="conv"),
    numerics="rounding",
    phase="simplify",
)
def fold_padding(pad: fx.Node, conv: fx.Node) -> fx.Node | None:
    """Let a convolution pad with the zeros that were put around its input before.

    conv(pad(x)) -> conv'(x), where the pad and the convolution both put zeros around x.

    Both lay zeros around the last dimensions of x, so that what the convolution lays around the
    padded x adds to them: as many on both sides of a dimension, which is all that it can do. The
    new layer shares its weights and does not copy x. Nothing else may read the copy, and nothing
    may write x later, which the convolution keeps for gradients.
    """
    layer, source = module_of(conv), pad.all_input_nodes[0]
    sizes = _zeros(pad)
    require(bool(sizes), "it pads with something else than a constant number of zeros")
    require(sizes[::2] == sizes[1::2], "it pads the two sides of a dimension differently")
    require(len(sizes) <= 2 * len(layer.kernel_size), "it pads the channels or the batch")
    zeros = layer.padding_mode == "zeros" and layer.padding != "same"
    require(zeros, "the convolution pads in another way")
    require(not has_plain_tensors(layer), "the layer has tensors that no cast of it reaches")
    require(0 not in tensor(source).shape, "it is empty, which a convolution may not read")
    require_only_reader(pad, conv)
    require(is_unchanged(source, pad), "what is padded is written later")
    before = (0,) * len(layer.kernel_size) if layer.padding == "valid" else layer.padding
    more = (0,) * (len(before) - len(sizes) // 2) + sizes[::-2]
    require(len(before) == len(more), "one number is the padding of all dimensions")
    padding = tuple(map(sum, zip(before, more, strict=True)))
    twice = _reverse_repeat_tuple(padding, 2)  # type: ignore[no-untyped-call]
    padded = layer_like(layer, padding=padding, _reversed_padding_repeated_twice=twice)
    return insert_module(conv, padded, (source,), f"{conv.target}_padded", like=conv)


def _zeros(pad: fx.Node) -> tuple[int, ...]:
    """Return how many zeros pad each dimension before and after, the last one first; or none."""
    layer = vars(module_of(pad)) if pad.op == "call_module" else {}
    settings = {"input": None, "pad": layer.get("padding"), "mode": "constant"}
    named = named_arguments(pad, {**settings, "value": layer.get("value")})
    sizes, blank = named["pad"], named["mode"] == "constant" and not named["value"]
    constant = isinstance(sizes, list | tuple) and all(type(n) is int and n >= 0 for n in sizes)
    return tuple(sizes) if blank and constant else ()


@rewrite(
    call(*POOLS, *ADAPTIVE, args=(call(*CONVOLUTIONS, name="conv"),), name="pool"),
    numerics="rounding",
    phase="fuse",
)
def sink_convolutions(conv: fx.Node, pool: fx.Node) -> fx.Node | None:
    """Move a pointwise convolution behind an average pool, which leaves it fewer places.

    avg_pool(conv(x)) -> conv(avg_pool(x)), where the convolution looks at one place at a time.

    The average of W x + b over some places is W times the average of x, plus b: so DenseNet's
    transitions multiply a quarter. A sum that is divided by another number than that of its
    places has another b. What scales or shifts the input of the convolution is folded before, and
    what does so behind the pool after. The pool alone may read the convolution. It then averages
    what that reads, which may be more channels: not where that costs more than it saves.
    """
    layer, source, settings = module_of(conv), arg(conv, 0), _settings(pool)
    pointwise = math.prod(layer.kernel_size) == math.prod(layer.stride) == 1
    may_grow = set(_single(settings.get("output_size", 1))) != {1}
    if not pointwise or may_grow:
        return None
    dimensions = (POOLS | ADAPTIVE)[callee(pool)]
    alike = len(layer.kernel_size) == dimensions
    require(alike, "it pools other dimensions than the convolution has")
    autocast = torch.is_autocast_enabled(layer.weight.device.type)
    require(not autocast, "autocast gives the pool another dtype than the convolution")
    require(not any(layer._reversed_padding_repeated_twice), "the convolution pads")
    zeros = any(_single(settings.get("padding", 0))) and settings["count_include_pad"]
    averages = not zeros and settings.get("divisor_override") is None
    require(averages or layer.bias is None, "the pool does not divide by the number of places")
    products = layer.in_channels * layer.out_channels // layer.groups  # of one place
    places, fewer = (math.prod(tensor(n).shape[-dimensions:]) for n in (conv, pool))
    odd = reads_odd_strides(conv) and (fewer == 1 or isinstance(layer, nn.Conv1d))
    require(not odd, "its output may be laid out otherwise")
    before = places * (products + _AVERAGE * layer.out_channels)
    after = fewer * products + places * _AVERAGE * layer.in_channels
    require(after < before, "the pool would cost more than it saves")
    require_only_reader(conv, pool)
    require(is_unchanged(source, conv, pool), "what is convolved is written before it is pooled")
    require(not weights_exposed(conv), "the forward writes their tensors")
    pooled = insert_copy(pool, pool, lambda each: source if each is conv else each)
    return insert_copy(pool, conv, lambda _: pooled)


def _settings(pool: fx.Node) -> dict[str, Any]:
    """Return the settings of a pool by name, be they arguments or those of a module."""
    attributes = vars(module_of(pool)) if pool.op == "call_module" else {}
    defaults = _ADAPTIVE_DEFAULTS if callee(pool) in ADAPTIVE else _DEFAULTS
    return named_arguments(pool, {n: attributes.get(n, d) for n, d in defaults.items()})
