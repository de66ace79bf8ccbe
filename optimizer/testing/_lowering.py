"""Level 2 as the subject of the fuzz: a call that was lowered, and what must not be chosen for it.

Nothing is timed: whatever is found right counts as faster. Every region gets a candidate that
makes new tensors, as a fused kernel does, and others that are wrong, which only their verification
can keep out. Fused kernels have tests of their own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import fx, nn

import optimizer
from optimizer.core.device import Program
from optimizer.core.inputs import tensors_in
from optimizer.lowering import candidates as _candidates
from optimizer.lowering import choose as _choose
from optimizer.lowering.candidates import Maker, Policy


def _greedy(region: fx.GraphModule, _: Sequence[torch.Tensor]) -> Program:
    def run(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = region(*given)
        for each in given:
            each.zero_()
        return outputs

    return run


# What a kernel may do besides.
_KERNELS: dict[str, Maker] = {
    "new": lambda region, _: lambda *given: [each.clone() for each in region(*given)],
    "wrong": lambda region, _: lambda *given: [3 * each + 1 for each in region(*given)],
    "greedy": _greedy,
}


def _spoilt(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[str]:
    # If one overwrites them, and if one adds to what they lead to: infinity + 1 is the same.
    seen = all(each.numel() and each.any() and each.isfinite().all() for each in inputs)
    return list(_KERNELS) if seen else ["new"]


def _last_wins(
    self: _choose.Times, programs: Mapping[str, Any], *rest: Any, **more: Any
) -> dict[str, float]:
    assert programs.keys().isdisjoint({"wrong", "greedy"}), "a broken kernel was not rejected"
    if "plan" in programs:
        return {"plan": 0.0, "portable": 1.0}
    return {name: -float(place) for place, name in enumerate(programs)}


@dataclass(frozen=True)
class Lower:
    """`optimizer.optimize` at level 2 without passes."""

    preamble: ClassVar[str] = "from optimizer.testing._lowering import Lower"
    call: ClassVar[str] = "Lower()(model, inputs)"

    def __call__(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
        with _spoiling():
            return optimizer.optimize(model, inputs, level=2, only=(), check=None)


@contextmanager
def _spoiling() -> Iterator[None]:
    with (
        patch.object(_choose.Times, "race", _last_wins),
        patch.object(_choose, "policy_of", lambda inputs: Policy(_spoilt)),
        patch.dict(_candidates.CANDIDATES, _KERNELS),
    ):
        yield


class LoweringAll(nn.Module):
    """A module of level 2 that prepares for every call, of any sizes and layout, before it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        with suppress(optimizer.InputError), _spoiling():
            if not named:  # else it is differentiated, by the portable code
                self.module.lower(inputs)
        return self.module(*inputs, **named)


def assert_follows_its_weights(candidate: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """What was lowered takes a checkpoint of its own.

    Raises:
        AssertionError: it does not.
    """
    if not getattr(candidate, "meta", {}).get("lowered"):
        return
    candidate = copy.deepcopy(candidate)
    candidate.load_state_dict(
        {name: _doubled(each) for name, each in candidate.state_dict().items()}
    )
    with torch.no_grad():
        _assert_portable(candidate, inputs)


def assert_loses_no_nan(candidate: Any, inputs: Sequence[torch.Tensor]) -> None:
    """What was lowered has NaN where the portable code has it, for a NaN or infinity in any input.

    Raises:
        AssertionError: it has not.
    """
    for place, value in product(range(len(inputs)), (math.nan, math.inf)):
        if inputs[place].is_floating_point() and inputs[place].numel():
            given = [each.clone() for each in inputs]
            given[place][(-1,) * given[place].dim()] = value
            copies = [each.clone() for each in given]
            with torch.no_grad():
                outputs = candidate.run_portable(*given), candidate(*copies)
            for one, other in zip(*map(tensors_in, outputs), strict=True):
                assert torch.equal(one.isnan(), other.isnan()), f"{value} in input {place} is lost"


def _assert_portable(candidate: Any, inputs: Sequence[torch.Tensor]) -> None:
    calls = candidate.run_portable, candidate  # each may write what it is given
    expected, actual = (tensors_in(call(*copy.deepcopy(inputs))) for call in calls)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9, equal_nan=True)


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2 if tensor.is_floating_point() else tensor
