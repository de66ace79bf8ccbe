"""What a rewrite relied on, checked at the start of each call of the optimized model.

A fact that was read off the example inputs (a rank, a dtype, a flag that chose a branch) is
no law for later calls. Where an optimized model rests on one, its graph begins with a call
of a function from this file, so that another kind of input is an error and never a wrong
answer. Each dispatches through `__torch_function__`, so that tracers record it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from optimizer._errors import InputError


def expect_value(value: Any, expected: object, name: str) -> None:
    """Require the argument that the model's branches were chosen by.

    Raises:
        InputError: `value` is not what the model was optimized with.
    """
    if has_torch_function((value,)):
        handle_torch_function(expect_value, (value,), value, expected, name)
        return
    if value is not expected and value != expected:
        raise InputError(
            f"this model was optimized for {name}={expected!r}: optimize it again with example"
            f" inputs that pass the {name} you need."
        )


def expect_rank(value: torch.Tensor, rank: int, name: str) -> None:
    """Require the number of dimensions that a rewrite was proved for.

    Raises:
        InputError: `value` has another number of dimensions.
    """
    if has_torch_function((value,)):
        handle_torch_function(expect_rank, (value,), value, rank, name)
        return
    if value.dim() != rank:
        raise InputError(
            f"this model was optimized for {name} of {rank} dimensions and got {value.dim()}:"
            " optimize it again with example inputs of that rank."
        )


def expect_dtype(value: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Require the dtype that a rewrite was proved for.

    Raises:
        InputError: `value` has another dtype.
    """
    if has_torch_function((value,)):
        handle_torch_function(expect_dtype, (value,), value, dtype, name)
        return
    if value.dtype != dtype:
        raise InputError(
            f"this model was optimized for {name} of {dtype} and got {value.dtype}:"
            " optimize it again with example inputs of that dtype."
        )


GUARDS = (expect_value, expect_rank, expect_dtype)
