"""A call that was lowered, for the sizes, strides, dtypes, devices and settings of one example."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from optimizer.core.context import is_watched, sees_calls
from optimizer.core.errors import require
from optimizer.core.inputs import storages_in
from optimizer.facts.facts import outline
from optimizer.lowering.candidates import AS_IT_IS, policy_of
from optimizer.lowering.choose import Chooser, Runs, Times, region_key, varied
from optimizer.lowering.partition import as_function
from optimizer.lowering.precision import Precision, in_precision
from optimizer.lowering.trace import LITERALS, StraightLine
from optimizer.verify.equivalence import relative_error

_TensorGuards: Any = torch._C._dynamo.guards.TensorGuards  # stubs want sizes to be symbols


class Key(NamedTuple):
    """The properties of a call that a plan is for."""

    what: Hashable  # the module's mode, the structure of the arguments, each tensor's geometry
    devices: tuple[torch.device, ...]
    settings: Hashable  # what besides kernels are chosen by


def signature_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], training: bool = False
) -> tuple[Key, list[torch.Tensor]] | None:
    """Return the key of a call's plan, and its tensors; None for a call that must run as it is."""
    if is_watched():
        return None
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if type(leaf) is torch.Tensor]
    literals = sum(type(leaf) in LITERALS for leaf in leaves)
    strided = all(tensor.layout is torch.strided for tensor in tensors)
    if not strided or len(tensors) + literals < len(leaves):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    settings = policy_of(tensors).settings()
    if settings is False:
        return None
    what = (training, str(tree), *map(outline, leaves))
    return Key(what, tuple(tensor.device for tensor in tensors), settings), tensors


def repeats(args: tuple[torch.Tensor, ...]) -> Callable[[tuple[Any, ...]], bool]:
    """Return a function that tells whether later arguments have the signature of these tensors.

    Dynamo's guards compare it in C++: with cold caches, `signature_of` takes 0.15 ms.
    """
    sizes, strides = [[*arg.shape] for arg in args], [[*arg.stride()] for arg in args]
    guards = _TensorGuards(*args, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    settings, count = policy_of(args).settings, len(args)  # to name `args` below would keep them
    known = settings()
    return lambda given: (
        (not sees_calls() and len(given) == count)  # Dynamo records the first alone
        and (guards.check(*given) and settings() == known)
    )


_FINDING = 1e-3  # seconds that it takes to find a plan, at most
_WORTH_NO_RACE = 0.1  # of a call's time, at least


class Plan:
    """A program that runs instead of a module's code for calls of one signature."""

    precision: Precision | None  # that of its products, where it is not the module's own
    error: float  # the largest that was seen, relative to the largest value of an output

    def __init__(
        self, line: StraightLine, chooser: Chooser, precision: Precision | None = None
    ) -> None:
        self.rebuild, self.is_open = line.rebuild, line.is_open
        self.precision, self.error = precision, 0.0
        module, start = line.module, len(chooser.choices)
        calls = line.inputs, list(map(varied, line.inputs))
        if precision:
            aliased = any(node.meta.get("aliased") for node in module.graph.nodes)
            require(not aliased, "it writes what has other names")
            module = in_precision(module, calls, precision.dtype)
        self.program = chooser.for_call(module, line.inputs, line.is_open)
        self.run = as_function(self.program)
        self.choices = tuple(chooser.choices[start:])  # of the program that runs each region
        if precision:
            for inputs in calls:
                errors = map(relative_error, line.module(*inputs), self.run(*inputs))
                self.error = max(self.error, *errors)
            over = f"its answer is off by {self.error:.2g}, over {precision.budget:.2g}"
            require(self.error <= precision.budget, over)

    def require_worth_it(self, runs: Runs, times: Times, chooser: Chooser) -> None:
        """Require that calls run faster by the plan; untimed, that something of it is lowered.

        `runs` makes a call by the "plan", with what it takes to find it, and by "portable" code.
        `times` has one call by the plan: where its regions saved far more, that is enough.
        """
        if not chooser.tuning.tune_seconds:
            lowered = any(choice.chosen != AS_IT_IS for choice in self.choices)
            return require(lowered, "no region of it can be")
        # A region that is like another was timed with it.
        seconds = {each.key: each.seconds for each in self.choices if each.seconds}
        timed = [(seconds[c.key], c.chosen) for c in self.choices if c.key in seconds]
        saved = sum(times_of[AS_IT_IS] - times_of[chosen] for times_of, chosen in timed)
        if self.precision or saved <= _WORTH_NO_RACE * times.spent + _FINDING:
            slower = times.slower(runs, chooser.deadline)
            require(not slower, f"it is not faster so: {slower}")
        return None

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether it may run: no two inputs share memory, or it writes none."""
        return not self.is_open or len(storages_in(tensors)) == len(tensors)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the output for the tensors of a call of this signature. It carries no gradient."""
        return self.rebuild(self.run(*tensors))


def make_plan(line: StraightLine, chooser: Chooser) -> Plan:
    """Return the plan for calls like one that was recorded, in a lower precision if that pays."""
    if (precision := chooser.tuning.reduced) is None:
        return Plan(line, chooser)
    key, names = f"{precision.name} {region_key(line.module, line.inputs)}", [precision.name]
    makers: dict[str, Callable[[bool], Plan]] = {
        AS_IT_IS: lambda _: Plan(line, chooser),
        precision.name: lambda _: Plan(line, chooser, precision),
    }
    plan = chooser.choose("its precision", key, makers, names, names, Times((line.inputs,)))
    plan.choices = (chooser.choices[-1], *plan.choices)
    return plan
