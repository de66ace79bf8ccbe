"""Tokens that normalize: BatchNorm in every variant, and the others, which nothing may fold."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from optimizer.testing._machine import KEYWORD, MODULE, Emit, Machine, Shape, ranked

# 0.5 and the like keep var + eps = 4 ** k exact; the last one is near torch's default.
HALF, EIGHTH, SMALL, TINY = 0.5, 0.125, 2.0**-10, 2.0**-17


def batchnorm(
    eps: float = HALF,
    *,
    affine: bool = True,
    tracked: bool = True,
    training: bool = False,
    momentum: bool = True,
    functional: bool = False,
    spelling: str = MODULE,
) -> Emit:
    """A BatchNorm over dimension 1, of the dimension that the top's rank asks for."""

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        channels, rank = shape[1], len(shape)

        def result(shape: Shape) -> Shape | None:
            fitting = len(shape) > 1 and max(1, len(shape) - 2) == max(1, rank - 2)
            if not fitting or shape[1] != channels:
                return None
            # torch refuses batch statistics of a single value per channel.
            from_batch = training or not tracked
            return None if from_batch and prod(shape) <= channels else shape

        if not channels or result(shape) is None:
            return
        given = {"affine=False": not affine, "track_running_stats=False": not tracked}
        given["momentum=None"] = not momentum
        extra = "".join(f", {argument}" for argument, is_given in given.items() if is_given)
        constructor = f"nn.BatchNorm{max(1, rank - 2)}d({channels}, eps={eps!r}{extra})"
        weight = ("batchnorm", (channels,)) if affine else None
        layer = machine.add("bn", constructor, result, weight)
        if training:
            machine.finishing.append(f"self.{layer.name}.train()")
        arguments = ("running_mean", "running_var", "weight", "bias")
        listed = ", ".join(f"self.{{m}}.{a}" for a in arguments)
        call = f"F.batch_norm({{v}}, {listed}, training={training}, eps={eps!r})"
        machine.call(layer, call if functional else spelling)

    return ranked(2, emit)


def norm(constructor: Callable[[Shape], str], first: int = 0) -> Emit:
    """A norm that depends on the input alone; `constructor` is told the shape of the top.

    Nothing where the dimensions from `first` on hold less than two values, which torch refuses.
    """

    def emit(machine: Machine) -> None:
        shape = machine.top.shape

        def result(other: Shape) -> Shape | None:
            fitting = (len(other), other[1:]) == (len(shape), shape[1:]) and prod(other) > 0
            return other if fitting else None

        if prod(shape[first:]) > 1 and result(shape):
            machine.call(machine.add("norm", constructor(shape), result))

    return ranked(first + 1, emit)


NORMS: dict[str, Emit] = {
    "bn": batchnorm(),
    "bn_eighth": batchnorm(EIGHTH),
    "bn_small": batchnorm(SMALL),
    "bn_tiny": batchnorm(TINY),
    "bn_one": batchnorm(1.0),
    "bn_plain": batchnorm(EIGHTH, affine=False),
    "bn_nostats": batchnorm(tracked=False),
    "bn_nostats_plain": batchnorm(tracked=False, affine=False),
    "bn_train": batchnorm(training=True),
    "bn_train_mean": batchnorm(training=True, momentum=False),
    "bn_mean": batchnorm(EIGHTH, momentum=False),
    "bn_kw": batchnorm(EIGHTH, spelling=KEYWORD),
    "bn_F": batchnorm(EIGHTH, functional=True),
    "bn_F_plain": batchnorm(affine=False, functional=True),
    "bn_F_train": batchnorm(training=True, functional=True),
    "layernorm": norm(lambda shape: f"nn.LayerNorm({shape[-1]}, eps=0.5)"),
    "layernorm_plain": norm(lambda s: f"nn.LayerNorm({s[-1]}, elementwise_affine=False)"),
    "rmsnorm": norm(lambda shape: f"nn.RMSNorm({shape[-1]}, eps=0.5)"),
    "groupnorm": norm(lambda shape: f"nn.GroupNorm(1, {shape[1]}, eps=0.5)", 1),
    "instancenorm": norm(
        lambda s: f"nn.InstanceNorm{len(s) - 2}d({s[1]}, affine=True, eps=0.5)", 2
    ),
}
