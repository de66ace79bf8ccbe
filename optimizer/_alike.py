"""What a call was seen to do, for the calls that are alike.

Two calls of a function of torch, or of two of its layers with the same settings, on tensors of
the same geometry yield the same without data. Networks repeat their blocks, and the meta kernels
of some operators are slow Python: 5 milliseconds for one attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from optimizer._copy import is_ordinary, on_storage
from optimizer._effects import Effect
from optimizer._known_results import has_known_result
from optimizer._trees import hides_tensors, map_tensors, storages_in, tensors_in

ToMeta = Callable[[Any], Any]


def is_slow(called: Any) -> bool:
    """Whether to run it takes longer than to tell whether that was done before."""
    if isinstance(called, nn.Module):
        return not has_known_result(called)
    return inspect.isfunction(called) or called in _IN_PYTHON


class Given:
    """What a call is given: a key that is the same for calls alike, and where its tensors lie.

    Storages and tensors count by the order in which they are met, so that what is shared is seen.

    Raises:
        TypeError: the outcome may depend on more.
        RecursionError: what is given holds itself.
    """

    def __init__(self, value: Any, to_meta: ToMeta) -> None:
        self.to_meta = to_meta
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.places: dict[int, int] = {}
        self.tensors: dict[int, int] = {}
        self.key = self._described(value)

    def _described(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return self._geometry(value)
        if isinstance(value, nn.Module) and _is_known(type(value)):
            return type(value), self._described(vars(value))
        if isinstance(value, dict):
            return dict, *((name, self._described(each)) for name, each in value.items())
        if isinstance(value, list | tuple):
            return type(value), *map(self._described, value)
        if isinstance(value, slice):
            return slice, *map(self._described, (value.start, value.stop, value.step))
        if isinstance(value, set):
            return set, frozenset(value)
        if not _is_known(value):
            raise TypeError("it is the user's, and may do anything")
        hash(value)
        return type(value), value

    def _geometry(self, tensor: torch.Tensor) -> Hashable:
        if not is_ordinary(tensor):
            raise TypeError("it is more than its storage and shape")
        kind, which = type(tensor), self.tensors.setdefault(id(tensor), len(self.tensors))
        meta = tensor if tensor.is_meta else self.to_meta(tensor)
        storage = meta.untyped_storage()
        place = self.places.setdefault(storage._cdata, len(self.places))
        self.storages[place] = storage
        lies = (place, tensor.storage_offset(), tensor.shape, tensor.stride(), storage.nbytes())
        return kind, which, tensor.dtype, tensor.requires_grad, *lies


def _is_known(value: Any) -> bool:
    """Whether it is of torch or Python: a class, a function, or an instance of a class."""
    home = str(getattr(value, "__module__", None) or type(value).__module__)
    return home.partition(".")[0] in ("builtins", "optimizer", "torch", "torchvision")


class Outcome:
    """What a call yielded and did, in terms of what it was given.

    Raises:
        TypeError: it is about a tensor that it was not given, or one that nobody sees.
    """

    def __init__(
        self, given: Given, value: Any, effect: Effect, lasts: Callable[[int], bool]
    ) -> None:
        told = all(map(is_ordinary, tensors_in(value))) and not hides_tensors(value)
        others = (storages_in(value) | effect.writes) - given.places.keys()
        if not told or any(map(lasts, others)):
            raise TypeError("it is about more than it was given")
        self.value, self.effect, self.places = value, effect, given.places

    def again(self, given: Given) -> tuple[Any, Effect]:
        """The value and the effect of a call that is given the like."""
        own = dict[int, torch.UntypedStorage]()

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata in self.places:
                return on_storage(tensor, given.storages[self.places[storage._cdata]])
            if storage._cdata not in own:
                new = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
                own[storage._cdata] = new.untyped_storage()
            return on_storage(tensor, own[storage._cdata])

        written = (self.places[each] for each in self.effect.writes if each in self.places)
        writes = {given.storages[place]._cdata for place in written}
        return map_tensors(moved, self.value), self.effect._replace(writes=writes)


# Functions written in C++ with a meta kernel in Python.
_IN_PYTHON = frozenset((F.gelu, torch._C._nn.gelu_))  # type: ignore[attr-defined]
