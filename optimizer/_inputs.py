"""Example inputs in one form: a tuple of positional and a dict of keyword arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from optimizer._errors import InputError
from optimizer._trees import copies_of, map_tensors, tensors_in

ExampleInputs: TypeAlias = torch.Tensor | Sequence[Any] | Mapping[str, Any]


class Call(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """The same call with every tensor in it replaced by `function(tensor)`."""
        args, kwargs = map_tensors(function, (self.args, self.kwargs))
        return Call(args, kwargs)

    def copied(self) -> Call:
        """The same call with copies of what a forward may write."""
        args, kwargs = copies_of((self.args, self.kwargs))
        return Call(args, kwargs)


def as_call(example_inputs: ExampleInputs) -> Call:
    """A tensor, a sequence of positional or a mapping of keyword arguments, as a `Call`.

    Raises:
        InputError: it is none of the three, a tensor in it is on the meta device, or something
            in it can be read once only.
    """
    if isinstance(example_inputs, torch.Tensor):
        return _with_data(Call((example_inputs,), {}))
    if isinstance(example_inputs, Mapping) and all(isinstance(key, str) for key in example_inputs):
        return _with_data(Call((), dict(example_inputs)))
    if isinstance(example_inputs, list | tuple):
        return _with_data(Call(tuple(example_inputs), {}))
    raise InputError(
        f"example_inputs is of type {type(example_inputs).__name__}: pass a tensor, a tuple of"
        " positional arguments, or a mapping of keyword arguments by name."
    )


def _with_data(call: Call) -> Call:
    if any(tensor.is_meta for tensor in tensors_in(call)):
        raise InputError(
            "an example input is on the meta device and holds no data: pass a tensor that does."
        )
    if any(isinstance(leaf, Iterator) for leaf in tree_leaves((call.args, call.kwargs))):
        raise InputError(
            "an example input is an iterator, which can be read once only: pass a list."
        )
    return call


def require_module(model: object) -> nn.Module:
    """`model`, if it is a module whose parameters and buffers hold data.

    Raises:
        InputError: it is no module, or a parameter or buffer is on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model is of type {type(model).__name__}, no torch.nn.Module: pass the module itself,"
            " already constructed."
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise InputError(
                f"'{name}' is on the meta device and holds no data: load the model's weights"
                " onto a real device first."
            )
    return model


def require_flags(**flags: object) -> None:
    """Require arguments that are True or False, by name: a text such as "no" would count as True.

    Raises:
        InputError: one is neither.
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{name} is {flag!r}: pass True or False.")


def require_seconds(seconds: object) -> float:
    """`tune_seconds`, if it is a time.

    Raises:
        InputError: it is none.
    """
    if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise InputError(f"tune_seconds is {seconds!r}: pass a number of seconds, or 0.")
    return float(seconds)


def require_writable(name: str, path: str | os.PathLike[str]) -> Path:
    """The path of a file that can be written, which is tried; what is there stays as it is.

    Raises:
        InputError: it cannot; the message calls the argument `name`.
    """
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
    """The graph of a module that was captured.

    Raises:
        InputError: it is no GraphModule.
    """
    if not isinstance(module, fx.GraphModule):
        raise InputError(
            f"module is of type {type(module).__name__}, no graph: pass optimizer.capture(model)."
        )
    return module.graph
