"""`optimize`: capture, rewrite, check, and give back a module that is right in any case."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn

from optimizer.core.context import forked_rng, release_freed_memory, undisturbed
from optimizer.core.copy import held_tensors, snapshot
from optimizer.core.errors import CaptureError, InputError, OptimizerWarning, Refused
from optimizer.core.inputs import Call, ExampleInputs, as_call, require_module
from optimizer.core.report import Report, Size, listing
from optimizer.facts.facts import obstacle
from optimizer.frontend.dynamo import DYNAMO, GuardedModule, capture_graph
from optimizer.frontend.module import OptimizedModule, Recipe, Unchanged
from optimizer.frontend.outside import Outside, is_irreversible, restored
from optimizer.frontend.symbolic import capture_call, may_draw, opaque_calls, writes_nothing_lasting
from optimizer.lowering.choose import Times, Tuning
from optimizer.lowering.engines import Engines
from optimizer.lowering.module import LoweredModule, lower
from optimizer.passes import all_passes, select
from optimizer.rewrite.contract import LOWERED, Pass
from optimizer.rewrite.pipeline import FaultyPassError, Pipeline
from optimizer.verify import equivalence as oracle
from optimizer.verify.equivalence import Answer, Difference

SYMBOLIC = "symbolic"
Check: TypeAlias = Literal["final", "each"] | None


def optimize(
    model: nn.Module | torch.export.ExportedProgram,
    example_inputs: ExampleInputs | None = None,
    *,
    level: int = 2,
    check: Check = "final",
    only: Iterable[str | Pass] | None = None,
    disable: Iterable[str] = (),
    tune_seconds: float = 1.0,
    precision: Literal["bf16", "fp16", "int8"] | None = None,
    error_budget: float | None = None,
    cuda_graph: bool = True,
    engines: Engines = "auto",
) -> OptimizedModule | GuardedModule | Unchanged:
    """Return a faster module that computes what `model` computes; `model` itself is not changed.

    The result is for inference in the mode that each submodule is in now, with a snapshot of the
    weights: it computes what `model` computes now, whatever is written to `model` later. Its
    `report` lists every rewrite, and every refused one with the reason. A forward that cannot be
    recorded by calling it with stand-ins is recorded by Dynamo where there are example inputs, as
    one graph or several (`GuardedModule`). What neither can record, or is not faster so, is
    returned as a copy that runs as it is.

    Args:
        model: any module, or an ExportedProgram, which brings example inputs of its own. In
            training mode it is optimized as far as is right, with a warning.
        example_inputs: a tensor, a tuple of positional, or a mapping of keyword arguments. Later
            calls may have other sizes. Without them only rewrites that need no shape are made.
        level: 0 keeps the same bits; 1 keeps the function up to rounding; 2 besides prepares calls
            like the example for the device it is on (`LoweredModule`); 3 in a lower precision.
        check: "final" compares the answer with the model's on the example inputs; "each" does so
            after every pass; None does not. A pass that changes the answer is rolled back.
        only: names of the passes to run, or passes of your own; all there are if None.
        disable: names of passes not to run.
        tune_seconds: how long graphs of Dynamo, and from level 2 on candidates, are timed. With 0
            none is: the choice is always the same.
        precision: at level 3, what matrix products and convolutions of calls like the example are
            computed in, where that is faster. Norms, softmax and means stay as they are. "int8" is
            for Linear layers only, and needs torchao.
        error_budget: at level 3, how far from the model's answer that may lead, relative to its
            largest value; 1e-2 for fp16 and else 5e-2 if None. Beyond it, nothing is lowered.
        cuda_graph: from level 2 on, whether calls like the example may run as one CUDA graph, which
            holds the memory of a forward.
        engines: from level 2 on, which kept compilers and runtimes may run parts of calls like the
            example: names of "openvino", "onnxruntime", which must be installed, both for the CPU,
            and "inductor"; "auto" is OpenVINO where it is installed, () is none.

    Raises:
        InputError: an argument cannot be used, or the model rejects the example inputs.
        PassError: there is no pass of a given name.
    """
    passes = select(level, only, disable)
    if check not in ("final", "each", None):
        raise InputError(f"check={check!r} does not exist: use 'final', 'each' or None.")
    tuning = Tuning(tune_seconds, precision, error_budget, cuda_graph, engines).at(level)
    call = None if example_inputs is None else as_call(example_inputs)
    if isinstance(model, GuardedModule):
        model = model.model
    elif isinstance(model, torch.export.ExportedProgram):
        call = call or Call(*(model.example_inputs or ((), {})))
        model = model.module()
        model.training = False  # what depends on it is in the program already
    check = check if call else None
    with undisturbed():
        return Run(require_module(model), call, SYMBOLIC, level, check, passes, tuning).result()


def optimize_graph(
    graph: fx.GraphModule,
    call: Call,
    *,
    level: int,
    check: Check,
    only: Sequence[str | Pass],
    **options: Any,
) -> OptimizedModule | GuardedModule | Unchanged:
    """Return a graph that Dynamo recorded, optimized with the options of `optimize`."""
    passes, tuning = select(level, only, ()), Tuning(**options).at(level)
    with undisturbed():
        return Run(graph, call, DYNAMO, level, check, passes, tuning).result()


@dataclass
class Run:
    """One call of `optimize`: tries again without a pass that turned out to be at fault."""

    original: nn.Module
    call: Call | None
    front_end: str
    level: int
    check: Check
    passes: Sequence[Pass]
    tuning: Tuning

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.model, self.is_snapshot = snapshot(self.original)
        self.remarks = list(_remarks(self.original, self.call))
        self.expected: Answer | None = None
        self.call_options = {"share_parameters": False, "random": True}  # of `answer`
        self.is_pure = False  # whether a call leaves nothing behind, so that no copy is needed
        self.opaque: list[str] = []  # what is called as it is

    def result(self) -> OptimizedModule | GuardedModule | Unchanged:
        """Return the optimized module, or the model as it is if nothing else is right."""
        while True:
            try:
                return self._or_by_dynamo(self._attempt())
            except FaultyPassError as failure:
                self.passes = [each for each in self.passes if each.name != failure.name]
                self.remarks.append(str(failure))
                warnings.warn(f"{failure}. Please report it with this model.", OptimizerWarning, 3)
            except (CaptureError, Refused) as error:
                reason = str(error)
                break  # while the error is there, it holds what was captured, with the weights
        if self.call is not None and self.expected is None:
            self.expected = self._reference()  # was it the inputs?
        guarded = self._by_dynamo(reason)
        if not isinstance(guarded, str):
            return guarded
        self.remarks.append(f"left as it is: {guarded}")
        self.front_end = ""
        return Unchanged(self.model, self._report(), owns=self.is_snapshot)

    def _or_by_dynamo(self, optimized: OptimizedModule) -> OptimizedModule | GuardedModule:
        """Return the module, or the graphs that Dynamo finds if they alone can be lowered."""
        if self.level < LOWERED or not self.opaque or optimized.report.choices or not self.call:
            return optimized
        guarded = self._by_dynamo("; ".join(self.opaque))
        return optimized if isinstance(guarded, str) or not guarded.report.choices else guarded

    def _by_dynamo(self, reason: str) -> GuardedModule | str:
        """Return the graphs that Dynamo finds, or the reason why not."""
        is_known = self.expected and not isinstance(self.model, torch.jit.ScriptModule)
        if not (self.call and self.is_snapshot and is_known and self.front_end == SYMBOLIC):
            return reason
        release_freed_memory()  # what a recording that failed left: it holds the weights
        copied, _ = snapshot(self.model)
        options = self._options() | {"check": self.check}
        remarks = (*self.remarks, f"recorded by Dynamo: {reason}")
        about = replace(self._report(), remarks=remarks, front_end=DYNAMO)
        guarded = GuardedModule(copied, partial(optimize_graph, **options), about)
        with restored(outside := Outside(copied)):
            slow = "to guard many values takes it long" * outside.is_large
            why_not = slow or self._why_not(guarded, self.call)
        if why_not:
            return f"{reason}; by Dynamo: {why_not}"
        guarded.about = replace(guarded.about, seconds=time.perf_counter() - self.started)
        written = oracle.difference(_weights(copied), _weights(self.model), exact=True)
        if written or is_irreversible(outside):
            guarded.model = self.model  # whose graphs are to be recorded yet
        return guarded

    def _why_not(self, guarded: GuardedModule, call: Call) -> str:
        """Return why a model is better left than run by Dynamo's graphs, or an empty text."""
        if self.expected and self.expected.drawn:  # Dynamo draws in another order
            return "it draws random numbers"
        if part := self._difference(guarded, twice=True):
            return f"its graphs give another answer ({part})"
        if not (guarded.report.fired or guarded.report.choices):
            return "nothing can be rewritten in its graphs"
        if not (seconds := self.tuning.tune_seconds):
            return ""
        # Not its own model: for what kernels touch as if to write it, graphs are made anew.
        both = {"portable": snapshot(self.model)[0], "plan": guarded}
        runs = {name: partial(_called_on_a_copy, each) for name, each in both.items()}
        with forked_rng():
            slower = Times((call.copied(),)).slower(runs, time.perf_counter() + seconds)
        return f"it is not faster in graphs: {slower}" if slower else ""

    def _attempt(self) -> OptimizedModule:
        module, remarks = self._captured()
        before = {"before": Size.of(module), "graph_before": listing(module)}
        pipeline = Pipeline(module, partial(self._verify, module) if self.check == "each" else None)
        pipeline.run(self.passes)
        lowers = self.level >= LOWERED
        reason = obstacle(module.graph) if lowers else ""  # the facts stay behind
        outcome = {"fired": tuple(pipeline.fired), "refused": tuple(pipeline.refused)}
        kind, again = LoweredModule if lowers else OptimizedModule, self._options()
        recipe = None  # what a graph of Dynamo was made of is not known
        if self.front_end == SYMBOLIC:
            recipe = Recipe.of(self.model, self.call, partial(optimize, **again))
        optimized = kind.of(module, self._report(*remarks, **before, **outcome), recipe)
        if part := self._difference(optimized):
            if self.check == "each":
                raise CaptureError(f"the optimized model gives another answer ({part})")
            self.check = "each"  # once more, to find out which pass it was
            return self._attempt()
        if isinstance(optimized, LoweredModule):
            try:
                remark = lower(optimized, self.call, reason, self.tuning, self._output_difference)
            except Exception as error:  # without a check, it is the first call
                self._reference()  # was it the inputs?
                remark = f"not lowered: it raised {type(error).__name__}: {error}"
                warnings.warn(f"{remark}. Please report it with this model.", OptimizerWarning, 4)
            seconds = time.perf_counter() - self.started
            more = (*optimized.report.remarks, *filter(None, [remark]))
            optimized.meta["report"] = replace(optimized.report, remarks=more, seconds=seconds)
        return optimized

    def _captured(self) -> tuple[fx.GraphModule, list[str]]:
        """Return the model as a graph, and what to remark on it; expect the model's answer."""
        capture: Any = capture_call if self.front_end == SYMBOLIC else capture_graph
        module: fx.GraphModule = capture(self.model, self.call)
        keeps, random = writes_nothing_lasting(module), may_draw(module)
        self.call_options = {"share_parameters": keeps, "random": random}
        self.is_pure = keeps and not random
        if self.call and self.expected is None and (self.check or module.meta["facts"].failures):
            self.expected = self._reference()  # facts are unknown also where inputs are wrong
        self.opaque = opaque_calls(module)
        remarks = self.opaque + module.meta.pop("materialized", [])
        if self.check == "each":
            module.recompile()
            if part := self._difference(module):
                raise CaptureError(f"the captured graph gives another answer ({part})")
        return module, remarks

    def _options(self) -> dict[str, Any]:
        """Return the options of `optimize` to do the same again."""
        names = tuple(each.name if each in all_passes() else each for each in self.passes)
        return {"level": self.level, "only": names} | self.tuning._asdict()

    def _output_difference(self, actual: Answer) -> Difference | None:
        if self.check is None or self.expected is None or self.call is None:
            return None
        return oracle.compare_answers(self.model, self.call, self.expected, actual, exact=False)

    def _verify(self, module: fx.GraphModule, faulty: Pass) -> None:
        module.recompile()
        if part := self._difference(module):
            raise FaultyPassError(faulty.name, f"changed the answer ({part})")

    def _reference(self) -> Answer | None:
        """Return the model's own answer, or None if it cannot be copied, and so not be called."""
        assert self.call is not None
        model = self.original if self.is_pure else self.model
        with suppress(CaptureError):
            return oracle.reference(model, self.call, is_pure=self.is_pure, **self.call_options)
        return None

    def _require_a_copy(self, call: Call, expected: Answer) -> None:
        """Expect the snapshot's answer if the model has other weights by now, or give up."""
        of_the_copy = oracle.reference(self.model, call, **self.call_options)
        if oracle.difference(_weights(self.model), _weights(self.original), exact=True):
            self.expected = of_the_copy
        elif oracle.difference(expected, of_the_copy):
            self.model, self.is_snapshot = self.original, False
            raise CaptureError("a copy of the model gives another answer than the model itself")

    def _difference(self, module: nn.Module, *, twice: bool = False) -> Difference | None:
        model, expected = self.model, self.expected
        if expected is None or self.call is None or not (self.check or twice):
            return None
        exact = all(each.numerics == "exact" for each in self.passes)
        try:
            if twice:
                model, module = oracle.Twice(model), oracle.Twice(module)
                expected = oracle.answer(model, self.call, **self.call_options)
            actual = oracle.answer(module, self.call, is_pure=twice, **self.call_options)
        except Exception as error:  # a broken graph may raise anything
            reason = f"raised {type(error).__name__}: {error}".split("\n")[0]
            return Difference("output", float("inf"), reason)
        part = oracle.compare_answers(model, self.call, expected, actual, exact=exact)
        if part and self.is_pure and not twice:
            self._require_a_copy(self.call, expected)
            self.is_pure = False
            return self._difference(module)
        return part

    def _report(self, *remarks: str, **done: Any) -> Report:
        compared = self.expected if self.check and self.front_end else None
        hidden = [*oracle.incomparable(compared.output)] if compared else []
        seen = compared and len(hidden) < max(1, len(oracle.leaves_of(compared.output)[0]))
        unseen = (f"not checked: output{each}" for each in hidden)
        return Report(
            model=type(self.model).__name__,
            level=self.level,
            remarks=(*self.remarks, *remarks, *unseen),
            checked=self.check if seen and self.check else "",
            front_end=self.front_end,
            seconds=time.perf_counter() - self.started,
            **done,
        )


def _called_on_a_copy(model: nn.Module, call: Call) -> Any:
    call = call.copied()  # a cache that has grown would be recorded anew
    return model(*call.args, **call.kwargs)


def _weights(model: nn.Module) -> Answer:
    """Return parameters by every name, since a copy may untie some, and all other tensors."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    return Answer((weights, held_tensors(model)), ())


def _remarks(model: nn.Module, call: Call | None) -> Iterator[str]:
    if call is None:
        yield "no example inputs: rewrites that need a shape were refused, and nothing was checked"
    if getattr(model, "training", False):  # a frozen ScriptModule has no mode
        remark = "the model is in training mode: what depends on it is left alone; call .eval()"
        warnings.warn(remark, OptimizerWarning, stacklevel=5)
        yield remark
