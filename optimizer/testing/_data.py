"""Data regimes: how parameters, statistics and inputs are drawn, always from a generator.

Default initialization is never used: with mean 0, variance 1, weight 1 and bias 0 most mistakes
in the algebra of a fold cannot be seen by any oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Draw = torch.Tensor


class Regime(Protocol):
    """Draws float64 tensors on the CPU; `eps` is that of the BatchNorm the variance is for."""

    def weight(self, shape: Sequence[int], generator: torch.Generator) -> Draw: ...
    def scale(self, shape: Sequence[int], generator: torch.Generator) -> Draw: ...
    def mean(self, shape: Sequence[int], generator: torch.Generator) -> Draw: ...
    def variance(self, shape: Sequence[int], eps: float, generator: torch.Generator) -> Draw: ...
    def values(self, shape: Sequence[int], generator: torch.Generator) -> Draw: ...


class Dyadic:
    """Small integers, `variance + eps = 4 ** k`, scale `±2 ** j`: a correct fold rounds nothing.

    Exact for an eps that is a power of two.
    """

    def weight(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        return _integers(-2, 2, shape, generator)

    def scale(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        sign = _integers(0, 1, shape, generator) * 2 - 1
        return sign * 2.0 ** _integers(-1, 2, shape, generator)

    def mean(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        return _integers(-3, 3, shape, generator)

    def variance(self, shape: Sequence[int], eps: float, generator: torch.Generator) -> Draw:
        lowest = -1 if eps < 0.25 else 0 if eps < 1 else 1
        return 4.0 ** _integers(lowest, 2, shape, generator) - eps

    def values(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        return _integers(-3, 3, shape, generator)


class Random:
    """Normal values of order one; variances in [0.1, 2)."""

    def weight(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        return _normal(shape, generator)

    def scale(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        return 1 + _normal(shape, generator) / 2

    def mean(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        return _normal(shape, generator)

    def variance(self, shape: Sequence[int], eps: float, generator: torch.Generator) -> Draw:
        return _uniform(0.1, 2.0, shape, generator)

    def values(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        return _normal(shape, generator)


class Ill(Random):
    """Ill-conditioned: variances from 1e-6 to 1e2, means near 100, weights over four decades."""

    def weight(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        return _normal(shape, generator) * 10 ** _uniform(-2, 2, shape, generator)

    def mean(self, shape: Sequence[int], generator: torch.Generator) -> Draw:
        return 100 + 10 * _normal(shape, generator)

    def variance(self, shape: Sequence[int], eps: float, generator: torch.Generator) -> Draw:
        return 10 ** _uniform(-6, 2, shape, generator)


REGIMES: dict[str, Regime] = {"dyadic": Dyadic(), "random": Random(), "ill": Ill()}


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
    return model


def inputs_like(
    shapes: Sequence[Sequence[int]], regime: str, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    """Tensors of the given shapes, drawn as `regime` says."""
    generator = torch.Generator().manual_seed(seed + 1)
    return tuple(REGIMES[regime].values(shape, generator).to(dtype) for shape in shapes)


def _integers(low: int, high: int, shape: Sequence[int], generator: torch.Generator) -> Draw:
    return torch.randint(low, high + 1, tuple(shape), generator=generator, dtype=torch.float64)


def _normal(shape: Sequence[int], generator: torch.Generator) -> Draw:
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def _uniform(low: float, high: float, shape: Sequence[int], generator: torch.Generator) -> Draw:
    return low + (high - low) * torch.rand(tuple(shape), generator=generator, dtype=torch.float64)
