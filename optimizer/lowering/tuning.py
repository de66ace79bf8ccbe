"""Level 2: lower the example's call, and keep that only where it is right and measured to pay."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from optimizer.core.errors import InputError
from optimizer.core.inputs import Call, require_flags, require_seconds, require_writable
from optimizer.lowering.autotune import Chooser
from optimizer.lowering.engines import Engines, engines_named, passed_over
from optimizer.lowering.module import Decisions, LoweredModule
from optimizer.lowering.precision import Precision
from optimizer.rewrite.contract import REDUCED
from optimizer.verify.equivalence import Answer, Difference, largest_error


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
        seconds, offered = require_seconds(seconds), engines_named(engines)
        tuning = cls(seconds, file, reduced, cuda_graph, offered, passed_over(engines))
        tuning.known()
        return tuning

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


def lower(
    module: LoweredModule,
    call: Call | None,
    obstacle: str,
    tuning: Tuning,
    expected: Answer | None,
    difference: Callable[[Answer], Difference | None],
) -> str:
    """Lower a call of a module; return what to remark of it, if anything.

    `obstacle` is why it cannot be, if anything; `expected` is the model's answer, and `difference`
    what is wrong with one of the same precision.
    """
    module.meta |= {"precision": tuning.precision, "tune_seconds": tuning.seconds}
    module.meta |= {"cuda_graph": tuning.cuda_graph, "engines": tuning.engines}
    if call is None:
        return "not lowered: there are no example inputs"
    if obstacle:
        return f"such a call is not lowered: {obstacle}"
    judge = functools.partial(_judged, expected, difference)
    chooser = Chooser(tuning.seconds, tuning.known(), tuning.engines)
    try:
        plan = module.prepare(call, chooser, judge)
    except InputError as error:
        module.meta["report"] = replace(module.report, tried=tuple(chooser.choices))
        return str(error).rstrip(".")
    module.meta["report"] = replace(module.report, choices=plan.choices)
    try:
        tuning.keep({choice.key: choice.chosen for choice in plan.choices})
    except (InputError, OSError) as error:  # what became of the file meanwhile
        return f"its decisions were not kept: {error}"
    return _in_precision(plan.precision, plan.error) if plan.precision else ""


def _in_precision(precision: Precision, error: float) -> str:
    return (
        f"calls like the example run in {precision.name}, with a relative error of {error:.2g}"
        f" seen and {precision.budget:.2g} allowed; other calls in the model's own precision"
    )


def _judged(
    expected: Answer | None,
    difference: Callable[[Answer], Difference | None],
    precision: Precision | None,
    actual: Answer,
) -> Difference | None:
    if precision is None:
        return difference(actual)
    if expected is None:
        return None
    error = largest_error(Answer(expected.output, ()), actual)
    reason = f"relative error {error:.2g}, more than {precision.budget:.2g}"
    return Difference("output", error, reason) if error > precision.budget else None
