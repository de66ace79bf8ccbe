"""What a rewrite relied on, checked at the start of each call of the optimized model.

A fact that was read off the example inputs (a rank, a dtype, a flag that chose a branch) is
no law for later calls. Where an optimized model rests on one, its graph begins with a call
of a function from this file, so that another kind of input is an error and never a wrong
answer. Each dispatches through `__torch_function__`, so that tracers record it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from optimizer.core.errors import InputError
from optimizer.core.inputs import is_record, opened
from optimizer.core.ops import Parameters, Result, recordable


def key_of(value: Any) -> Any:
    """Return a key, the same for two constants only if no function can tell them apart.

    Python says that 0.0 is -0.0, which x / 0.0 is not, that True is 1, and that nan is not nan.
    """
    if isinstance(value, float | complex):
        return type(value), struct.pack("dd", value.real, value.imag)
    if isinstance(value, list | tuple):
        return type(value), *map(key_of, value)
    if isinstance(value, dict):
        return type(value), *((key_of(name), key_of(each)) for name, each in value.items())
    if isinstance(value, slice):
        return slice, key_of((value.start, value.stop, value.step))
    return type(value), value


def _guard(check: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    return recordable(check, operands=1)


def _unfit(made_for: str, remedy: str) -> InputError:
    return InputError(f"this model was optimized for {made_for}: optimize it again {remedy}.")


@_guard
def expect_value(value: Any, expected: object, name: str) -> None:
    """Raise an InputError where `value` is not what the model's branches were chosen by."""
    if value is not expected and key_of(value) != key_of(expected):
        raise _unfit(f"{name}={expected!r}", f"with example inputs that pass the {name} you need")


@_guard
def expect_tensor(
    value: torch.Tensor, rank: int | None, dtype: torch.dtype | None, name: str
) -> None:
    """Raise an InputError for all but a tensor of the rank and dtype, if any, of the proofs."""
    if not isinstance(value, torch.Tensor):
        raise _unfit(f"a tensor {name} and got {value!r}", "with example inputs of that type")
    if rank is not None and value.dim() != rank:
        made_for = f"{name} of {rank} dimensions and got {value.dim()}"
        raise _unfit(made_for, "with example inputs of that rank")
    if dtype is not None and value.dtype != dtype:
        made_for = f"{name} of {dtype} and got {value.dtype}"
        raise _unfit(made_for, "with example inputs of that dtype")


@_guard
def expect_given(value: Any, name: str) -> None:
    """Raise an InputError where what is no tensor or number in `value` may choose a branch."""
    if any(chooses_a_branch(leaf) for leaf in tree_leaves(opened(value))):
        made_for = f"an argument {name} that holds no None, nor what else is no tensor or number"
        raise _unfit(made_for, "with example inputs that do")


@_guard
def expect_autocast(value: Any, dtypes: Autocast) -> None:
    """Raise an InputError under another autocast than recorded; `value` is any argument."""
    if (current := autocast()) != dtypes:
        made_for = f"calls under autocast to {dtypes} (cpu, cuda, mps) and got {current}"
        raise _unfit(made_for, "under the autocast you need")


Autocast: TypeAlias = tuple[torch.dtype | None, ...]


def autocast() -> Autocast:
    """Return what autocast makes of float32 on each kind of device, None where it is off."""
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda", "mps")
    )


def chooses_a_branch(value: Any) -> bool:
    """Return whether code may test a value unseen: `is` tells nothing of a number or a tensor."""
    seen = (torch.Tensor, int, float, complex, list, tuple, dict)
    return isinstance(value, bool) or not (isinstance(value, seen) or is_record(value))


GUARDS = (expect_value, expect_tensor, expect_given, expect_autocast)
