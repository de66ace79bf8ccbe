"""Reparametrized and pruned weights, constants in inference: computed once, for passes to fold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrizations, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from optimizer.core.node import HOOKS, is_plain

_REMOVED_BY: dict[type, Callable[..., object]] = {
    WeightNorm: remove_weight_norm, SpectralNorm: remove_spectral_norm,
    **{kind: prune.remove for kind in vars(prune).values() if isinstance(kind, type)},
}  # fmt: skip
_SPECTRAL_NORM = SpectralNorm.__module__


def materialize(model: nn.Module) -> list[str]:
    """Give layers the weights that torch reparametrizes or prunes; return what was done.

    Left as it is, is a layer in training mode, where they are learned or written; one with hooks,
    or a parametrization, of a user's, which may compute anything; and one whose tensors are held
    elsewhere too, by which they may be written. The model is changed, so it is to be a copy.
    """
    holders = Counter(_storages(model.modules()))
    return [text for name, module in model.named_modules() for text in _of(name, module, holders)]


def _storages(modules: Iterable[nn.Module]) -> Iterator[int]:
    """Yield the storage of each tensor, as often as one is held."""
    for module in modules:
        for table in (module._parameters, module._buffers):
            yield from (t.untyped_storage()._cdata for t in table.values() if t is not None)


def _of(name: str, module: nn.Module, holders: Counter[int]) -> Iterator[str]:
    hooks: list[Any] = [hook for table in HOOKS for hook in getattr(module, table).values()]
    is_torchs = all(type(hook) in _REMOVED_BY for hook in hooks) and "forward" not in vars(module)
    lists: Any = module.parametrizations if is_parametrized(module) else nn.ModuleDict()
    storages = _storages([*[module] * bool(hooks), *lists.modules()])
    if module.training or not is_torchs or any(holders[each] > 1 for each in storages):
        return
    for hook in hooks:
        tensor = vars(hook).get("_tensor_name") or hook.name
        _REMOVED_BY[type(hook)](module, tensor)
        _drop_hooks_for_older_checkpoints(module)
        yield f"computed once: the {tensor} of '{name}', by its {type(hook).__name__}"
    steps = [step for each in lists.values() for step in each]
    plain = all(map(is_plain, lists.modules())) and not any(each.training for each in steps)
    torchs = all(type(step).__module__ == parametrizations.__name__ for step in steps)
    if steps and plain and torchs:
        _without_parametrizations(module, lists)
        kinds = ", ".join(sorted({type(step).__name__.strip("_") for step in steps}))
        yield f"computed once: the {' and '.join(lists)} of '{name}', by its {kinds}"


def _without_parametrizations(module: nn.Module, lists: nn.ModuleDict) -> None:
    """Do as `parametrize.remove_parametrizations`, which takes the property off the class."""
    values = {name: getattr(module, name).detach().clone() for name in lists}
    del module._modules["parametrizations"]
    module.__class__ = type(module).__bases__[0]
    _drop_hooks_for_older_checkpoints(module)
    for name, value in values.items():
        learned = any(each.requires_grad for each in lists[name].parameters())
        module.register_parameter(name, nn.Parameter(value, learned))


def _drop_hooks_for_older_checkpoints(module: nn.Module) -> None:
    for key, hook in list(module._load_state_dict_pre_hooks.items()):
        if getattr(hook, "hook", hook).__module__ in (parametrizations.__name__, _SPECTRAL_NORM):
            del module._load_state_dict_pre_hooks[key]
