"""What a caller allows level 2 to do."""

from __future__ import annotations

from typing import Any, NamedTuple

from optimizer.core.errors import InputError
from optimizer.core.inputs import require_flags, require_seconds
from optimizer.lowering.engines import Engines, engines_named, passed_over
from optimizer.lowering.precision import Precision
from optimizer.rewrite.contract import LOWERED, REDUCED


class Tuning(NamedTuple):
    """How candidates are chosen.

    Attributes:
        seconds: how long they are timed; 0 times none.
        precision: of matrix products and convolutions, where it is not to be the model's own.
        cuda_graph: whether a whole call may be one.
        engines: the names of those that may run a region on the CPU.
        passed_over: why another that is installed may not.
    """

    seconds: float = 1.0
    precision: Precision | None = None
    cuda_graph: bool = True
    engines: tuple[str, ...] = ()
    passed_over: str = ""

    @classmethod
    def of(
        cls,
        level: int,
        seconds: float = 1.0,
        precision: str | None = None,
        error_budget: float | None = None,
        cuda_graph: bool = True,
        engines: Engines = "auto",
    ) -> Tuning:
        """What a caller asks for.

        Raises:
            InputError: it cannot be used.
        """
        require_flags(cuda_graph=cuda_graph)
        reduced = Precision.of(precision, error_budget)
        if (reduced is None) is (level == REDUCED):
            raise InputError(
                "level=3 goes with precision='bf16', 'fp16' or 'int8', and each of these with"
                " level=3."
            )
        named = engines_named(engines) * (level >= LOWERED)
        return cls(require_seconds(seconds), reduced, cuda_graph, named, passed_over(engines))

    def options(self) -> dict[str, Any]:
        """What `optimize` is to be told to make the same of other weights."""
        return {
            "precision": self.precision and self.precision.name,
            "error_budget": self.precision and self.precision.budget,
            "cuda_graph": self.cuda_graph,
            "engines": self.engines,
        }
