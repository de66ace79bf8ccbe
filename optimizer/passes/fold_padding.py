"""conv(pad(x)) -> conv'(x), where the pad and the convolution both put zeros around x."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.node import has_plain_tensors, module_of
from optimizer.core.ops import CONVOLUTIONS
from optimizer.facts.facts import is_unchanged, tensor
from optimizer.rewrite.affine import as_parameter
from optimizer.rewrite.channels import require_only_reader
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import insert_module
from optimizer.rewrite.pattern import call

LAYERS = (
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d,
    nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
)  # fmt: skip


@rewrite(
    call(*CONVOLUTIONS, args=(call(F.pad, *LAYERS, name="pad"),), name="conv"),
    numerics="rounding",
    phase="simplify",
)
def fold_padding(pad: fx.Node, conv: fx.Node) -> fx.Node | None:
    """Let a convolution pad with the zeros that were put around its input before.

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

    padded = _padding(layer, sizes[::-2])
    return insert_module(conv, padded, (source,), f"{conv.target}_padded", like=conv)


def _zeros(pad: fx.Node) -> tuple[int, ...]:
    """How many zeros are put before and after each dimension, the last one first; or none."""
    layer = module_of(pad) if pad.op == "call_module" else None
    given = (None, layer.padding, "constant", layer.value) if layer else pad.args
    named = dict(zip(("input", "pad", "mode", "value"), given, strict=False)) | pad.kwargs
    sizes, mode, value = named["pad"], named.get("mode", "constant"), named.get("value") or 0
    blank = isinstance(sizes, list | tuple) and mode == "constant" and value == 0
    known = blank and all(type(each) is int and each >= 0 for each in sizes)
    return tuple(sizes) if known else ()


def _padding(layer: Any, zeros: tuple[int, ...]) -> nn.Module:
    """A convolution with the layer's weights that pads its last dimensions by some zeros more."""
    kernel = layer.kernel_size
    own = (0,) * len(kernel) if layer.padding == "valid" else layer.padding
    more = (0,) * (len(kernel) - len(zeros)) + zeros
    padding = tuple(map(sum, zip(own, more, strict=True)))
    settings = (layer.stride, padding, layer.dilation, layer.groups)
    wide = type(layer)(layer.in_channels, layer.out_channels, kernel, *settings, device="meta")
    wide.weight, wide.bias = as_parameter(layer.weight), as_parameter(layer.bias)
    return wide.train(layer.training)  # type: ignore[no-any-return]


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    model = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(width, 4, 3))
    return model.eval(), (torch.randn(1, width, 6, 6),)
