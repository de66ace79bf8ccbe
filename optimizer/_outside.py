"""The state outside a model that its forwards reach: watched while they run, and put back."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from optimizer._reach import Reach
from optimizer._state import OF_EVERY_MODULE, Place, fingerprint, is_immutable, is_of_torch

_WITH_ITEMS = (list, deque)


class Outside:
    """What the forwards of a model reach outside it.

    Attributes:
        reaches: that of each module whose code is not torch's, by name.
        unknown: why a module cannot be recorded because of what it reaches, by name.
        keeps_state: whether one reaches a value that can be changed.
    """

    def __init__(self, model: nn.Module) -> None:
        users = {name: module for name, module in model.named_modules() if _is_users(module)}
        kinds = {base: None for module in users.values() for base in type(module).__mro__}
        own = [base for base in kinds if not is_of_torch(base)]
        members = set(map(id, model.modules()))
        known: dict[Any, Reach] = {}
        self.reaches: dict[str, Reach] = {}
        for name, module in users.items():
            key = (type(module), *map(id, _held_objects(module)))
            self.reaches[name] = known[key] = known.get(key) or Reach(module, own, members)
        self.unknown = {name: each.unknown for name, each in self.reaches.items() if each.unknown}
        self.keeps_state = any(each.keeps_state for each in known.values())
        self._places = {id(each): each.places for each in known.values()}

    def state(self) -> dict[str, bytes]:
        """What each module reaches now, by name, fit for comparison."""
        prints = {
            key: fingerprint([place.value() for place in places])
            for key, places in self._places.items()
        }
        return {name: prints[id(reach)] for name, reach in self.reaches.items()}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put back what a block of code changes."""
        places = [place for each in self._places.values() for place in each]
        before = self.state() if self.keeps_state or places else None
        seen: set[int] = set()
        undo = [step for place in places for step in _steps_back(place, seen)]
        try:
            yield
        finally:
            if before is not None and self.state() != before:
                for step in undo:
                    with suppress(Exception):  # a frozen one refuses
                        step()


def _is_users(module: nn.Module) -> bool:
    written = isinstance(module, fx.GraphModule) or not is_of_torch(type(module))
    return written and not isinstance(module, torch.jit.ScriptModule)


def _held_objects(module: nn.Module) -> list[Any]:
    """What a module holds of which more can be reached."""
    held = (value for name, value in vars(module).items() if name not in OF_EVERY_MODULE)
    return [value for value in held if not is_immutable(value)]


def _steps_back(place: Place, seen: set[int]) -> Iterator[Callable[[], object]]:
    """How to put back a value, and what is in it."""
    value = place.value()
    yield partial(place.put, value)
    yield from _contents_back(value, seen)


def _contents_back(value: Any, seen: set[int]) -> Iterator[Callable[[], object]]:
    known = is_immutable(value) or isinstance(value, torch.Tensor | nn.Module | type)
    if known or id(value) in seen:
        return
    seen.add(id(value))
    step: Callable[[], object] | None = None
    parts: Iterable[Any] = ()
    with suppress(Exception):  # what draws from the system has no state; a user's class may raise
        parts = _parts_of(value)
        step = _contents_of(value)
    if step is not None:
        yield step
    for part in parts:
        yield from _contents_back(part, seen)


def _parts_of(value: Any) -> Iterable[Any]:
    inside = vars(value) if hasattr(value, "__dict__") else value
    parts = inside.values() if isinstance(inside, dict) else inside
    return [*parts] if isinstance(inside, (dict, tuple, *_WITH_ITEMS)) else ()


def _contents_of(value: Any) -> Callable[[], object] | None:
    """How to put back what a container holds, or where a generator of numbers is."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, dict | set):
        return partial(_refill, value, value.copy(), "update")
    if isinstance(value, (bytearray, *_WITH_ITEMS)):
        return partial(_refill, value, value.copy(), "extend")
    if numpy and isinstance(value, numpy.ndarray):
        return partial(numpy.copyto, value, value.copy())
    if numpy and isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if numpy and isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return _attributes_of(value)


def _attributes_of(value: Any) -> Callable[[], object] | None:
    if hasattr(value, "__dict__"):
        return partial(_refill, vars(value), dict(vars(value)), "update")
    slots = {n for kind in type(value).__mro__ for n in vars(kind).get("__slots__", ())}
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return partial(_set_all, value, held) if held else None


def _set_all(value: Any, attributes: dict[str, Any]) -> None:
    for name, held in attributes.items():
        setattr(value, name, held)


def _refill(container: Any, contents: Any, how: str) -> None:
    container.clear()
    getattr(container, how)(contents)
