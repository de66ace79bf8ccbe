"""The package's own optimizer as the subject of the fuzz.

Generated tensors are smaller than what a pass takes trouble for, so here any size is worth it,
and whatever program of level 2 is right counts as faster.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import optimizer
from optimizer.lowering.candidates import AS_IT_IS
from optimizer.lowering.choose import Times
from optimizer.passes import fuse
from optimizer.rewrite.contract import Pass
from optimizer.testing._assemble import Spec
from optimizer.testing._check import check_spec, nothing_said_of_the_model
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
    """

    level: int = 1
    only: tuple[str | Pass, ...] | None = None
    engines: str | tuple[str, ...] = "auto"
    examples: bool = True

    def __call__(self, model: nn.Module, inputs: Inputs) -> nn.Module:
        names = ("level", "only", "engines")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        with warnings.catch_warnings(), _everything_pays():
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

    def guilty(self, spec: Spec, *, exact: bool, dtype: torch.dtype, later: bool) -> str:
        """The pass with which `spec` first goes wrong, adding one at a time; or the capture."""
        passes = self.only
        if passes is None:
            passes = tuple(each.name for each in optimizer.all_passes())
        for count in range(len(passes) + 1):
            part = replace(self, only=passes[:count])
            try:
                check_spec(spec, part, exact=exact, dtype=dtype, later=later)
            except AssertionError:
                return str(passes[count - 1]) if count else "none: capture alone is wrong"
        return "none alone: the passes together are wrong, or the failure does not repeat"


@contextmanager
def _everything_pays() -> Iterator[None]:
    kept = fuse.WORTHWHILE, Times.race
    fuse.WORTHWHILE, Times.race = 1, _won_by_what_is_new  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        fuse.WORTHWHILE, Times.race = kept  # type: ignore[method-assign]


def _won_by_what_is_new(
    times: Times, programs: Mapping[str, object], deadline: float, fewest: int = 1
) -> dict[str, float]:
    """The seconds that each program took, as it were."""
    return {name: float(name in (AS_IT_IS, "portable")) for name in programs}
