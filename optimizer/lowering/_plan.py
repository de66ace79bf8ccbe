"""A call that was lowered: for inputs of the sizes, strides and dtypes of one example only."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from optimizer._check import Answer, Difference, compare_answers, relative_error
from optimizer._inputs import Call
from optimizer._report import Choice
from optimizer.lowering._allocator import keep_freed_memory
from optimizer.lowering._by_region import by_region
from optimizer.lowering._candidates import ONLY_FINITE, varied
from optimizer.lowering._choose import WORTH_IT, Chooser
from optimizer.lowering._function import as_function
from optimizer.lowering._key import key_of
from optimizer.lowering._laid_out import LaidOut
from optimizer.lowering._policies import AS_IT_IS
from optimizer.lowering._precision import Precision, in_precision
from optimizer.lowering._straight_line import NotStraightLineError, StraightLine, straight_line
from optimizer.lowering._times import Times

_FINDING = 1e-3  # seconds that it takes to find a plan, at most
_CLEARLY = 0.1  # of a call's time, at least
Judge = Callable[[Precision | None, Answer], Difference | None]


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
        self,
        weights: Weights,
        line: StraightLine,
        chooser: Chooser,
        precision: Precision | None = None,
    ) -> None:
        self.weights, self.rebuild = weights, line.rebuild
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
        self.only_finite = any(choice.chosen in ONLY_FINITE for choice in self.choices)
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
            _require(found is None, f"its answer differs ({found})")
            return
        self.error = max(self.error, *map(relative_error, expected, actual))
        bound = self.precision.budget
        _require(self.error <= bound, f"its answer is off by {self.error:.2g}, over {bound:.2g}")

    def require_right(self, output: Any, judge: Judge) -> None:
        """Require that nothing is wrong with the output of a call by the plan.

        Raises:
            NotStraightLineError: something is.
        """
        found = judge(self.precision, Answer(output, ()))
        _require(found is None, f"its answer differs ({found})")

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
            return _require(lowered, "no region of it can be")
        if self.saves > _CLEARLY * times.spent + _FINDING:
            return None
        seconds = chooser.race(runs, times, fewest=1)
        return _require(seconds["plan"] <= WORTH_IT * seconds["portable"], "it is not faster so")

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it gives the model's answer also for these values."""
        return not self.only_finite or all(map(_is_finite, tensors))

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
    weights = Weights(module)
    line = straight_line(run, weights.tensors(), call)
    keep_freed_memory(line.taken)
    make = functools.partial(Plan, weights, line, chooser)
    if precision is None:
        return make()
    key = f"{precision.name} {key_of(line.module, line.inputs)}"
    makers: dict[str, Callable[[], Plan | str]] = {AS_IT_IS: make}
    makers |= {precision.name: functools.partial(_or_why_not, make, precision)}
    found = chooser.pick("its precision", key, makers, precision.name, Times((line.inputs,)))
    found.choices = (chooser.choices[-1], *found.choices)
    return found


def _or_why_not(make: Callable[..., Plan], precision: Precision) -> Plan | str:
    try:
        return make(precision)
    except NotStraightLineError as error:
        return str(error)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotStraightLineError(reason)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether there is no NaN or infinity. A sum that overflows counts as one."""
    return not tensor.is_floating_point() or math.isfinite(tensor.sum().item())


class Weights:
    """The weights of a module as they are now, and whether they still are.

    Each call asks. After a forward they are far from the processor, so that it looks at as few
    as will do, and in loops of C.
    """

    def __init__(self, module: nn.Module) -> None:
        held = list(_held(module))
        self.holders = [holder for holder, _, _ in held]
        self.names = [name for _, name, _ in held]
        self.values = [value for _, _, value in held]
        self.seen = [value for value in self.values if isinstance(value, torch.Tensor)]
        # Of one made in inference mode, nobody knows how often it was written.
        self.counted = [tensor for tensor in self.seen if not tensor.is_inference()]
        self.versions = self._versions()
        self.addresses = self._addresses()

    def tensors(self) -> list[torch.Tensor]:
        """All parameters and buffers."""
        return self.seen

    def are_current(self) -> bool:
        """Whether nobody replaced, moved or wrote one, or put another module in its place."""
        found = map(_GET, self.holders, self.names)
        return (
            all(map(operator.is_, found, self.values))
            and self._versions() == self.versions
            and self._addresses() == self.addresses
        )

    def _versions(self) -> list[int]:
        return list(map(_VERSION, self.counted))

    def _addresses(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self.seen))


_GET: Callable[[dict[str, Any], str], Any] = dict.get
_VERSION: Callable[[torch.Tensor], int] = vars(torch._C.TensorBase)["_version"].__get__


def _held(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Where a module keeps its parameters, buffers and submodules, and what is there."""
    for part in module.modules():
        for kind in ("_parameters", "_buffers", "_modules"):
            held = {name: each for name, each in vars(part)[kind].items() if each is not None}
            if held:
                yield vars(part), kind, vars(part)[kind]
            yield from ((vars(part)[kind], name, value) for name, value in held.items())
