"""What `optimize` returns at level 2: the portable module, and beside it what was lowered.

A call with sizes, strides and dtypes that were lowered runs the program that was chosen for them;
any other runs the portable code. What was chosen travels with copies and pickles, the packed
weights do not: they are packed again at the first such call. The weights are constants:
`load_state_dict`, `refit` and `to` change them and forget what was packed; nothing else may.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from optimizer.core.context import release_freed_memory, undisturbed
from optimizer.core.errors import CaptureError, InputError, Refused, require
from optimizer.core.inputs import Call, ExampleInputs, as_call, require_seconds, tensors_in
from optimizer.core.node import tensors_of
from optimizer.core.report import Choice
from optimizer.facts.facts import obstacle
from optimizer.frontend.module import OptimizedModule, Prepared
from optimizer.frontend.symbolic import capture_call
from optimizer.lowering.candidates import require_one_device
from optimizer.lowering.choose import Chooser, Times, Tuning
from optimizer.lowering.plan import Key, Plan, make_plan, repeats, signature_of
from optimizer.lowering.trace import straight_line
from optimizer.verify.equivalence import Answer, Difference, compare_answers

Judge = Callable[[Answer], Difference | None]


class LoweredModule(Prepared, OptimizedModule):
    """An optimized model that runs calls like the example's on fused kernels of their device.

    Those calls return tensors that carry no gradient, and run no hooks of its submodules; a call
    with an input that requires a gradient runs the portable code, as does any other call, and any
    while there are hooks of all modules, which see those that the portable code calls.
    """

    _prepared_plans: Any = None  # of an instance; a name that no layer of a model gets

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        super().requires_grad_(False)  # so that no training step reaches them by accident

    def lower(
        self, example_inputs: ExampleInputs, *, tune_seconds: float = 1.0
    ) -> tuple[Choice, ...]:
        """Prepare for calls like this one too; return what was chosen for each region.

        Args:
            example_inputs: a tensor, a tuple of positional, or a mapping of keyword arguments.
            tune_seconds: how long candidates are timed; with 0, engines or kernels are taken.

        Raises:
            InputError: such a call can only run the portable code; the message says why.
        """
        call = as_call(example_inputs)
        try:  # at other sizes, a BatchNorm may train, or a copy be a view
            with undisturbed():
                reason = obstacle(capture_call(self, call).graph)
        except CaptureError as error:  # what was put into it since
            reason = str(error)
        tuning = self.meta["tuning"]._replace(tune_seconds=require_seconds(tune_seconds))
        return self.prepare(call, Chooser(tuning), reason).choices

    def prepare(
        self, call: Call, chooser: Chooser, obstacle: str = "", judge: Judge = lambda *_: None
    ) -> Plan:
        """Make a plan for calls like this one, if there is no `obstacle`, or raise InputError.

        `judge` says what is wrong with its answer.
        """
        plans = self._prepared_plans  # of the weights that it packs: others may be loaded meanwhile
        try:
            require(not obstacle, obstacle)
            signature: Any = signature_of(*call, self.training)
            require(signature is not None, "pass plain tensors, without autocast")
            key, tensors = signature
            require_one_device([*tensors, *tensors_of(self)])
            with torch.inference_mode(False), torch.no_grad():  # what is kept is written later
                line = straight_line(self.run_portable, tensors_of(self), call)
                plan, copied = make_plan(line, chooser), call.copied()
                times, inputs = Times((call.copied(),)), tuple(tensors_in(copied))
                outputs = times.call("plan", plan.run, inputs)
                if plan.precision is None:  # else it was held to its budget
                    given, actual = Call(line.inputs, {}), Answer(outputs, (inputs, {}))
                    differs = compare_answers(line.module, given, line.answer, actual, exact=False)
                    differs = differs or judge(Answer(plan.rebuild(outputs), tuple(copied)))
                    require(differs is None, f"its answer differs ({differs})")
                if self.meta.get("lowered", {}).get(key) is None:
                    find: Any = partial(signature_of, training=self.training)
                    portable = lambda call: self.run_portable(*call.args, **call.kwargs)  # noqa: E731
                    runs = {"plan": lambda call: plan(find(*call)[1]), "portable": portable}
                    plan.require_worth_it(runs, times, chooser)
        except Refused as error:
            raise InputError(f"such a call is not lowered: {error}.") from error
        finally:
            release_freed_memory()
        plans[key] = plan
        decisions = {choice.key: choice.chosen for choice in plan.choices}
        self.meta["lowered"] = {**self.meta.get("lowered", {}), key: decisions}
        return plan

    def run_portable(self, *args: Any, **kwargs: Any) -> Any:
        """Call the portable code, whatever was lowered."""
        return type(self).forward.__wrapped__(self, *args, **kwargs)  # type: ignore[attr-defined]

    def plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """Return what runs a call instead of the portable code; None if nothing does."""
        if not self.meta.get("lowered"):
            return None
        plans = self._prepared_plans
        repeated, training, latest = plans.latest
        if training is self.training and not kwargs and repeated(args):
            return partial(latest, args)
        if (signature := signature_of(args, kwargs, self.training)) is None:
            return None
        key, tensors = signature
        plan: Plan | None = plans.get(key)
        if plan is None:
            lowered = self.meta["lowered"]
            elsewhere = any(each.what == key.what for each in lowered)
            decisions = lowered.get(key, {} if elsewhere else None)
            if decisions is not None:
                plan = self._prepare_here(key, Call(args, kwargs), decisions)
        if plan is None or not plan.takes(tensors):
            return None
        if all(type(each) is torch.Tensor for each in args) and not plan.is_open:
            plans.latest = repeats(args), self.training, plan
        return partial(plan, tensors)

    def _prepare_here(self, key: Key, call: Call, decisions: Mapping[str, str]) -> Plan | None:
        """Pack the weights for what was decided; choose anew on a device where nothing was."""
        plans = self._prepared_plans
        if not plans.lock.acquire(blocking=False):
            return None  # another thread does
        tuning: Tuning = self.meta["tuning"]
        tuning = tuning._replace(tune_seconds=0) if decisions else tuning
        try:
            return self.prepare(call, Chooser(tuning, decisions))
        except Exception as error:  # whatever a backend raises
            self.meta["lowered"] = {**self.meta["lowered"], key: None}
            remarks = (*self.report.remarks, f"on {key.devices[0]}: {str(error).rstrip('.')}")
            self.meta["report"] = replace(self.report, remarks=remarks)
            return None
        finally:
            plans.lock.release()

    def _forget(self) -> None:
        self.__dict__["_prepared_plans"] = _Plans()

    def recompile(self) -> Any:
        """Generate the code again; what was lowered of other code is forgotten."""
        before = self.__dict__.get("_code")
        code = super().recompile()
        if code.src != before:
            self._forget()
            self.__dict__.get("meta", {}).pop("lowered", None)
        portable = type(self).forward

        @wraps(portable)
        def forward(self: LoweredModule, *args: Any, **kwargs: Any) -> Any:
            plan = self.plan_for(args, kwargs)
            return portable(self, *args, **kwargs) if plan is None else plan()

        type(self).forward = forward
        return code


class _Plans(dict[Hashable, Plan]):
    """Plans by signature. One thread prepares while others run the portable code."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.latest: tuple[Any, ...] = None, None, None  # what repeats that call, its mode and plan

    def __deepcopy__(self, memo: Any) -> _Plans:
        return _Plans()  # a copy has other weights


def lower(
    module: LoweredModule, call: Call | None, obstacle: str, tuning: Tuning, judge: Judge
) -> str:
    """Lower a call of a module, unless there is an obstacle; return what to remark, if anything."""
    module.meta["tuning"] = tuning
    if call is None:
        return "not lowered: there are no example inputs"
    chooser = Chooser(tuning)
    try:
        plan = module.prepare(call, chooser, obstacle, judge)
    except InputError as error:
        module.meta["report"] = replace(module.report, tried=tuple(chooser.choices))
        return str(error).rstrip(".")
    module.meta["report"] = replace(module.report, choices=plan.choices)
    if plan.precision is None:
        return "" if plan.choices else "calls like the example run as a straight line of operators"
    return (
        f"calls like the example run in {plan.precision.name}, with a relative error of"
        f" {plan.error:.2g} seen and {plan.precision.budget:.2g} allowed; other calls in the"
        " model's own precision"
    )
