"""A copy of a module that shares its weights: what is optimized instead of the caller's own."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import nn

from optimizer._errors import CaptureError

_IMMUTABLE = frozenset((bool, int, float, str, type(None)))
_PROTOCOL = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")
Storages: TypeAlias = dict[int, torch.UntypedStorage]
ModuleType = TypeVar("ModuleType", bound=nn.Module)


def structural_copy(
    model: ModuleType,
    *,
    share: bool = True,
    onto: Storages | None = None,
    only_ordinary: bool = True,
) -> ModuleType:
    """Copy all of a model but the data of its parameters.

    Every module, hook table and plain attribute is new. Parameters are new objects over the
    same storage, so that moving or casting the copy leaves the original where it is. Buffers
    and other tensors, which a forward may write, are cloned; those that share storage with one
    another still do.

    Args:
        model: the module to copy.
        share: False clones the data of parameters too, for a forward that writes them.
        onto: what takes the place of a storage, by the `_cdata` of that one.
        only_ordinary: False clones tensors that are more than storage and shape, such as sparse
            ones, which would else be an error: nothing could be known of them.

    Raises:
        CaptureError: an attribute of the model cannot be copied.
    """
    try:
        with warnings.catch_warnings():  # torch's own pickling uses what torch has deprecated
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            memo = _memo(model, dict(onto or {}), share=share, only_ordinary=only_ordinary)
            return cast(ModuleType, _copied(model, memo))
    except Exception as error:  # locks, handles, sparse tensors: whatever a model may hold
        raise CaptureError(f"the model cannot be copied: {error}") from error


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """`copy.deepcopy`, five times as fast on what modules are made of."""
    kind: Any = type(value)
    if kind in _IMMUTABLE or (kind is tuple and _IMMUTABLE.issuperset(map(type, value))):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind in (dict, OrderedDict):
        made = memo[id(value)] = kind()
        made.update((_copied(key, memo), _copied(held, memo)) for key, held in value.items())
        return made
    if kind is torch.Tensor and not value.is_leaf:
        return memo.setdefault(id(value), value.detach().clone())  # deepcopy refuses
    if kind is set and not value:
        return memo.setdefault(id(value), set())
    if not isinstance(value, nn.Module) or _says_how(kind):
        return copy.deepcopy(value, memo)
    module = memo[id(value)] = kind.__new__(kind)
    module.__setstate__({name: _copied(held, memo) for name, held in vars(value).items()})
    return module


def _says_how(kind: type) -> bool:
    """Whether the class of a module has a way of its own to be copied."""
    own = any(getattr(kind, name) is not getattr(nn.Module, name) for name in _PROTOCOL)
    return own or hasattr(kind, "__deepcopy__")


def _memo(
    model: nn.Module, storages: Storages, *, share: bool, only_ordinary: bool
) -> dict[int, Any]:
    """What deepcopy takes for the tensors of a model instead of copying them."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if not (only_ordinary or is_ordinary(parameter)):
            memo[id(parameter)] = _clone_of_another_kind(parameter)
            continue
        _require_ordinary(parameter)
        if share:
            storages.setdefault(parameter.untyped_storage()._cdata, parameter.untyped_storage())
        memo[id(parameter)] = nn.Parameter(_clone(parameter, storages), parameter.requires_grad)
    for value in held_tensors(model):
        if id(value) not in memo:
            whole = only_ordinary or is_ordinary(value)
            memo[id(value)] = _clone(value, storages) if whole else _clone_of_another_kind(value)
    return memo


def held_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of a model besides its parameters: buffers and plain attributes."""
    for module in model.modules():
        for value in [*module._buffers.values(), *vars(module).values()]:
            if isinstance(value, torch.Tensor):
                yield value


def _clone(tensor: torch.Tensor, storages: Storages) -> torch.Tensor:
    _require_ordinary(tensor)
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
    shared = storages[storage._cdata]._cdata == storage._cdata and not tensor.is_inference()
    return tensor.data if shared else on_storage(tensor, storages[storage._cdata])


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether storage, dtype, shape and strides tell all of a tensor."""
    ordinary = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return ordinary and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _require_ordinary(tensor: torch.Tensor) -> None:
    if not is_ordinary(tensor):
        raise TypeError(
            f"it holds a tensor of class {type(tensor).__name__}, {tensor.dtype}, {tensor.layout},"
            " which is more than its storage and shape"
        )


def _clone_of_another_kind(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that is more than its storage and shape, and a view of no other."""
    data = tensor.detach().clone()
    is_parameter = isinstance(tensor, nn.Parameter)
    copied = nn.Parameter(data, tensor.requires_grad) if is_parameter else data
    if type(copied) is not type(tensor) or tensor.is_conj() or tensor.is_neg():
        raise TypeError(f"it holds a tensor of class {type(tensor).__name__}")
    return copied


def on_storage(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor with the geometry and dtype of `tensor` over another storage."""
    empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
