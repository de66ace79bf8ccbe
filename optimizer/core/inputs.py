"""Example inputs in one form, and the tensors in a pytree.

A dataclass, which pytree takes for a leaf, is here the tree of its fields.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from optimizer.core.errors import InputError


def opened(value: Any) -> Any:
    """Return the same tree with the name and the fields of a dataclass in the place of each."""

    def fields_of(record: Any) -> dict[str, Any]:
        inside = {field.name: getattr(record, field.name) for field in fields(record)}
        return {type(record).__name__: opened(inside)}

    return pytree.tree_map_only(is_record, fields_of, value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in a pytree, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    leaves = pytree.tree_leaves(value)
    if any(map(is_record, leaves)):
        leaves = pytree.tree_leaves(opened(value))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return the same tree with every tensor in it replaced by `function(tensor)`."""
    if isinstance(value, torch.Tensor):
        return function(value)

    def map_fields(record: Any) -> Any:
        copied = copy.copy(record)
        for field in fields(record):
            inside = map_tensors(function, getattr(record, field.name))
            object.__setattr__(copied, field.name, inside)  # it may be frozen
        return copied

    mapped = pytree.tree_map_only(torch.Tensor, function, value, is_leaf=is_size)
    return pytree.tree_map_only(is_record, map_fields, mapped, is_leaf=is_size)


def is_size(value: Any) -> bool:
    """Return whether a value is a torch.Size, of which pytree would make a tuple."""
    return isinstance(value, torch.Size)


def storages_in(value: Any) -> set[int]:
    """Return the identities of all storages that the tensors in a pytree are views of."""
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(value)}


def hides_tensors(value: Any) -> bool:
    """Return whether a pytree may hold tensors unseen, in an object of a user's class."""
    leaves = [] if isinstance(value, torch.Tensor) else pytree.tree_leaves(opened(value))
    kinds = [type(leaf) for leaf in leaves if not isinstance(leaf, Enum)]
    return any(kind.__module__.split(".")[0] not in ("builtins", "torch") for kind in kinds)


def _copy_of(leaf: Any) -> Any:
    if is_record(leaf) or not (isinstance(leaf, set | bytearray) or hides_tensors(leaf)):
        return leaf
    try:
        with CopyOfTensors(lambda each: None if each.is_leaf else each.detach().clone()):
            return copy.deepcopy(leaf)
    except Exception:  # whatever the class of a user's raises
        return leaf


class CopyOfTensors(TorchFunctionMode):
    """While it is entered, `copy.deepcopy` takes for a tensor what a function makes of it, if any.

    Alone, it refuses a tensor that was computed with gradients.
    """

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copied = self._function(args[0]) if func is torch.Tensor.__deepcopy__ else None
        return func(*args, **kwargs or {}) if copied is None else copied


def is_record(leaf: Any) -> bool:
    """Return whether a value is an instance of a dataclass, whose fields are looked into."""
    return is_dataclass(leaf) and not isinstance(leaf, type)


ExampleInputs: TypeAlias = torch.Tensor | Sequence[Any] | Mapping[str, Any]


class Call(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """Return the same call with every tensor in it replaced by `function(tensor)`."""
        return Call(*map_tensors(function, self))

    def copied(self) -> Call:
        """Return the same call with copies of its tensors, and of objects that may hide some."""
        return Call(*pytree.tree_map(_copy_of, self.map(torch.clone), is_leaf=is_size))


def as_call(example_inputs: ExampleInputs) -> Call:
    """Return a tensor, a sequence of positional or a mapping of keyword arguments, as a `Call`."""
    if isinstance(example_inputs, torch.Tensor):
        call = Call((example_inputs,), {})
    elif isinstance(example_inputs, list | tuple):
        call = Call(tuple(example_inputs), {})
    elif isinstance(example_inputs, Mapping) and all(isinstance(k, str) for k in example_inputs):
        call = Call((), dict(example_inputs))
    else:
        kind = type(example_inputs).__name__
        raise InputError(f"pass a tensor, a tuple or keyword arguments by name, and no {kind}.")
    if any(tensor.is_meta for tensor in tensors_in(call)):
        raise InputError("an example input is on the meta device: pass a tensor that holds data.")
    if any(isinstance(leaf, Iterator) for leaf in pytree.tree_leaves(call)):
        raise InputError("an example input is an iterator, to be read once only: pass a list.")
    return call


def require_module(model: object) -> nn.Module:
    """Return `model`; raise an InputError unless it is a module whose tensors hold data."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {type(model)}, no torch.nn.Module: pass one, constructed.")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise InputError(f"'{name}' is on the meta device: first load the model's weights.")
    return model


def require_flags(**flags: object) -> None:
    """Raise an InputError unless all are True or False: a text such as "no" would count as True."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{name} is {flag!r}: pass True or False.")


def require_seconds(seconds: object) -> float:
    """Return `tune_seconds`; raise an InputError unless it is a time."""
    if not isinstance(seconds, int | float) or not 0 <= seconds < 1e99:
        raise InputError(f"tune_seconds is {seconds!r}: pass a number of seconds, or 0.")
    return float(seconds)


def require_writable(name: str, path: str | os.PathLike[str]) -> Path:
    """Return the path of a file; raise an InputError unless it is writable. It stays as it is."""
    try:
        file = Path(path)
        new = not file.exists()
        file.open("a").close()
        if new:
            file.unlink()
    except (OSError, TypeError, ValueError) as error:
        raise InputError(f"{name}={path!r} is no file that can be written: {error}.") from error
    return file


def require_graph(module: object) -> fx.Graph:
    """Return the graph of a captured module; raise an InputError unless it is one."""
    if not isinstance(module, fx.GraphModule):
        raise InputError(f"{type(module).__name__} is no graph: pass optimizer.capture(model).")
    return module.graph
