"""The oracles: what it means that a candidate computes what a model computes.

Both run in eager on clones of the inputs. What is compared is all that a caller can observe: the
outputs, the inputs and buffers afterwards, what shares memory with what, and the random state.
Bits are compared where eager rounds nothing, which it proves itself by giving the same in float32
and float64; elsewhere the error against the largest value, in float64, must be below 1e-9. (A
correct BatchNorm fold stays below 2e-13 there; one that forgets eps is at 5e-7 or more.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

TOLERANCE = 1e-9
# Below this the error counts as absolute: a value that cancels to nothing has no relative error.
SMALLEST_SCALE = 1e-3

# Positional or keyword arguments: any pytrees of tensors and other values.
Inputs: TypeAlias = Sequence[Any] | Mapping[str, Any]
Same = Callable[[torch.Tensor, torch.Tensor], bool]


@dataclass(frozen=True)
class Outcome:
    """All that one call lets its caller observe."""

    structure: pytree.TreeSpec
    values: dict[str, Any]
    buffers: dict[str, tuple[int, torch.Tensor]]
    sharing: list[list[str]]
    random_state: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """Outputs, inputs and buffers afterwards."""
        values = [*self.values.values(), *(value for _, value in self.buffers.values())]
        return [value for value in values if isinstance(value, torch.Tensor)]


def assert_equivalent(
    model: nn.Module,
    candidate: nn.Module,
    inputs: Inputs,
    *,
    exact: bool = False,
) -> None:
    """Assert that `candidate` computes what `model` computes on `inputs`.

    Args:
        model: the reference. Its tensors are put back after the call.
        candidate: what must agree with it. Its tensors are put back after the call.
        inputs: positional arguments, or a mapping of keyword arguments, copied before each call;
            use float64.
        exact: demand the same bits, the sign of zero included, whatever the data.

    Raises:
        AssertionError: they differ; the message names the first output, input or buffer that does.
    """
    reference, outcome = observe(model, inputs), observe(candidate, inputs)
    assert outcome.structure == reference.structure, (
        f"output structure: expected {reference.structure}, got {outcome.structure}"
    )
    same = _same_bits if exact else _near
    if not exact and _rounds_nothing(model, inputs, reference):
        same = _same_values
    for name, expected in reference.values.items():
        _assert_same(name, expected, outcome.values[name], same)
    _assert_same_buffers(reference, outcome, same)
    assert outcome.sharing == reference.sharing, (
        f"memory shared among {reference.sharing} in the model, {outcome.sharing} in the candidate"
    )
    assert torch.equal(outcome.random_state, reference.random_state), (
        "the candidate leaves the random state differently"
    )


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Assert that the block leaves `model` and the global random state as they were.

    Parameters and buffers must be the same objects with the same bits; modules, modes,
    requires_grad and hooks must be the same.
    """
    objects, values = _identity(model), [tensor.clone() for tensor in _tensors(model)]
    random_state = torch.get_rng_state()
    yield
    assert _identity(model) == objects, "the model's modules, modes, parameters or hooks changed"
    assert all(map(_same_bits, _tensors(model), values)), "a parameter or buffer was overwritten"
    assert torch.equal(torch.get_rng_state(), random_state), "the global random state changed"


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, message: str) -> None:
    """Assert equality of every bit but those of NaNs."""
    assert _same_bits(actual, expected), message


