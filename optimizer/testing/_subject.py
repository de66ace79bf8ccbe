"""The package's own optimizer as the subject of the fuzz.

Generated tensors are smaller than what a pass takes trouble for, so here any size is worth it,
and nothing is timed: whatever program of level 2 is right counts as faster.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

import optimizer
from optimizer._optimize import Run
from optimizer.core.device import Program
from optimizer.core.inputs import tensors_in
from optimizer.lowering import candidates, choose
from optimizer.lowering.candidates import AS_IT_IS, Maker, Policy
from optimizer.passes import fuse
from optimizer.rewrite.contract import Pass
from optimizer.testing._assemble import Spec
from optimizer.testing._observe import Inputs
from optimizer.testing._report import importable


@dataclass(frozen=True)
class Optimize:
    """`optimizer.optimize` with its own check off: the oracle is the judge.

    Attributes:
        level: as for `optimize`.
        only: as for `optimize`, names or passes; None for every pass of the level.
        engines: as for `optimize`.
        examples: whether it is given the inputs as examples.
        spoilt: whether every region gets, in the place of what the device has, a candidate that
            makes new tensors, as a fused kernel does, and others that are wrong, which only their
            verification can keep out. Fused kernels have tests of their own.
        dynamo: whether it may record what stand-ins do not, which takes a second.
    """

    level: int = 1
    only: tuple[str | Pass, ...] | None = None
    engines: str | tuple[str, ...] = "auto"
    examples: bool = True
    spoilt: bool = False
    dynamo: bool = True

    def __call__(self, model: nn.Module, inputs: Inputs) -> nn.Module:
        names = ("level", "only", "engines")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        with warnings.catch_warnings(), _everything_pays(spoilt=self.spoilt, dynamo=self.dynamo):
            warnings.simplefilter("error")  # a pass that raises costs a user nothing but a warning
            nothing_said_of_the_model()
            given = inputs if self.examples else None
            return optimizer.optimize(model, given, check=None, **options)

    def on(self, spec: Spec) -> Optimize:
        """Return the same, at level 1 without examples for a quarter of all specs: by defaults."""
        needed = self.level > 1 or "optional_given" in spec.tokens
        return replace(self, examples=needed or spec.seed % 4 != 3)

    @property
    def preamble(self) -> str:
        """The imports that `call` needs."""
        own = [each for each in self.only or () if isinstance(each, Pass)]
        imports = [f"from {importable(each.apply.__module__)} import {each.name}" for each in own]
        return "\n".join([*imports, "from optimizer.testing import Optimize"])

    @property
    def call(self) -> str:
        """The expression that a test writes for this."""
        return f"{self}(model, inputs)"

    def unchanged(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
        """The graph before any pass, in which nodes have the names that they keep."""
        return replace(self, level=0, only=())(model, inputs)

    def parts(self) -> Iterator[tuple[str, Optimize]]:
        """The capture alone, then with one pass more at a time, each by the name of the last."""
        passes = self.only
        if passes is None:
            passes = tuple(each.name for each in optimizer.all_passes())
        yield "none: capture alone is wrong", replace(self, only=())
        for count, each in enumerate(passes, 1):
            yield str(each), replace(self, only=passes[:count])


def nothing_said_of_the_model() -> None:
    """Ignore warnings about what some words do, whatever filters there are."""
    # A model in training mode; an RMSNorm in float32, after a layer in bfloat16 under autocast.
    for said in ("the model is in training mode", "Mismatch dtype between input and weight"):
        warnings.filterwarnings("ignore", said)


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


def _won_by_what_is_new(
    times: choose.Times, programs: Mapping[str, object], *rest: Any, **more: Any
) -> dict[str, float]:
    """The seconds that each program took, as it were."""
    assert programs.keys().isdisjoint({"wrong", "greedy"}), "a broken kernel was not rejected"
    return {name: float(name in (AS_IT_IS, "portable")) for name in programs}


@contextmanager
def _everything_pays(*, spoilt: bool, dynamo: bool = True) -> Iterator[None]:
    patches: list[AbstractContextManager[Any]] = [
        patch.object(fuse, "WORTHWHILE", 1),
        patch.object(choose.Times, "race", _won_by_what_is_new),
    ]
    patches += [patch.object(Run, "_by_dynamo", lambda _, reason: reason)] * (not dynamo)
    if spoilt:
        patches.append(patch.object(choose, "policy_of", lambda inputs: Policy(_spoilt)))
        patches.append(patch.dict(candidates.CANDIDATES, _KERNELS))
    with ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


class LoweringAll(nn.Module):
    """A module of level 2 that prepares for every call, of any sizes and layout, before it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        with suppress(optimizer.InputError), _everything_pays(spoilt=True):
            if not named:  # else it is differentiated, by the portable code
                self.module.lower(inputs)
        return self.module(*inputs, **named)


def assert_follows_its_weights(candidate: Any, inputs: Sequence[torch.Tensor]) -> None:
    """What was lowered takes a checkpoint of its own.

    Raises:
        AssertionError: it does not.
    """
    if not getattr(candidate, "meta", {}).get("lowered"):
        return
    candidate = copy.deepcopy(candidate)
    candidate.load_state_dict({name: 2 * each for name, each in candidate.state_dict().items()})
    with torch.no_grad():
        calls = candidate.run_portable, candidate  # each may write what it is given
        expected, actual = (tensors_in(call(*copy.deepcopy(inputs))) for call in calls)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


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
