"""A copy of a module, with the same weights or a snapshot of them: what is optimized.

A snapshot has the bytes that its storages had when it was taken, whatever is written to the
original afterwards. On a CPU that costs no memory: torch copies a storage when it is first
written (`torch._lazy_clone`).
"""

from __future__ import annotations

import copy
import ctypes
import threading
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import CellType
from typing import Any, TypeAlias, TypeVar, cast
from weakref import ReferenceType

import torch
from torch import fx, nn

from optimizer.core.context import forked_rng
from optimizer.core.errors import CaptureError, require
from optimizer.core.inputs import CopyOfTensors

_IMMUTABLE = frozenset((bool, int, float, str, type(None)))
_PROTOCOL = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")
_LOCK = threading.Lock()  # torch has none: two threads that snapshot one storage would spoil it
Storages: TypeAlias = dict[int, torch.UntypedStorage]
ModuleType = TypeVar("ModuleType", bound=nn.Module)


def structural_copy(
    model: ModuleType,
    *,
    share_parameters: bool = True,
    onto: Storages | None = None,
    only_ordinary: bool = True,
) -> ModuleType:
    """Copy all of a model but the data of its parameters.

    Every module, hook table and plain attribute is new. Parameters are new objects over the
    same storage, so that moving or casting the copy leaves the original where it is; a snapshot
    is taken of them unless `share_parameters`. Of buffers and other tensors, which a forward may
    write, one is taken in any case; those that share storage with one another still do. `onto` maps
    the `_cdata` of storages to those that take their place.

    Raises:
        CaptureError: an attribute cannot be copied; a tensor not `is_ordinary`, if `only_ordinary`.
    """
    try:
        memo: dict[Any, Any] = {"modules": {*map(id, model.modules())}, "closures": []}
        copies = _Snapshot(model, dict(onto or {}))
        for key, tensor in copies.tensors.items():
            is_parameter, ordinary = key in copies.parameters, key in copies.places
            if share_parameters and is_parameter and ordinary:
                copies.storages.setdefault(copies.places[key], tensor.untyped_storage())
            copied = copies.of(tensor) if ordinary else _clone(tensor, only_ordinary)
            memo[key] = _like_tensor(tensor, copied)
        with CopyOfTensors(copies.renewed):  # also of views that lists and objects hold
            result = cast(ModuleType, _copied(model, memo))
        shared = any(id(each) in memo for each in memo["closures"])
        require(not shared, "a function in it holds a part of the model itself")
    except Exception as error:  # locks, handles, sparse tensors: whatever a model may hold
        raise CaptureError(f"the model cannot be copied: {error}") from error
    return result


def snapshot(model: nn.Module) -> tuple[nn.Module, bool]:
    """Return a snapshot of a model and True, or, if it cannot be copied, itself and False."""
    try:
        return structural_copy(model, share_parameters=False, only_ordinary=False), True
    except CaptureError:  # to capture it will say so
        return model, False


def _copied(value: Any, memo: dict[Any, Any]) -> Any:
    """Do as `copy.deepcopy`, twice as fast on what modules are made of."""
    kind: Any = type(value)
    if kind in _IMMUTABLE or (kind is tuple and _IMMUTABLE.issuperset(map(type, value))):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind in (dict, OrderedDict):
        return _copied_items(value, memo.setdefault(id(value), kind()), memo)
    if kind is ReferenceType and id(value()) in memo["modules"]:
        return ReferenceType(_copied(value(), memo))
    if not isinstance(value, nn.Module):
        return _copied_object(value, memo)
    custom = any(getattr(kind, name) is not getattr(nn.Module, name) for name in _PROTOCOL)
    if custom or hasattr(kind, "__deepcopy__"):  # its class has a way of its own
        with _unseen(value):
            return _like(value, copy.deepcopy(value, memo), memo)
    module = memo[id(value)] = kind.__new__(kind)
    module.__setstate__(_copied_items(vars(value), {}, memo))
    return module


def _unseen(value: Any) -> AbstractContextManager[object]:
    """Hide that a new layer draws weights, and that a copy of an exported graph warns."""
    if not isinstance(value, fx.GraphModule):
        return forked_rng()
    exported = hasattr(value.graph._codegen, "pytree_info")
    quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)
    return quiet if exported else nullcontext()


def _copied_items(items: dict[Any, Any], copied: Any, memo: dict[Any, Any]) -> Any:
    for key, value in items.items():
        name = key if type(key) is str else _copied(key, memo)
        copied[name] = value if type(value) in _IMMUTABLE else _copied(value, memo)
    return copied


def _copied_object(value: Any, memo: dict[Any, Any]) -> Any:
    """Return a deep copy; raise a TypeError if it is of other plain values."""
    cells = [each for each in getattr(value, "__closure__", None) or () if each != CellType()]
    memo["closures"] += [getattr(c.cell_contents, "__self__", c.cell_contents) for c in cells]
    copied = copy.deepcopy(value, memo)
    for name, attribute in getattr(value, "__dict__", {}).items():
        plain = type(attribute) in _IMMUTABLE and not name.startswith("__")  # which wrappers set
        if plain and getattr(copied, "__dict__", {}).get(name) != attribute == attribute:
            raise TypeError(f"the copy of a {type(value).__name__} has another '{name}'")
    return copied


