"""What a caller allows level 2 to do, and the file that its decisions are kept in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from optimizer.core.errors import InputError
from optimizer.core.inputs import require_flags, require_seconds, require_writable
from optimizer.lowering.engines import Engines, engines_named, passed_over
from optimizer.lowering.precision import Precision
from optimizer.rewrite.contract import LOWERED, REDUCED

Decisions: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class Tuning:
    """How candidates are chosen.

    Attributes:
        seconds: how long they are timed; 0 times none.
        path: a file of earlier decisions, which are not timed again; new ones are added to it.
        precision: of matrix products and convolutions, where it is not to be the model's own.
        cuda_graph: whether a whole call may be one.
        engines: the names of those that may run a region on the CPU.
        passed_over: why another that is installed may not.
    """

    seconds: float = 1.0
    path: Path | None = None
    precision: Precision | None = None
    cuda_graph: bool = True
    engines: tuple[str, ...] = ()
    passed_over: str = ""

    @classmethod
    def of(
        cls,
        level: int,
        seconds: float = 1.0,
        path: str | os.PathLike[str] | None = None,
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
        file = None if path is None else require_writable("decisions", path)
        seconds, named = require_seconds(seconds), engines_named(engines)
        offered = named if level >= LOWERED else ()
        tuning = cls(seconds, file, reduced, cuda_graph, offered, passed_over(engines))
        tuning.known()
        return tuning

    def options(self) -> dict[str, Any]:
        """What `optimize` is to be told to make the same of other weights."""
        precision = self.precision
        return {
            "precision": precision and precision.name,
            "error_budget": precision and precision.budget,
            "cuda_graph": self.cuda_graph,
            "engines": self.engines,
        }

    def known(self) -> Decisions:
        """The decisions in the file; none if there is no file yet.

        Raises:
            InputError: the file holds something else.
        """
        if self.path is None or not self.path.exists():
            return {}
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"decisions={str(self.path)!r} cannot be read: {error}.") from error
        if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
            raise InputError(f"decisions={str(self.path)!r} holds no decisions: name another file.")
        return found

    def keep(self, decisions: Decisions) -> None:
        """Add decisions to the file, which is whole at every moment."""
        if self.path is None:
            return
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        beside.write_text(json.dumps({**self.known(), **decisions}, indent=1, sort_keys=True))
        beside.replace(self.path)
