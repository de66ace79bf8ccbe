"""What a forward may change besides tensors: Python state, of its modules or not."""

from __future__ import annotations

import io
import pickle
from types import (
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
    NotImplementedType,
)
from typing import Any, NamedTuple

import torch
from torch import fx, nn

_IMMUTABLE = (
    int, float, complex, bool, str, bytes, type(None), range, slice, EllipsisType,
    NotImplementedType, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    GetSetDescriptorType, MemberDescriptorType,
)  # fmt: skip
_BY_IDENTITY = (
    torch.Tensor, nn.Module, ModuleType, fx.Proxy, fx.Graph, fx.Node,
)  # fmt: skip
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
MISSING = object()
UNSEEN = b""  # the fingerprint of what cannot be looked into


class Place(NamedTuple):
    """Where a value is held: a dict, or an object, and a name."""

    space: Any
    name: str

    def value(self) -> Any:
        """What is held there now."""
        if isinstance(self.space, type | ModuleType):
            return vars(self.space).get(self.name, MISSING)
        if isinstance(self.space, dict):
            return self.space.get(self.name, MISSING)
        return getattr(self.space, self.name, MISSING)

    def put(self, value: Any) -> None:
        """Let it hold a value again, or nothing."""
        if self.value() is value:
            return
        if isinstance(self.space, dict):
            self.space[self.name] = value
        else:
            setattr(self.space, self.name, value)
        if value is MISSING:
            (self.space if isinstance(self.space, dict) else vars(self.space)).pop(self.name)


def is_of_torch(kind: type) -> bool:
    """Whether a class is torch's own."""
    return kind.__module__.partition(".")[0] == "torch" or kind is object


def is_immutable(value: Any) -> bool:
    """Whether no call can change a value."""
    kind = type(value)
    return kind in _IMMUTABLE or (kind in (tuple, frozenset) and all(map(is_immutable, value)))


def fingerprint(value: Any, met: list[Any] | None = None) -> bytes:
    """All that a value holds, as bytes; `UNSEEN` where it does not say.

    That is what pickling asks objects for, those of C among them. Tensors, modules, classes and
    functions count by identity. `met` takes the classes and functions that were come across.
    """
    file = io.BytesIO()
    try:
        _Printer(file, [] if met is None else met).dump(value)
    except Exception:  # generators, locks, handles: whatever does not pickle
        return UNSEEN
    return file.getvalue()


class _Printer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, met: list[Any]) -> None:
        super().__init__(file, protocol=4)
        self.met = met

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Generator:
            return bytes(value.get_state().tolist())
        if isinstance(value, type | FunctionType):
            self.met.append(value)
        elif not (isinstance(value, _BY_IDENTITY) or value is MISSING):
            seen = not is_of_torch(kind) or kind in _IMMUTABLE
            return None if seen else id(value)
        return id(value)


def python_state(model: nn.Module, *besides: str) -> dict[str, Any]:
    """What each module holds, by name, fit for comparison: tensors count by identity.

    Args:
        model: the root of the modules.
        besides: names of attributes that are left out.
    """
    modules = model.named_modules()
    scripted = torch.jit.ScriptModule
    return {name: _state_of(m, besides) for name, m in modules if not isinstance(m, scripted)}


def held(module: nn.Module) -> list[Any]:
    """The objects that a module holds, to be compared by identity: a cheap look at its state."""
    if isinstance(module, torch.jit.ScriptModule):
        return []  # its state is not Python's; asked for it, it makes new objects
    tables = (vars(module), module._parameters, module._buffers, module._modules)
    return [value for table in tables for value in table.values()]


def _state_of(module: nn.Module, besides: tuple[str, ...]) -> Any:
    values = {
        name: value
        for name, value in vars(module).items()
        if (name not in OF_EVERY_MODULE or value or value is False)
        and not (name.startswith("_tensor_constant") or name in besides)
    }
    if not is_of_torch(type(module)):
        whole = fingerprint(values)
        return whole or {name: fingerprint(value) or id(value) for name, value in values.items()}
    inside = [*values.values()]
    for table in [each for each in inside if isinstance(each, dict)]:
        inside += table.values()
    return [value if is_immutable(value) else id(value) for value in inside]
