"""What the ATen operators that run do besides yielding a value, read off their schemas."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer._trees import storages_in


class Effect(NamedTuple):
    """What a call did besides yielding a value."""

    writes: Set[int]
    random: bool = False
    counts: bool = False


NOTHING = Effect(frozenset())


class Effects(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collect the storages written, whether numbers were drawn, and whether data gave a size."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: set[int] = set()
        self.random = False
        self.counts = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch imports it first, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        self.counts |= torch.Tag.dynamic_output_shape in func.tags and not _is_by_number(func, args)
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            # native_batch_norm updates these in training mode, and its schema keeps quiet.
            silent = argument.name in ("running_mean", "running_var") and given.get("training")
            if written or silent:
                self.writes |= storages_in(given.get(argument.name))
        return func(*args, **kwargs)


def is_empty(value: Any) -> bool:
    """Whether it is a tensor without elements, of which torch draws nothing."""
    return isinstance(value, torch.Tensor) and value.numel() == 0


def may_draw(name: str, training: bool) -> bool:
    """Whether what has this name may draw numbers where there are elements."""
    return training or "dropout" in name or "attention" in name


def _is_by_number(func: Any, args: Any) -> bool:
    """Whether it is `v[i]` for numbers i, which yields as many elements as there are numbers."""
    masks = (torch.bool, torch.uint8)
    by_index = func is torch.ops.aten.index.Tensor
    return by_index and not any(each is not None and each.dtype in masks for each in args[1])
