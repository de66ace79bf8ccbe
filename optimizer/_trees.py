"""The tensors in a pytree. Most trees are one tensor, for which pytree takes ten times as long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a pytree, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same tree with every tensor in it replaced by `function(tensor)`."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return pytree.tree_map_only(torch.Tensor, function, value)


def storages_in(value: Any) -> set[int]:
    """The identities of all storages that the tensors in a pytree are views of."""
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(value)}