def _like(model: nn.Module, copied: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Give a copy that its class made the modes of the model; raise unless the rest is the same."""
    modules = dict(model.named_modules())
    for name, new in copied.named_modules():
        old = modules.get(name, new)
        if isinstance(old, torch.jit.ScriptModule):
            continue  # torch copies it, and its tables are no dicts; frozen, it has no mode
        new.training = old.training
        if new in modules.values() or not _holds_the_same(old, new, memo):
            where = f"'{name}'" if name else type(model).__name__
            raise TypeError(f"its class has a way of its own, whose copy is not like {where}")
    return copied


def _holds_the_same(module: nn.Module, copied: nn.Module, memo: dict[Any, Any]) -> bool:
    """Return whether a copy has the hooks of a module, and the same values and tensors, if any."""
    plain = {name: value for name, value in vars(module).items() if type(value) in _IMMUTABLE}
    values = all(vars(copied).get(name, value) == value for name, value in plain.items())
    old_tensors, new_tensors = ({**m._parameters, **m._buffers} for m in (module, copied))
    pairs = ((old, new_tensors.get(name)) for name, old in old_tensors.items())
    weights = all(
        old is None or new is None or new is memo.get(id(old)) or torch.equal(old, new)
        for old, new in pairs
    )
    return values and weights and _count_hooks(module) == _count_hooks(copied)


def _count_hooks(module: nn.Module) -> int:
    """Count the hooks but torch's own, which checks the inputs of an export so."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return sum(str(hook.__module__).partition(".")[0] != "torch" for hook in hooks)


def held_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors of a model besides its parameters: buffers and plain attributes."""
    tables = (table for each in model.modules() for table in (each._buffers, vars(each)))
    return [each for table in tables for each in table.values() if isinstance(each, torch.Tensor)]


class _Snapshot:
    """The tensors of a model over other storages, which are made once each.

    Those of parameters are copied on write; at once where the caller would notice that: on other
    devices, where a graph or a collective may hold addresses; where something besides the model's
    tensors holds the storage, as a numpy array does, which would part from it; and for an RNN,
    whose kernel asks for its weights as if to write them: two threads at once end the process.
    Likewise in a storage that cannot be resized: it has no allocator, as in what `torch.load`
    makes, and the first write would end the process, or numpy has its address.
    What is no parameter may be resized, after which torch fails to write what it copies on write.
    """

    def __init__(self, model: nn.Module, storages: Storages) -> None:
        self.storages = storages
        tables = [(each, each._parameters.values()) for each in model.modules()]
        self.parameters = {id(p): p for _, table in tables for p in table if p is not None}
        of_rnns = {id(p) for of, table in tables if isinstance(of, nn.RNNBase) for p in table}
        self.tensors = self.parameters | {id(each): each for each in held_tensors(model)}
        ordinary = {key: each for key, each in self.tensors.items() if is_ordinary(each)}
        self.places = {key: each.untyped_storage()._cdata for key, each in ordinary.items()}
        self.holders = Counter(self.places.values())
        self.free = {self.places[key] for key in self.parameters.keys() & ordinary.keys() - of_rnns}

    def renewed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return an ordinary tensor over the copy of its storage, and None for another one."""
        return _like_tensor(tensor, self.of(tensor)) if is_ordinary(tensor) else None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same geometry over the copy of its storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            with _LOCK:
                self.storages[storage._cdata] = self._copy_of(storage)
        copied = self.storages[storage._cdata]
        shared = copied._cdata == storage._cdata and not tensor.is_inference()
        return tensor.data if shared else on_storage(tensor, copied)

    def _copy_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        place = storage._cdata
        free = place in self.free and storage.device.type == "cpu" and storage.resizable()
        # `storage` is one of its holders
        if free and torch._C._storage_Use_Count(place) - 1 == self.holders[place]:
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            with suppress(RuntimeError):  # memory of a file or of another process
                return torch._lazy_clone(whole).untyped_storage()
        return storage.clone()  # type: ignore[no-untyped-call, no-any-return]


def read_only(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values that a tensor has now, for a reader that asks for memory as if to write it.

    What is copied on write would be copied then: the result holds the bytes themselves.
    """
    if not torch._C._is_cow_tensor(tensor):  # type: ignore[attr-defined]
        return tensor
    held = torch._lazy_clone(tensor)
    storage = held.untyped_storage()
    first = torch._C._data_address(held)  # type: ignore[attr-defined]
    place = first - held.storage_offset() * held.element_size()
    memory = (ctypes.c_byte * storage.nbytes()).from_address(place)
    memory.held = held  # type: ignore[attr-defined]  # as long as the result is
    return on_storage(held, torch.frombuffer(memory, dtype=torch.uint8).untyped_storage())


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether storage, dtype, shape and strides tell all of a tensor."""
    ordinary = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return ordinary and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _clone(tensor: torch.Tensor, only_ordinary: bool) -> torch.Tensor:
    """Return a copy of a tensor that is more than its storage and shape."""
    if only_ordinary:
        raise TypeError(
            f"it holds a tensor of class {type(tensor).__name__}, {tensor.dtype},"
            f" {tensor.layout}, which is more than its storage and shape"
        )
    copied = tensor.detach().clone()
    is_like_it = type(tensor) in (nn.Parameter, type(copied))
    if not is_like_it or tensor.is_conj() or tensor.is_neg():
        raise TypeError(f"it holds a tensor of class {type(tensor).__name__}")
    return copied


def _like_tensor(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's values as one of its kind, with what a user notes on it."""
    copied.requires_grad_(tensor.is_leaf and tensor.requires_grad)
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, tensor.requires_grad)
    vars(copied).update(vars(tensor))
    return copied


def unshare(tensors: Iterable[torch.Tensor]) -> None:
    """Give tensors new memory with the same values, which they share as before."""
    storages: Storages = {}
    for tensor in tensors:
        if is_ordinary(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
            tensor.data = on_storage(tensor, storages[storage._cdata])
        else:
            tensor.data = tensor.data.clone()


def on_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a tensor with the geometry and dtype of `tensor` over another storage."""
    empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
