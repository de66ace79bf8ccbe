"""The random numbers that operators of torch draw: kept, and given again in another precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from optimizer.core.inputs import map_tensors, tensors_in
from optimizer.testing._observe import Watch

Drawn: TypeAlias = list[Any]  # what each random operator of a call gave, in order


def recorded(drawn: Drawn) -> Watch:
    """Keep what the random operators of a call give, in `drawn`."""

    def see(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        if _draws(func, args, kwargs):
            drawn.append(map_tensors(torch.clone, result))

    return Watch(see)


def again(drawn: Drawn) -> Watch:
    """Give what was `drawn` before, in whatever dtype is asked for now."""
    given = iter(drawn)

    def see(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        if _draws(func, args, kwargs):
            for tensor, numbers in zip(tensors_in(result), tensors_in(next(given)), strict=True):
                tensor.copy_(numbers)

    return Watch(see)


def _draws(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator is random: attention counts as such, also without a dropout."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | {**kwargs}
    idle = "dropout_p" in names and not given.get("dropout_p")
    return torch.Tag.nondeterministic_seeded in func.tags and not idle
