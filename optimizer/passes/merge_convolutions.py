"""conv(x) + conv'(x) -> conv''(x), and conv(x) + BatchNorm(x) -> conv''(x)."""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from optimizer.core.node import callee, module_of
from optimizer.core.ops import iadd
from optimizer.facts.facts import is_unchanged, is_written
from optimizer.rewrite.affine import Layer, merged, pointwise, taps_within
from optimizer.rewrite.channels import (
    affine_over,
    call_folded,
    require_moderate_shift,
    require_only_reader,
)
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.edit import supersede
from optimizer.rewrite.pattern import call

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@rewrite(
    call(operator.add, iadd, "add_", name="total"), numerics="rounding", phase="fold", opt_in=True
)
def merge_convolutions(total: fx.Node) -> fx.Node | None:
    """Merge convolutions that read one value and are added, with a BatchNorm of it (opt-in).

    A convolution is linear in its kernel, so that W * x + V * x = (W + V) * x where V is laid
    into the larger kernel W at the taps that read the same elements of x: strides and groups are
    equal, both pad with zeros, and V is centred on W, so that both have as many outputs at every
    size. A BatchNorm, s * x + t for each channel, is such a V with one tap and the diagonal s; no
    product of x is taken for one, since it is laid out as x is. Nobody else may read the terms.
    The kernels are added in float64 and rounded once, as RepVGG does for inference. An infinity
    in x may become one of the sum, where the terms are infinities of opposite signs and eager has
    NaN: so this runs only where x is promised to be finite.
    """
    if len(total.args) != 2 or total.kwargs or total.args[0] is total.args[1]:
        return None
    terms = [each for each in total.args if isinstance(each, fx.Node)]
    convolutions = [each for each in terms if callee(each) in CONVOLUTIONS]
    if len(terms) < 2 or not convolutions:
        return None
    conv = max(convolutions, key=lambda each: module_of(each).weight.numel())
    term = terms[terms[0] is conv]
    source = _source(term)
    if source is None or source is not _source(conv):
        return None
    for each in terms:
        require_only_reader(each, total)
    first, last = sorted(terms)
    require(is_unchanged(source, first, last), "what they read is written between them")
    require(not is_written(conv), "the forward writes their tensors")

    folded = call_folded(first, (conv, term), (source,), merged, _as_layer(term, module_of(conv)))
    supersede(conv, folded)
    supersede(term, folded)
    return folded


def _source(term: fx.Node) -> fx.Node | None:
    """What a convolution, or a BatchNorm, maps; None where it is neither."""
    return term.all_input_nodes[0] if callee(term) in CONVOLUTIONS + BATCHNORMS else None


def _as_layer(term: fx.Node, conv: Layer) -> Layer:
    """What a term computes, as a layer whose taps lie within those of `conv`."""
    if callee(term) in CONVOLUTIONS:
        require(not is_written(term), "the forward writes their tensors")
        layer = module_of(term)
        same = (layer.weight.dtype, layer.weight.device) == (conv.weight.dtype, conv.weight.device)
        require(same, "dtype or device differ")
    else:
        require(conv.in_channels == conv.out_channels, "the convolution changes the channels")
        volume = isinstance(conv, nn.Conv3d)
        require(not volume, "it may lay its output out otherwise than a BatchNorm does")
        autocast = torch.is_autocast_enabled(conv.weight.device.type)
        require(not autocast, "autocast gives the terms two dtypes")
        affine = affine_over(term, conv, conv.in_channels)
        require_moderate_shift(affine)
        layer = pointwise(affine, conv)
    alike = all(getattr(layer, each) == getattr(conv, each) for each in ("stride", "groups"))
    zeros = all(each.padding_mode == "zeros" for each in (layer, conv))
    require(alike and zeros, "the convolutions differ in stride or groups, or pad otherwise")
    channels = layer.weight.shape[:2] == conv.weight.shape[:2]
    require(channels and taps_within(layer, conv) is not None, "no kernel is centred on the other")
    return layer


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _Branches(width).eval(), (torch.randn(1, width, 8, 8),)


class _Branches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.large = nn.Conv2d(width, width, 3, padding=1)
        self.small = nn.Conv2d(width, width, 1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.large(x) + self.small(x) + self.norm(x)
        return result
