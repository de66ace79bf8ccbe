"""What a forward may change besides tensors: Python state of its modules, and random states."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None)))
_CONTAINERS = frozenset((dict, OrderedDict, set, list, tuple))
_BY_IDENTITY = (torch.Tensor, nn.Module, type)
_DEPTH = 5


def python_state(model: nn.Module) -> dict[str, Any]:
    """What each module holds besides tensors and modules, by name, fit for comparison.

    Containers and objects are looked into; tensors, modules and functions count by identity.
    """
    modules = model.named_modules()
    scripted = torch.jit.ScriptModule
    return {name: _state_of(m) for name, m in modules if not isinstance(m, scripted)}


def held(module: nn.Module) -> list[Any]:
    """The objects that a module holds, to be compared by identity: a cheap look at its state."""
    if isinstance(module, torch.jit.ScriptModule):
        return []  # its state is not Python's; asked for it, it makes new objects
    tables = (vars(module), module._parameters, module._buffers, module._modules)
    return [value for table in tables for value in table.values()]


def _state_of(module: nn.Module) -> dict[str, Any]:
    return {
        name: _state(value, _DEPTH)
        for name, value in vars(module).items()
        if not name.startswith("_tensor_constant")
    }


def _state(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in _CONTAINERS and not value:
        return kind
    if depth == 0 or isinstance(value, _BY_IDENTITY):
        return id(value)
    if isinstance(value, dict):
        return [(_state(k, depth - 1), _state(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_state(item, depth - 1) for item in value]
    if type(value).__module__ == "itertools":
        return repr(value)
    return id(value), _state(getattr(value, "__dict__", None), depth - 1)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the random states of Python, numpy and torch's CPU generator as they were."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    kept = random.getstate(), torch.get_rng_state(), numpy.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(kept[0])
        torch.set_rng_state(kept[1])
        if numpy is not None:
            numpy.set_state(kept[2])


def random_fingerprint() -> tuple[int, ...]:
    """A number for each random state of the process."""
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    states: list[Any] = [random.getstate(), torch.get_rng_state().numpy().tobytes()]
    if numpy is not None:
        name, keys, *rest = numpy.get_state()
        states.append((name, keys.tobytes(), *rest))
    return tuple(map(hash, states))
