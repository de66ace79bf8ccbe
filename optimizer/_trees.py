"""The tensors in a pytree. Most trees are one tensor, for which pytree takes ten times as long.

A dataclass, which pytree takes for a leaf, is here the tree of its fields.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


def opened(value: Any) -> Any:
    """The same tree with the name and the fields of a dataclass in the place of each."""
    return pytree.tree_map_only(_is_record, _opened_record, value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a pytree, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(opened(value)) if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same tree with every tensor in it replaced by `function(tensor)`."""
    if isinstance(value, torch.Tensor):
        return function(value)
    mapped = pytree.tree_map_only(torch.Tensor, function, value)
    return pytree.tree_map_only(_is_record, lambda each: _mapped_record(function, each), mapped)


def copies_of(value: Any) -> Any:
    """The same tree with copies of its tensors, and of the objects that may hide some."""
    return pytree.tree_map_only(hides_tensors, _copy_of, map_tensors(torch.clone, value))


def storages_in(value: Any) -> set[int]:
    """The identities of all storages that the tensors in a pytree are views of."""
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(value)}


def hides_tensors(value: Any) -> bool:
    """Whether a pytree may hold tensors that are not seen, inside an object of a user's class."""
    leaves = [] if isinstance(value, torch.Tensor) else pytree.tree_leaves(opened(value))
    return any(type(leaf).__module__.split(".")[0] not in ("builtins", "torch") for leaf in leaves)


def _copy_of(leaf: Any) -> Any:
    try:
        return leaf if _is_record(leaf) else copy.deepcopy(leaf)
    except Exception:  # whatever the class of a user's raises
        return leaf


def _is_record(leaf: Any) -> bool:
    return is_dataclass(leaf) and not isinstance(leaf, type)


def _opened_record(record: Any) -> dict[str, Any]:
    held = {field.name: getattr(record, field.name) for field in fields(record)}
    return {type(record).__name__: opened(held)}


def _mapped_record(function: Callable[[torch.Tensor], torch.Tensor], record: Any) -> Any:
    mapped = copy.copy(record)
    for field in fields(record):
        value = map_tensors(function, getattr(record, field.name))
        object.__setattr__(mapped, field.name, value)  # it may be frozen
    return mapped
