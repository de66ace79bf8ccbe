"""Put back what a trial changes besides tensors, in modules and outside them."""

from __future__ import annotations

import os
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from optimizer.core.copy import is_ordinary
from optimizer.core.node import HOOKS
from optimizer.frontend.module import Prepared
from optimizer.frontend.traceable import MISSING, OF_EVERY_MODULE, Code, attributes, member


@contextmanager
def restored(code: Code, *tensors: torch.Tensor) -> Iterator[list[Any]]:
    """Put back what the block changes in tensors, and where a code may reach it; yield a list."""
    places = [(*place, member(*place)) for place in code.places]
    steps = list[Callable[[], object]]()
    for each in (*code.objects, *tensors):
        with suppress(Exception):  # what draws from the system has no state
            steps.append(_back(each))
    changed: list[Any] = []
    try:
        yield changed
    finally:
        for space, name, was in places:
            if member(space, name) is not was:
                changed.append(name)
                _put(space, name, was)
        for step in steps:
            with suppress(Exception):  # a frozen one refuses
                changed += [step] * bool(step())


def is_irreversible(code: Code) -> bool:
    """Return whether an object that a code may change cannot be put back."""
    try:
        return not all(map(_back, code.objects))
    except Exception:  # an iterator, or a user's class that does not say what it holds
        return True


class Outside(Code):
    """What modules hold, and what the user's own code reaches: not that of installed packages."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        modules = [m for m in self.modules if not isinstance(m, torch.jit.ScriptModule | Prepared)]
        self.modules = [each for each in modules if not _is_installed(type(each).forward)]
        for forward, table in ((type(each).forward, vars(each)) for each in modules):
            self.objects += table, *(each for each in table.values() if type(each) in _FILLS)
            values = [value for name, value in table.items() if name not in OF_EVERY_MODULE]
            hooks = [hook for name in HOOKS for hook in table[name].values()]
            list(self._visit([forward, *values, *hooks], ""))
        list(self.obstacles())
        self.is_large = any(len(o) > 30_000 for o in self.objects if isinstance(o, dict | list))
        self.objects += self._classes  # which a forward may give attributes
        self.objects += (each for each in self._seen.values() if isinstance(each, torch.Tensor))

    def _visit_function(self, function: FunctionType) -> Iterator[str]:
        return iter(()) if _is_installed(function) else super()._visit_function(function)


def _is_installed(function: Any) -> bool:
    return f"{os.sep}site-packages{os.sep}" in str(getattr(function, "__code__", ""))


def _put(space: Any, name: str, value: Any) -> None:
    if isinstance(space, dict):
        space.pop(name) if value is MISSING else space.update({name: value})
    elif value is MISSING:
        delattr(space, name)
    else:
        setattr(space, name, value)


def _back(value: Any) -> Callable[[], object]:
    """Return a function that puts back what an object holds and says whether that had changed."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, torch.Tensor):
        return partial(_rewrite, value, value.detach().clone())
    if kind := next((each for each in _FILLS if isinstance(value, each)), None):
        return partial(_refill, kind, value, _held(kind, value))
    if isinstance(value, (random.Random, numpy.random.RandomState) if numpy else random.Random):
        return partial(value.__setstate__, value.__getstate__())  # type: ignore[union-attr]
    if numpy and isinstance(value, numpy.ndarray):
        return partial(numpy.copyto, value, value.copy())
    if numpy and isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    values = attributes(value)
    if not (values or hasattr(value, "__dict__")):
        raise TypeError(f"what a {type(value).__name__} holds cannot be put back")
    return partial(_set_all, value, values)


def _rewrite(tensor: torch.Tensor, old: torch.Tensor) -> bool:
    changed = not (is_ordinary(tensor) and tensor.equal(old))
    if changed:
        tensor.detach().copy_(old)
    return changed


_FILLS: dict[Any, Any] = {each: each.__setitem__ for each in (OrderedDict, dict)}
_FILLS |= {set: set.add, list: list.append, deque: deque.append, bytearray: bytearray.append}


def _held(kind: Any, container: Any) -> list[list[Any]]:
    """Return what it holds, as its built-in class says: methods of a user's may do anything."""
    parts = (kind.keys, kind.values) if issubclass(kind, dict) else (kind.__iter__,)
    return [[*part(container)] for part in parts]


def _refill(kind: Any, container: Any, old: list[list[Any]]) -> bool:
    same = [[*map(id, a)] for a in _held(kind, container)] == [[*map(id, a)] for a in old]
    if same or container is sys.modules:
        return False  # torch does not take a second time what it imported
    kind.clear(container)
    for each in zip(*old, strict=True):
        _FILLS[kind](container, *each)
    return True


def _set_all(value: Any, old: dict[str, Any]) -> bool:
    new = attributes(value)
    changed = [name for name, each in old.items() if new.get(name, MISSING) is not each]
    for name in new.keys() - old.keys():
        delattr(value, name)
    for name in changed:
        setattr(value, name, old[name])
    return bool(changed)
