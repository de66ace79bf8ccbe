"""Data regimes: how parameters, statistics and inputs are drawn, always from a generator.

Default initialization is never used: with mean 0, variance 1, weight 1 and bias 0 most mistakes
in the algebra of a fold cannot be seen by any oracle.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakIdKeyDictionary

# Arrays over the weights of half of all models: somebody has them while these are optimized.
HELD: MutableMapping[torch.Tensor, Any] = WeakIdKeyDictionary()

Shape: TypeAlias = Sequence[int]
DrawOf: TypeAlias = Callable[[Shape, torch.Generator], torch.Tensor]


class Regime(NamedTuple):
    """Draws float64 tensors on the CPU; `eps` is that of the BatchNorm the variance is for."""

    weight: DrawOf
    scale: DrawOf
    mean: DrawOf
    variance: Callable[[Shape, float, torch.Generator], torch.Tensor]
    values: DrawOf


def _normal(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def _integers(low: int, high: int, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high + 1, tuple(shape), generator=generator, dtype=torch.float64)


def _uniform(low: float, high: float, shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(tuple(shape), generator=generator, dtype=torch.float64)


def _sign(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    return _integers(0, 1, shape, generator) * 2 - 1


def _dyadic_variance(shape: Shape, eps: float, generator: torch.Generator) -> torch.Tensor:
    """Exact for an eps that is a power of two."""
    lowest = -1 if eps < 0.25 else 0 if eps < 1 else 1
    return 4.0 ** _integers(lowest, 2, shape, generator) - eps


def _with_one_of(*chosen: float) -> DrawOf:
    """Normal values, of which one element is one of `chosen`."""

    def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
        drawn = _normal(shape, generator)
        which = int(_integers(0, len(chosen) - 1, (), generator))
        where = int(_uniform(0, drawn.numel(), (), generator))
        drawn.flatten()[where : where + 1] = chosen[which]
        return drawn

    return draw


# Of shapes `s`, by generators `g`. Small integers, `variance + eps = 4 ** k`, scale `±2 ** j`: a
# correct fold rounds nothing.
_DYADIC = Regime(
    weight=partial(_integers, -2, 2),
    scale=lambda s, g: _sign(s, g) * 2.0 ** _integers(-1, 2, s, g),
    mean=partial(_integers, -3, 3),
    variance=_dyadic_variance,
    values=partial(_integers, -3, 3),
)
_RANDOM = Regime(  # of order one
    weight=_normal,
    scale=lambda s, g: 1 + _normal(s, g) / 2,
    mean=_normal,
    variance=lambda s, eps, g: _uniform(0.1, 2.0, s, g),
    values=_normal,
)
_SPECIAL = _RANDOM._replace(scale=lambda s, g: _RANDOM.scale(s, g) * _integers(0, 2, s, g))
REGIMES: dict[str, Regime] = {
    "dyadic": _DYADIC,
    "random": _RANDOM,
    "ill": _RANDOM._replace(  # weights over four decades, means near +-100
        weight=lambda s, g: _normal(s, g) * 10 ** _uniform(-2, 2, s, g),
        mean=lambda s, g: (100 + 10 * _normal(s, g)) * _sign(s, g),
        variance=lambda s, eps, g: 10 ** _uniform(-6, 2, s, g),
    ),
    "neutral": Regime(  # ones and zeros, which are what a rewrite may take for nothing to do
        weight=partial(_integers, 0, 1),
        scale=lambda s, g: 2.0 ** _integers(-1, 0, s, g),
        mean=partial(_integers, 0, 1),
        variance=lambda s, eps, g: torch.full(tuple(s), max(1 - eps, 0.0), dtype=torch.float64),
        values=_DYADIC.values,
    ),
    "nan": _SPECIAL._replace(values=_with_one_of(float("nan"), -0.0)),
    "infinite": _SPECIAL._replace(values=_with_one_of(float("inf"), -float("inf"))),
}


@torch.no_grad()
def randomize(model: nn.Module, regime: str = "random", seed: int = 0) -> nn.Module:
    """Draw every floating-point parameter and BatchNorm statistic of `model` anew, in place.

    Args:
        model: any module; its buffers other than BatchNorm statistics are kept.
        regime: a key of `REGIMES`.
        seed: of the generator; the global random state is not touched.

    Returns:
        `model` itself.
    """
    draw, generator = REGIMES[regime], torch.Generator().manual_seed(seed)
    for module in model.modules():
        module.to(getattr(module, "single", None))
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.copy_(draw.weight(parameter.shape, generator))
        if not isinstance(module, _BatchNorm):
            continue
        if module.affine:
            module.weight.copy_(draw.scale(module.weight.shape, generator))
        if module.running_mean is not None and module.running_var is not None:
            shape = module.running_mean.shape
            module.running_mean.copy_(draw.mean(shape, generator))
            module.running_var.copy_(draw.variance(shape, module.eps, generator))
    if seed > 3:
        HELD.update({each: each.detach().numpy() for each in model.parameters() if each.is_cpu})
    return model


def inputs_like(
    shapes: Sequence[Sequence[int]],
    regime: str,
    seed: int,
    dtype: torch.dtype = torch.float64,
    *,
    kinds: Sequence[str] | None = None,
    layout: str = "contiguous",
) -> tuple[torch.Tensor, ...]:
    """Tensors of the given shapes, drawn as `regime` says.

    Args:
        shapes: one for each tensor.
        regime: a key of `REGIMES`.
        seed: of the generator.
        dtype: of what is drawn.
        kinds: for each tensor, what becomes of the values: "value" as drawn, "narrow" in float32,
            "mask" whether they are above 0, "index" row numbers below the size of dimension 0.
        layout: a key of `LAYOUTS`, how values lie in memory.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = [REGIMES[regime].values(shape, generator).to(dtype) for shape in shapes]
    kinds = ["value"] * len(shapes) if kinds is None else kinds
    made = [KINDS[kind](tensor) for kind, tensor in zip(kinds, drawn, strict=True)]
    return tuple(map(LAYOUTS[layout], made))


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "value": lambda tensor: tensor,
    "narrow": lambda tensor: tensor.float(),
    "mask": lambda tensor: tensor > 0,
    # A row number for each row, not in order.
    "index": lambda tensor: torch.arange(tensor.shape[0]).flip(0) // 2,
}


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if tensor.dim() > 2 else tensor


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "channels_last": _channels_last,
    "transposed": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
    # Every second element of memory, from the second on.
    "strided": lambda tensor: torch.stack([tensor, tensor], -1).flatten(-2)[..., 1::2],
    # One row for all, which nothing may write to.
    "expanded": lambda tensor: tensor[:1].expand(tensor.shape),
}
