"""What an optimized model remembers of the original, so that it can take another checkpoint.

Folded weights cannot be loaded one for one: the original is built again with the new ones, and
optimized again. Only its structure is kept for that, and none of the weights.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimizer._copy import Storages, held_tensors, on_storage, structural_copy
from optimizer._errors import InputError
from optimizer._inputs import Call

_OPTIMIZE_AGAIN = (
    "the original model is not known here: load the checkpoint into it and optimize it again"
)
_META = torch.device("meta")


@dataclass(frozen=True)
class Blank:
    """A tensor's geometry and where it was; not its values."""

    meta: torch.Tensor
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Blank:
        """What there is to know of a tensor besides its values."""
        return cls(on_storage(tensor, _storage_like(tensor, _META)), tensor.device)

    def zeros(self) -> torch.Tensor:
        """A tensor like it, of zeros."""
        return on_storage(self.meta, _storage_like(self.meta, self.device))


@dataclass(frozen=True)
class Recipe:
    """How an optimized model was made. It is never changed, so copies share it.

    Attributes:
        model: a copy of the original in which the tensors of a checkpoint hold no data.
        devices: where each of those was.
        call: the example inputs, a Blank for each tensor.
        level: the level it was optimized at.
        passes: the names of the passes that ran; those from elsewhere, themselves.
    """

    model: nn.Module
    devices: dict[str, torch.device]
    call: Any
    level: int
    passes: tuple[Any, ...]

    @classmethod
    def of(
        cls, model: nn.Module, call: Call | None, level: int, passes: tuple[Any, ...]
    ) -> Recipe | None:
        """The recipe of a model that was optimized; None where it cannot be told."""
        try:
            devices = {name: tensor.device for name, tensor in _checkpoint(model).items()}
            hollow = _copy_on(model, dict.fromkeys(devices, _META))
            blank = pytree.tree_map_only(torch.Tensor, Blank.of, call)
        except Exception:  # a state_dict or a kind of tensor that a user wrote
            return None
        return cls(hollow, devices, blank, level, passes)

    def model_with(self, state_dict: Mapping[str, Any]) -> nn.Module:
        """The original model with the weights of another checkpoint.

        Raises:
            InputError: the checkpoint is not one of the original model.
        """
        return loaded(_copy_on(self.model, self.devices), state_dict)

    def example_inputs(self) -> Any:
        """Inputs as the model was optimized for, with zeros for values; None if there were none."""
        if self.call is None:
            return None
        args, kwargs = pytree.tree_map_only(Blank, Blank.zeros, self.call)
        return kwargs or args

    def __deepcopy__(self, memo: Any) -> Recipe:
        return self


def loaded(model: nn.Module, state_dict: Mapping[str, Any]) -> nn.Module:
    """`model`, into which a checkpoint of the original was loaded.

    Raises:
        InputError: the checkpoint is not one of the original model.
    """
    try:
        getattr(model, "refit", model.load_state_dict)(state_dict)
    except Exception as error:  # whatever a mapping that is no checkpoint leads to
        raise InputError(f"pass a checkpoint of the original model: {error}") from error
    return model


def packed(recipe: Recipe | bytes | None) -> bytes | None:
    """A recipe as bytes: who loads an optimized model need not have the code of the original."""
    if not isinstance(recipe, Recipe):
        return recipe
    file = io.BytesIO()
    try:
        torch.save(recipe, file)
    except Exception:  # a class or an attribute of the user's that does not pickle
        return None
    return file.getvalue()


def unpacked(recipe: Recipe | bytes | None) -> Recipe:
    """The recipe itself.

    Raises:
        InputError: there is none, or the code of the original model is not at hand.
    """
    try:
        if isinstance(recipe, bytes):
            recipe = torch.load(io.BytesIO(recipe), weights_only=False)
    except Exception as error:  # whatever importing a user's module raises
        raise InputError(f"{_OPTIMIZE_AGAIN} ({error}).") from error
    if not isinstance(recipe, Recipe):
        raise InputError(f"{_OPTIMIZE_AGAIN}.")
    return recipe


def _checkpoint(model: nn.Module) -> dict[str, torch.Tensor]:
    entries = model.state_dict(keep_vars=True).items()
    return {name: value for name, value in entries if isinstance(value, torch.Tensor)}


def _copy_on(model: nn.Module, devices: Mapping[str, torch.device]) -> nn.Module:
    """A copy that shares nothing, with new storages for what a checkpoint brings all of."""
    tensors = _checkpoint(model)
    brought = {id(tensor) for tensor in tensors.values()}
    held = (tensor for module in model.modules() for tensor in held_tensors(module))
    kept = {_storage(tensor) for tensor in held if id(tensor) not in brought}
    onto: Storages = {
        _storage(tensor): _storage_like(tensor, devices[name])
        for name, tensor in tensors.items()
        if _storage(tensor) not in kept
    }
    return structural_copy(model, share=False, onto=onto)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _storage_like(tensor: torch.Tensor, device: torch.device) -> torch.UntypedStorage:
    size = tensor.untyped_storage().nbytes()
    if device == _META:
        return torch.UntypedStorage(size, device=device)  # type: ignore[no-untyped-call]
    return torch.zeros(size, dtype=torch.uint8, device=device).untyped_storage()
