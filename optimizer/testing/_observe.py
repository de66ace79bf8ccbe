"""One call of a module, and all that its caller can observe of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.core.copy import held_tensors

# Positional or keyword arguments: any pytrees of tensors and other values.
Inputs: TypeAlias = Sequence[Any] | Mapping[str, Any]


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a function each operator that runs, its arguments, and what it gave, to be changed."""

    def __init__(self, see: Callable[[Any, Any, Mapping[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.see = see

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch imports it first, which takes two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(func, args, kwargs or {}, result)
        return result


@dataclass(frozen=True)
class Outcome:
    """What was observed: buffers by name, with the address that they were found at.

    `written` are the names of those that the call left with other values.
    """

    structure: pytree.TreeSpec
    values: dict[str, Any]
    buffers: dict[str, tuple[int, torch.Tensor]]
    written: frozenset[str]
    sharing: list[list[str]]
    random_state: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Outputs, inputs and buffers afterwards."""
        named = self.values | {in_buffer(name): value for name, (_, value) in self.buffers.items()}
        return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def in_buffer(name: str) -> str:
    """How the value that a buffer ends with is called."""
    return f"buffer {name} after the call"


@torch.no_grad()
def observe(module: nn.Module, inputs: Inputs) -> Outcome:
    """Call `module` once on clones of `inputs` from a fixed random state, and undo its effects."""
    given = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    args, kwargs = pytree.tree_map(_Copies(), given)
    before = {tensor: tensor.clone() for tensor in tensors_of(module)}
    put_back(module)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            result = module(*args, **kwargs)
            random_state = torch.get_rng_state()
    finally:
        buffers = {name: (b.data_ptr(), b.clone()) for name, b in module.named_buffers()}
        changed = [tensor for tensor, kept in before.items() if not same_bits(tensor, kept)]
        for tensor in changed:  # who is told of a write, packs the weights again
            tensor.copy_(before[tensor])
    leaves, structure = pytree.tree_flatten(result)
    arguments = pytree.tree_leaves((args, kwargs))
    values = {f"output {i}": leaf for i, leaf in enumerate(leaves)}
    values |= {f"input {i} after the call": tensor for i, tensor in enumerate(arguments)}
    written = frozenset(name for name, b in module.named_buffers() if any(b is t for t in changed))
    return Outcome(structure, values, buffers, written, _sharing(values, module), random_state)


def state_of(module: nn.Module) -> list[Any]:
    """What generated layers keep in Python, where they are not told apart by their tensors."""
    return [each.get_state() for each in _keepers(module)]


def put_back(module: nn.Module) -> None:
    """Let all that they keep be as it was at first."""
    for each in _keepers(module):
        each.put_state(each.first)


def _keepers(module: nn.Module) -> list[Any]:
    return [each for each in module.modules() if hasattr(type(each), "put_state")]


class _Copies:
    """Copies tensors as they lie in memory; what shared memory does so again."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.storages:
            self.storages[storage.data_ptr()] = copy.deepcopy(storage)
        copied = self.storages[storage.data_ptr()]
        place = (value.storage_offset(), value.shape, value.stride())
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(copied, *place)


def _sharing(values: dict[str, Any], module: nn.Module) -> list[list[str]]:
    owners: dict[int, list[str]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel():
            owners.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    held = (*module.parameters(), *held_tensors(module))
    for storage in owners.keys() & {tensor.untyped_storage().data_ptr() for tensor in held}:
        owners[storage].append("the module itself")
    return [names for names in owners.values() if len(names) > 1]


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether every bit is the same, but those of NaNs."""
    alike = actual.dtype == expected.dtype and not actual.is_complex()
    bits = _BITS.get(actual.element_size()) if alike else None
    if bits and torch.equal(actual.view(bits), expected.view(bits)):  # in an eighth of the time
        return True
    return same_values(actual, expected) and torch.equal(_signs(actual), _signs(expected))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signs(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.where(tensor.isnan(), False, torch.signbit(tensor))


def same_values(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all are equal; a NaN is equal to a NaN, and a zero to a zero."""
    return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())