@torch.no_grad()
def observe(module: nn.Module, inputs: Inputs) -> Outcome:
    """Call `module` once on clones of `inputs` from a fixed random state, and undo its effects."""
    given = ((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    args, kwargs = pytree.tree_map(_Copies(), given)
    arguments = pytree.tree_leaves((args, kwargs))
    before = [tensor.clone() for tensor in _tensors(module)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = module(*args, **kwargs)
        random_state = torch.get_rng_state()
    leaves, structure = pytree.tree_flatten(result)
    values = {f"output {i}": leaf for i, leaf in enumerate(leaves)}
    values |= {f"input {i} after the call": tensor for i, tensor in enumerate(arguments)}
    buffers = {name: (b.data_ptr(), b.clone()) for name, b in module.named_buffers()}
    for tensor, kept in zip(_tensors(module), before, strict=True):
        tensor.copy_(kept)
    return Outcome(structure, values, buffers, _sharing(values), random_state)


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


def _sharing(values: dict[str, Any]) -> list[list[str]]:
    owners: dict[int, list[str]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel():
            owners.setdefault(value.untyped_storage().data_ptr(), []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _assert_same(name: str, expected: Any, actual: Any, same: Same) -> None:
    if not isinstance(expected, torch.Tensor):
        assert type(actual) is type(expected), f"{name}: expected {expected!r}, got {actual!r}"
        assert actual == expected, f"{name}: expected {expected!r}, got {actual!r}"
        return
    assert isinstance(actual, torch.Tensor), f"{name}: expected a tensor, got {actual!r}"
    for attribute in ("shape", "dtype", "device"):
        wanted, got = getattr(expected, attribute), getattr(actual, attribute)
        assert got == wanted, f"{name}: expected {attribute} {wanted}, got {got}"
    wanted, got = _layout(expected), _layout(actual)
    assert got == wanted, f"{name}: expected strides {wanted}, got {got}"
    assert same(actual, expected), (
        f"{name}: values differ by {_error(actual, expected):.3g} of the largest"
        f" ({same.__name__.strip('_').replace('_', ' ')} was asked for)\n"
        f"expected {expected}\ngot      {actual}"
    )


def _layout(tensor: torch.Tensor) -> list[int]:
    """The strides that say where an element lies."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in sizes if size > 1 and tensor.numel()]


def _assert_same_buffers(reference: Outcome, outcome: Outcome, same: Same) -> None:
    """A buffer that the candidate still has, by name or in shared memory, ends the same."""
    by_address = {address: value for address, value in outcome.buffers.values() if address}
    for name, (address, expected) in reference.buffers.items():
        found = outcome.buffers.get(name)
        actual = by_address.get(address) if found is None else found[1]
        if actual is not None and actual.shape == expected.shape:
            _assert_same(f"buffer {name} after the call", expected, actual, same)


def _same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if not _same_values(actual, expected):
        return False
    return torch.equal(_signs(actual), _signs(expected))


def _signs(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.isnan(), False, torch.signbit(tensor))


def _same_values(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


def _near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    finite = expected.isfinite()
    if not _same_values(actual[~finite], expected[~finite]):
        return False
    return _error(actual, expected) <= TOLERANCE


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    finite = expected.isfinite()
    actual, expected = actual[finite].double(), expected[finite].double()
    if not expected.numel():
        return 0.0
    scale = max(float(expected.abs().max()), SMALLEST_SCALE)
    error = float((actual - expected).abs().max()) / scale
    # max() of a NaN is NaN, which compares as smaller: a NaN out of nothing is no agreement.
    return error if error == error else float("inf")


def _rounds_nothing(model: nn.Module, inputs: Inputs, reference: Outcome) -> bool:
    """Whether float32 gives the same values as float64: then no operation rounded."""
    narrow = pytree.tree_map(_narrow, inputs)
    pairs = zip(pytree.tree_leaves(narrow), pytree.tree_leaves(inputs), strict=True)
    tensors = [(a, b) for a, b in pairs if isinstance(b, torch.Tensor)]
    if not all(_same_values(one.to(other.dtype), other) for one, other in tensors):
        return False
    observed = observe(copy.deepcopy(model).float(), narrow)
    found, wanted = observed.tensors(), reference.tensors()
    return all(map(_same_values, (tensor.double() for tensor in found), wanted))


def _narrow(value: Any) -> Any:
    is_wide = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if is_wide else value


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _identity(model: nn.Module) -> list[object]:
    modules: list[object] = [
        (name, id(module), type(module), module.training, *map(tuple, _hooks(module)))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return modules + [(name, id(t), t.requires_grad, t.data_ptr()) for name, t in named]


def _hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    yield module._forward_hooks
    yield module._forward_pre_hooks
    yield module._backward_hooks
