"""Whether another integer or flag is one that rounding may choose as well.

An `argmax` over a million values, a mask `x > 0` or an image in bytes is another one at a place or
two when its input moves by rounding. What an index points at must then be as large, and what
follows its input upwards or downwards must lie between what the input gives when it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.core.inputs import tensors_in

aten = torch.ops.aten
_STEPS = frozenset((
    aten.gt, aten.ge, aten.lt, aten.le, aten.round, aten.floor, aten.ceil, aten.trunc, aten.sign,
    aten.bucketize, aten.quantize_per_tensor,
))  # fmt: skip
_SLOPES = frozenset((aten.clamp, aten.clamp_min, aten.clamp_max, aten._to_copy))


@dataclass(frozen=True)
class _Followed:
    """What grows, or falls, with `source`, and whether it does so in steps."""

    source: torch.Tensor
    function: Callable[[torch.Tensor], Any]
    in_steps: bool

    def allows(self, other: torch.Tensor, room: float) -> bool:
        """Return whether `other` is what a source gives that lies within `room`."""
        ends = [as_numbers(self.function(self.source + move)) for move in (-room, room)]
        within = (torch.minimum(*ends) <= other) & (other <= torch.maximum(*ends))
        return bool(within.all())


@dataclass(frozen=True)
class _Pointed:
    """The places of values in `source`, along a dimension or in the whole."""

    source: torch.Tensor
    dim: int | None
    index: torch.Tensor

    def allows(self, other: torch.Tensor, room: float) -> bool:
        """Return whether `other` points at values that are as large within `room`."""
        size = self.source.numel() if self.dim is None else self.source.shape[self.dim]
        if not bool(((other >= 0) & (other < size)).all()):
            return False
        return bool(((self._values(other.long()) - self._values(self.index)).abs() <= room).all())

    def _values(self, index: torch.Tensor) -> torch.Tensor:
        if self.dim is None:
            return self.source.flatten()[index]
        aligned = index if index.dim() == self.source.dim() else index.unsqueeze(self.dim)
        return self.source.gather(self.dim, aligned)


class Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep what the calls in a block choose.

    Args:
        bounds: how far rounding moves a value of each dtype, relative to the largest.
    """

    def __init__(self, bounds: Mapping[torch.dtype, float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bounds = bounds
        # By the identity of the result, which is kept as long as its identity is.
        self._followed: dict[int, tuple[torch.Tensor, _Followed]] = {}
        self._pointed: list[tuple[torch.Tensor, _Pointed]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch imports it first, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], torch.Tensor):
            if func.overloadpacket in _STEPS | _SLOPES:
                self._follow(func, args, kwargs or {}, result)
            elif args[0].is_floating_point():
                self._point(func, args, kwargs or {}, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: torch.Tensor) -> None:
        start = _Followed(args[0].clone(), lambda value: value, in_steps=False)
        _, known = self._followed.get(id(args[0]), (None, start))
        if known.source.is_floating_point():
            steps = known.in_steps or func.overloadpacket in _STEPS
            choice = _Followed(
                known.source,
                lambda value: func(known.function(value), *args[1:], **kwargs),
                in_steps=steps or not result.is_floating_point(),
            )
            self._followed[id(result)] = result, choice

    def _point(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        arguments = func._schema.arguments
        given = {each.name: each.default_value for each in arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        for index in tensors_in(result):
            if index.dtype is torch.int64 and "dim" in given:
                self._pointed.append((index, _Pointed(args[0].clone(), given["dim"], index)))

    def allow(self, chosen: Any, other: Any) -> bool:
        """Return whether `other` may stand for an integer, a flag or a tensor that was chosen."""
        old, new = as_numbers(chosen).flatten(), as_numbers(other)
        made: list[tuple[torch.Tensor, _Followed | _Pointed]] = [*self._pointed]
        made += [each for each in self._followed.values() if each[1].in_steps]
        return any(
            torch.equal(as_numbers(result).flatten(), old)
            and choice.allows(new.reshape(result.shape), self._room(choice.source))
            for result, choice in made
        )

    def _room(self, source: torch.Tensor) -> float:
        finite = source[source.isfinite()].abs()
        largest = finite.max().item() if finite.numel() else 0.0
        return self._bounds.get(source.dtype, 0.0) * largest


def as_numbers(value: Any) -> torch.Tensor:
    """Return a number, a flag or a tensor as numbers that can be compared with any other."""
    tensor = torch.as_tensor(value)
    return tensor.dequantize() if tensor.is_quantized else tensor.to(torch.float64)
