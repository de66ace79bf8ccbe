"""The random numbers that operators of torch draw: kept, and given again in another precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.core.inputs import map_tensors, tensors_in

Drawn: TypeAlias = list[Any]  # what each random operator of a call gave, in order


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep what the random operators of a call give, in `drawn`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: Drawn = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch imports it first, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        result = self.draw(func, args, kwargs)
        self.drawn.append(map_tensors(torch.clone, result))
        return result

    def draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a random operator gives."""
        return func(*args, **kwargs)


class Again(Recorded):  # type: ignore[no-untyped-call]
    """Give what was `drawn` before, in whatever dtype is asked for now."""

    def __init__(self, drawn: Iterable[Any]) -> None:
        super().__init__()
        self._given = iter(drawn)

    def draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result, given = func(*args, **kwargs), tensors_in(next(self._given))
        for tensor, numbers in zip(tensors_in(result), given, strict=True):
            tensor.copy_(numbers)
        return result


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator is random: attention counts as such, also without a dropout."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    idle = "dropout_p" in names and not given.get("dropout_p")
    return torch.Tag.nondeterministic_seeded in func.tags and not idle
