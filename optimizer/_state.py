"""What a forward may change besides tensors: Python state of its modules, and random states."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_DEPTH = 5


def python_state(model: nn.Module) -> dict[str, Any]:
    """What each module holds besides tensors and modules, by name, fit for comparison.

    Containers and objects are looked into; tensors, modules and functions count by identity.
    """
    modules = model.named_modules()
    return {name: _state_of(module) for name, module in modules}


def _state_of(module: nn.Module) -> dict[str, Any]:
    held = {k: v for k, v in vars(module).items() if not k.startswith("_tensor_constant")}
    return {name: _state(value, _DEPTH) for name, value in held.items()}


def _state(value: Any, depth: int) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), value
    if depth == 0 or isinstance(value, torch.Tensor | nn.Module | type):
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
