"""A call that was lowered: for inputs of the sizes, strides and dtypes of one example only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from optimizer.core.inputs import Call
from optimizer.core.node import tensors_of
from optimizer.core.report import Choice
from optimizer.lowering.candidates import AS_IT_IS
from optimizer.lowering.choose import Chooser, Times, by_region, key_of, varied
from optimizer.lowering.precision import Precision, in_precision
from optimizer.lowering.program import LaidOut, as_function
from optimizer.lowering.trace import StraightLine, require, straight_line
from optimizer.verify.equivalence import Answer, compare_answers, relative_error

_FINDING = 1e-3  # seconds that it takes to find a plan, at most
_CLEARLY = 0.1  # of a call's time, at least


class Plan:
    """What runs instead of a module's own code for calls of one signature.

    Attributes:
        choices: which program runs each region.
        precision: that of its products, where it is not the module's own.
        error: the largest that was seen, relative to the largest value of an output.
        saves: the seconds of a call that its regions were seen to save.

    Raises:
        NotStraightLineError: the code that was chosen gives another answer.
    """

    def __init__(
        self, line: StraightLine, chooser: Chooser, precision: Precision | None = None
    ) -> None:
        self.rebuild = line.rebuild
        self.precision, self.error = precision, 0.0
        module, others = line.module, list(map(varied, line.inputs))
        if precision:
            module = in_precision(line.module, (line.inputs, others), precision.dtype)
        start = len(chooser.choices)
        with torch.no_grad():
            program, outputs = by_region(module, line.inputs, chooser)
            laid_out = LaidOut(program, line.outputs)
            self.program = chooser.for_call(laid_out, module, line.inputs)
            self.run = as_function(self.program)
            if self.program is not laid_out:
                outputs = self.program(*line.inputs)
            self._require_same(line, line.inputs, line.outputs, outputs)
            if precision:
                self._require_same(line, others, line.module(*others), self.program(*others))
        self.choices: tuple[Choice, ...] = tuple(chooser.choices[start:])
        self.saves = 0.0 if precision else _saved(self.choices)

    def _require_same(
        self,
        line: StraightLine,
        inputs: Sequence[torch.Tensor],
        expected: Sequence[torch.Tensor],
        actual: Sequence[torch.Tensor],
    ) -> None:
        if self.precision is None:
            before, after = (Answer(tuple(each), ()) for each in (expected, actual))
            call = Call(tuple(inputs), {})
            found = compare_answers(line.module, call, before, after, exact=False)
            require(found is None, f"its answer differs ({found})")
            return
        self.error = max(self.error, *map(relative_error, expected, actual))
        bound = self.precision.budget
        require(self.error <= bound, f"its answer is off by {self.error:.2g}, over {bound:.2g}")

    def require_worth_it(
        self, runs: Mapping[str, Callable[..., Any]], times: Times, chooser: Chooser
    ) -> None:
        """Require that calls run faster by the plan; untimed, that something of it is lowered.

        `runs` makes a call by the "plan", with what it takes to find it, and by "portable" code.
        `times` has one call by the plan: where its regions saved far more, that is enough.

        Raises:
            NotStraightLineError: it is not.
        """
        if not chooser.tunes:
            lowered = any(choice.chosen != AS_IT_IS for choice in self.choices)
            require(lowered, "no region of it can be")
        elif self.saves <= _CLEARLY * times.spent + _FINDING:
            slower = times.slower(runs, chooser.deadline)
            require(not slower, f"it is not faster so: {slower}")

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The output for the tensors of a call of this signature. It carries no gradient."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self(tensors)
        return self.rebuild(self.run(*tensors))


def _saved(choices: Sequence[Choice]) -> float:
    """Seconds, of all regions; one that is like another was timed with it."""
    seconds = {choice.key: choice.seconds for choice in choices if choice.seconds}
    timed = [(seconds[choice.key], choice.chosen) for choice in choices if choice.key in seconds]
    return sum(found[AS_IT_IS] - found[chosen] for found, chosen in timed)


def make_plan(
    module: nn.Module,
    run: Callable[..., Any],
    call: Call,
    chooser: Chooser,
    precision: Precision | None,
) -> Plan:
    """The plan for calls of `run`, the module's own code, like this one.

    Raises:
        NotStraightLineError: the call cannot be written down.
    """
    line = straight_line(run, tensors_of(module), call)
    if precision is None:
        return Plan(line, chooser)
    key, name = f"{precision.name} {key_of(line.module, line.inputs)}", precision.name
    plans = {
        AS_IT_IS: lambda _: Plan(line, chooser),
        name: lambda _: Plan(line, chooser, precision),
    }
    times = Times((line.inputs,))
    found = chooser.choose("its precision", key, plans, [name], [name], times)
    found.choices = (chooser.choices[-1], *found.choices)
    return found
