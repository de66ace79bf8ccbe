"""What generated models are made of: each operation, its rank and dtype, and what reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

import torch
from torch import fx

from optimizer.core.errors import CaptureError
from optimizer.core.node import describe
from optimizer.frontend.symbolic import capture
from optimizer.testing._assemble import Spec
from optimizer.testing._strategies import SHAPES, models, on_each
from optimizer.testing._tokens import TOKENS

DTYPES = (torch.float64, torch.float32)
# An operation, and the rank, the dtype or the operation that it was met with.
Pair: TypeAlias = tuple[str, str]


@dataclass
class Coverage:
    """What the operations of models were met with: ranks and dtypes of operands, and readers."""

    ranks: set[Pair] = field(default_factory=set)
    dtypes: set[Pair] = field(default_factory=set)
    readers: set[Pair] = field(default_factory=set)

    def operations(self) -> set[str]:
        """All that were met."""
        return {operation for operation, _ in self.ranks}

    def add(self, spec: Spec, dtype: torch.dtype) -> None:
        """Take in one model, in the spelling that passes see; what is not captured they do not."""
        try:
            graph = capture(spec.build(dtype), spec.inputs(dtype)).graph
        except CaptureError:
            return
        for node, value in ((n, v) for n in graph.nodes for v in _operands(n)):
            operand: torch.Tensor = value.meta["fact"].value
            self.ranks.add((describe(node), str(operand.ndim)))
            self.dtypes.add((describe(node), str(operand.dtype).removeprefix("torch.")))
            if value.op.startswith("call_"):
                self.readers.add((describe(value), describe(node)))


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a call reads."""
    for each in node.all_input_nodes if node.op.startswith("call_") else ():
        if isinstance(getattr(each.meta.get("fact"), "value", None), torch.Tensor):
            yield each


def feasible() -> Coverage:
    """What each word meets where it stands alone, on a shape of each rank and in every dtype."""
    coverage, shapes = Coverage(), {len(shape): shape for shape in reversed(SHAPES)}
    for token, shape, dtype in product(TOKENS, shapes.values(), DTYPES):
        coverage.add(Spec((token,), shape), dtype)
    return coverage


def met(examples: int) -> Coverage:
    """What so many generated models meet, half of them in float32."""
    coverage = Coverage()

    @on_each(models(), examples)
    def add(spec: Spec) -> None:
        coverage.add(spec, DTYPES[spec.seed % len(DTYPES)])

    return coverage


def counts(possible: Coverage, seen: Coverage) -> dict[str, tuple[int, int]]:
    """How many of the operations, of their ranks, dtypes and readers were met, and of how many.

    A word alone has no reader: of those, all pairs of operations count as possible.
    """
    operations = possible.operations()
    return {
        "operations": (len(operations & seen.operations()), len(operations)),
        "ranks": (len(possible.ranks & seen.ranks), len(possible.ranks)),
        "dtypes": (len(possible.dtypes & seen.dtypes), len(possible.dtypes)),
        "readers": (len(seen.readers), len(operations | seen.operations()) ** 2),
    }


def listing(possible: Coverage, seen: Coverage) -> Iterator[str]:
    """The lines of a page: how much was met, and what never."""
    for name, (part, whole) in counts(possible, seen).items():
        yield f"{name}: {part} of {whole} ({part / whole:.1%})"
    read, all_met = {one for one, _ in seen.readers}, seen.operations()
    never = {
        "operations": possible.operations() - all_met,
        "ranks": {" of rank ".join(each) for each in possible.ranks - seen.ranks},
        "dtypes": {" of ".join(each) for each in possible.dtypes - seen.dtypes},
        "read by none": all_met - read,
    }
    for name, missing in never.items():
        yield f"never, {name}: {', '.join(sorted(missing)) or '-'}"
