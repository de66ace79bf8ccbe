"""The oracles: what it means that a candidate computes what a model computes.

Both run in eager on clones of the inputs. What is compared is all that a caller can observe: the
outputs, the inputs and buffers afterwards, what shares memory with what, and the random state.
Values are compared where eager rounds nothing, which it proves itself by giving the same in float32
and float64; elsewhere the error against the largest value, in float64, must be below 1e-9. (A
correct BatchNorm fold stays below 2e-13 there; one that forgets eps is at 5e-7 or more.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._tensor_str import printoptions

from optimizer.testing._observe import (
    Inputs,
    Outcome,
    in_buffer,
    observe,
    same_bits,
    state_of,
    tensors_of,
)
from optimizer.testing._rounding import Same, error, judge


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
        inputs: positional arguments, or a mapping of keyword arguments, copied before each call.
            Float64 shows most: a narrower candidate may be as far from the truth as the model.
        exact: demand the same bits, the sign of zero included, whatever the data.

    Raises:
        AssertionError: they differ; the message names the first output, input or buffer that does.
    """
    assert_answers(observe(model, inputs), model, candidate, inputs, exact=exact)


def assert_answers(
    reference: Outcome,
    model: nn.Module,
    candidate: nn.Module,
    inputs: Inputs,
    *,
    exact: bool,
    layout: bool = True,
) -> None:
    """`assert_equivalent`, where `reference` is what `model` was seen to do on `inputs`.

    Without `layout`, how results lie in memory is not compared.
    """
    outcome = observe(candidate, inputs)
    assert outcome.structure == reference.structure, (
        f"output structure: expected {reference.structure}, got {outcome.structure}"
    )
    judged = cache(partial(judge, model, inputs, reference, exact=exact))

    def same(name: str) -> Same:
        return judged()(name)

    for name, expected in reference.values.items():
        if layout and isinstance(expected, torch.Tensor):
            _assert_same_layout(name, expected, outcome.values[name])
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
    requires_grad, hooks and what is kept in Python must be the same.
    """
    objects, values = _identity(model), [tensor.clone() for tensor in tensors_of(model)]
    kept = state_of(model)
    random_state = torch.get_rng_state()
    yield
    assert _identity(model) == objects, "the model's modules, modes, parameters or hooks changed"
    assert all(map(same_bits, tensors_of(model), values)), "a parameter or buffer was overwritten"
    assert torch.equal(torch.get_rng_state(), random_state), "the global random state changed"
    assert state_of(model) == kept, "what the model keeps in Python changed"


def _assert_same(name: str, expected: Any, actual: Any, judged: Callable[[str], Same]) -> None:
    if not isinstance(expected, torch.Tensor):
        assert type(actual) is type(expected), f"{name}: expected {expected!r}, got {actual!r}"
        assert actual == expected, f"{name}: expected {expected!r}, got {actual!r}"
        return
    assert isinstance(actual, torch.Tensor), f"{name}: expected a tensor, got {actual!r}"
    for attribute in ("shape", "dtype", "device"):
        wanted, got = getattr(expected, attribute), getattr(actual, attribute)
        assert got == wanted, f"{name}: expected {attribute} {wanted}, got {got}"
    if same_bits(actual, expected):
        return  # what there is to judge by takes more calls of the model
    same = judged(name)
    with printoptions(threshold=24, edgeitems=1):  # what is larger is told by its corners
        assert same(actual, expected), (
            f"{name}: values differ by {error(actual, expected):.3g} of the largest"
            f" ({same.__name__.replace('_', ' ')} was asked for)\n"
            f"expected {expected}\ngot      {actual}"
        )


def _assert_same_layout(name: str, expected: torch.Tensor, actual: Any) -> None:
    if isinstance(actual, torch.Tensor) and actual.shape == expected.shape:
        wanted, got = _layout(expected), _layout(actual)
        assert got == wanted, f"{name}: expected strides {wanted}, got {got}"


def _layout(tensor: torch.Tensor) -> list[int]:
    """The strides that say where an element lies."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return [stride for stride, size in sizes if size > 1 and tensor.numel()]


def _assert_same_buffers(reference: Outcome, outcome: Outcome, same: Callable[[str], Same]) -> None:
    """A buffer that the candidate still has, by name or in shared memory, ends the same.

    It must have those that the model writes. Where it holds the model, names are longer.
    """
    by_address = {address: value for address, value in outcome.buffers.values() if address}
    for name, (address, expected) in reference.buffers.items():
        held = (n for n in outcome.buffers if n == name or n.endswith(f".{name}"))
        found = outcome.buffers.get(min(held, key=len, default=""))
        actual = by_address.get(address) if found is None else found[1]
        assert actual is not None or name not in reference.written, f"buffer {name} is not written"
        if actual is not None and actual.shape == expected.shape:
            _assert_same_layout(in_buffer(name), expected, actual)
            _assert_same(in_buffer(name), expected, actual, same)


def _identity(model: nn.Module) -> list[object]:
    modules: list[object] = [
        (name, id(module), type(module), module.training, _hooks(module))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    address: Any = vars(torch._C)["_data_address"]  # leaves copies on write as they are
    return modules + [(name, id(t), t.requires_grad, address(t)) for name, t in named]


def _hooks(module: nn.Module) -> list[tuple[int, ...]]:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return [tuple(each) for each in kinds]
