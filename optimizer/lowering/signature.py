"""Which plan a call may run: that of its sizes, strides, dtypes, devices and settings, if any."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from optimizer.core.context import is_watched
from optimizer.core.guards import key_of
from optimizer.lowering.candidates import policy_of

_NUMBERS = (bool, int, float, str, type(None))


class Key(NamedTuple):
    """What a plan is made for.

    Attributes:
        what: the structure of the arguments, and the geometry of each tensor.
        devices: where the tensors are.
        settings: what besides kernels are chosen by.
    """

    what: Hashable
    devices: tuple[torch.device, ...]
    settings: Hashable

    def was_moved(self, others: Iterable[Key]) -> bool:
        """Whether there is such a call among the others: made elsewhere, or on other threads."""
        return any(other.what == self.what for other in others)


class Signature(NamedTuple):
    """What a plan is made for, and the tensors of a call that has it."""

    key: Key
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature | None:
        """The signature of a call; None for a call that must run as it is."""
        if is_watched():
            return None
        leaves, spec = _flat(args, kwargs)
        tensors = [leaf for leaf in leaves if type(leaf) is torch.Tensor]
        if not all(type(leaf) is torch.Tensor or type(leaf) in _NUMBERS for leaf in leaves):
            return None
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return None
        settings = policy_of(tensors).settings()
        if settings is False:
            return None
        what = (spec, *map(_geometry, leaves))
        return cls(Key(what, tuple(map(_device, tensors)), settings), tensors)


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Hashable]:
    if not kwargs and all(type(arg) is torch.Tensor for arg in args):
        return args, None  # pytree takes ten times as long
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return leaves, str(spec)


def _geometry(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.layout
    key: Hashable = key_of(leaf)
    return key


def _device(tensor: torch.Tensor) -> torch.device:
    return tensor.device
