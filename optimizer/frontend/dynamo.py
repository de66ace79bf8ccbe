"""The graphs that Dynamo finds in a model: each is optimized when it is first called.

Dynamo passes weights as arguments, so that one graph serves every module that runs the same code.
Those that it does not write become constants, for passes to fold. While a snapshot of them lives,
torch gives a weight other memory at its first write, by whatever way; so each call compares
addresses, and optimizes again where one differs. Without such a snapshot (on a GPU; of memory that
something else holds) weights stay arguments, unless they are `frozen`: sure not to change.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from traceback import walk_tb
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import autograd, fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.overrides import get_testing_overrides

from optimizer.core.context import forked_rng, is_tracing, is_watched, undisturbed
from optimizer.core.copy import held_tensors, is_ordinary, on_storage, structural_copy
from optimizer.core.errors import CaptureError, InputError, raised_as, require
from optimizer.core.inputs import Call, ExampleInputs, as_call, hides_tensors, tensors_in
from optimizer.core.node import has_global_hooks, hold, line_of, reason_of
from optimizer.core.ops import FACTORIES
from optimizer.core.report import Choice, Report
from optimizer.facts.facts import Facts
from optimizer.frontend.module import OptimizedModule, Prepared
from optimizer.frontend.outside import Outside, restored
from optimizer.frontend.symbolic import finished, observe

_torch: Any = torch._C  # whose stubs lack what tells of copies on write
_address = _torch._data_address
_EXITS = {torch.amp.autocast_mode._exit_autocast, autograd.grad_mode._exit_inference_mode}
_IDLE = [(_torch._set_grad_enabled, (False,)), (autograd.grad_mode._enter_inference_mode, (True,))]
DYNAMO = "dynamo"
_MOST = 32  # times that one graph is optimized: then its other weights are run as they are
_NUMBERS = itertools.count()
# Dynamo records one forward so many times for each result: then other calls are run as they are.
_RECORDINGS: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": 8}
# Optimizes a graph that holds its weights, for a call.
Optimize: TypeAlias = Callable[[fx.GraphModule, Call], nn.Module]


class _Variant(NamedTuple):
    """A graph optimized for certain weights. While their snapshot lives, nothing writes there."""

    weights: list[weakref.ref[torch.Tensor]]  # of those that are freed, others get the ids
    addresses: list[int]
    snapshot: nn.Module
    run: Callable[..., Any]


class DynamoGraph:
    """A graph of Dynamo's, optimized for the weights that it is called with."""

    def __init__(
        self, module: fx.GraphModule, examples: list[Any], optimize: Optimize, *, frozen: bool
    ) -> None:
        self.module, self.optimize, self.frozen = module, optimize, frozen
        self.lock = threading.RLock()  # one thread at a time optimizes the graph
        self.inputs = module.graph.find_nodes(op="placeholder")
        self.positions = [i for i, each in enumerate(examples) if _is_weight(self.inputs[i], each)]
        self.variants: dict[tuple[int, ...], _Variant] = {}
        self.count = 0

    def __call__(self, *args: Any) -> Any:
        if has_global_hooks():  # Dynamo recorded what they do; of layers, there are none here
            return self.module.forward(*args)
        run = self._lookup(args)
        if run is None:
            with self.lock:
                run = self._lookup(args) or self._prepared(args)
        return run(*args)

    def _lookup(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        weights = [args[i] for i in self.positions]
        variant = self.variants.get(tuple(map(id, weights)))
        if variant is None:
            return None
        same = all(was() is each for was, each in zip(variant.weights, weights, strict=True))
        fits = same and (self.frozen or variant.addresses == [*map(_address, weights)])
        return variant.run if fits else None

    def _prepared(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        if self.count == _MOST or any(each.is_meta for each in tensors_in(args)):
            return self.module
        if not self.count and (graph := _without_modes(self.module)):
            facts: Facts = observe(_LazyGraphModule(self.module, graph), Call(args, {}))
            stored = [node.meta["fact"].storages for node in graph.find_nodes(op="placeholder")]
            self.positions = [i for i in self.positions if not any(facts.writers_of(stored[i]))]
        self.count += 1
        # The weights whose changes will be seen, or do not count; by the names of the inputs.
        holder = nn.Module()  # statistics as parameters too: those are copied on write
        holder._parameters.update({self.inputs[i].name: args[i] for i in self.positions})
        with undisturbed():  # a kernel may part one of them from the weights, as if to write it
            copied = partial(structural_copy, holder, share_parameters=False)
            snapshot, untouched = copied(), copied()
        if not self.frozen:  # some may be copied: of memory that something else holds
            pairs = zip(self.positions, untouched._parameters.values(), strict=True)
            self.positions = [i for i, copied in pairs if _address(copied) == _address(args[i])]
        weights, run = [args[i] for i in self.positions], self._run(snapshot, args)
        refs, addresses = [*map(weakref.ref, weights)], [*map(_address, weights)]
        self.variants[tuple(map(id, weights))] = _Variant(refs, addresses, untouched, run)
        return run

    def _run(self, snapshot: nn.Module, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Return a function that runs the graph with its weights as attributes."""
        root, weights = self.module, [self.inputs[i] for i in self.positions]
        attributes = dict(root.named_children()) | root._parameters | root._buffers
        for name, value in attributes.items():
            hold(snapshot, name, value)
        bound = fx.GraphModule(snapshot, _copied(root, weights), "Dynamo")
        bound.training = False  # what depends on it is in the graph already
        free = [i for i in range(len(args)) if i not in self.positions]
        fast = self.optimize(bound, Call(tuple(args[i] for i in free), {}))
        if not isinstance(fast, OptimizedModule):
            return self.module.forward
        return lambda *args: fast(*[args[i] for i in free])


def _is_weight(node: fx.Node, value: Any) -> bool:
    """Return whether an argument is a parameter, or held by a module, as no cache is."""
    if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
        return False
    known: Any = node.meta.get("grapharg")  # while Dynamo compiles
    held = known and known.source.guard_source.is_unspecialized_nn_module()
    return bool(held or isinstance(value, nn.Parameter))


def _copied(module: fx.GraphModule, weights: Iterable[fx.Node] = ()) -> fx.Graph:
    """Return a copy of a graph that reads `weights` off its owner."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {each: graph.get_attr(each.name) for each in weights}
    graph.output(graph.graph_copy(module.graph, copies))
    for node, copied in copies.items():
        copied.meta = {"source": line_of(node.meta.get("stack_trace") or "")}
    return graph


def capture_graph(model: fx.GraphModule, call: Call) -> fx.GraphModule:
    """Bring a graph that Dynamo recorded to the form of one that is captured."""
    graph: Any = _without_modes(model)
    require(graph is not None, "it enters a mode")
    module = _LazyGraphModule(model, graph, "Dynamo")
    observe(module, call)
    return finished(module)


def _without_modes(module: fx.GraphModule) -> fx.Graph | None:
    """Return a copy of a graph without what keeps modes off; None if it enters one."""
    graph = _copied(module)
    for node in reversed(graph.nodes):
        if _changes_nothing(node):
            graph.erase_node(node)
    # They take no value and make no tensor (set_grad_enabled, enter_autocast), or vmap's size.
    calls = (node for node in graph.nodes if node.op == "call_function")
    sources = (node for node in calls if not node.all_input_nodes or "_nesting" in node.name)
    return graph if {*FACTORIES, *get_testing_overrides()} >= {n.target for n in sources} else None


def _changes_nothing(node: fx.Node) -> bool:
    """Return whether a call keeps gradients and autocast off, or only counts usage."""
    if node.target in _EXITS:
        return _changes_nothing(node.all_input_nodes[0])
    if node.target is torch.amp.autocast_mode._enter_autocast:
        return node.args[2] is False
    return node.target is _torch._log_api_usage_once or (node.target, node.args) in _IDLE


def capture_by_dynamo(model: nn.Module, call: Call) -> fx.GraphModule:
    """Return the one graph that Dynamo finds, with facts; raise a `CaptureError` otherwise."""
    graphs: list[fx.GraphModule] = []

    def record(graph: fx.GraphModule, call: Call) -> nn.Module:
        graphs.append(capture_graph(graph, call))
        return graph

    backend = partial(DynamoGraph, optimize=record, frozen=True)
    args, kwargs = call.copied()
    try:
        with torch.no_grad():
            _compiled(structural_copy(model), backend, fullgraph=True)(*args, **kwargs)
        require(len(graphs) == 1, "Dynamo finds no graph in it")
    except Exception as error:  # whatever Dynamo or a user's forward raises
        raise CaptureError(reason_of(error)) from error
    return graphs[0]


def _compiled(model: nn.Module, backend: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `torch.compile` of a model, as code that no other model runs.

    For the life of a process Dynamo remembers by code which numbers were others before, such as two
    models' rates of dropout, and makes them inputs; and keeps what a backend returns. The graphs,
    with their weights, are no part of that: they live as long as what is returned here.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        for each in (*args, *kwargs.values()) if torch.compiler.is_dynamo_compiling() else ():
            # An RGB image, whose sizes take minutes where they are symbols and not numbers.
            if torch.is_tensor(each) and each.dim() > 3 and each.shape[-3] == 3:
                torch._dynamo.mark_static(each, -2)
                torch._dynamo.mark_static(each, -1)
        return model(*args, **kwargs)

    def compile_graph(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        owner().graphs.append(backend(graph, examples))
        graph_ref: Any = weakref.ref(owner().graphs[-1])
        return lambda *args: graph_ref()(*args)

    vars(call)["graphs"] = []
    owner: Any = weakref.ref(call)
    call.__code__ = call.__code__.replace(co_name=f"call_{next(_NUMBERS)}")
    return torch.compile(call, backend=compile_graph, **options, **_RECORDINGS)


def _had_begun(error: Exception) -> bool:
    """Return whether a part of a call was run before Dynamo failed to record the rest."""
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    return any(c.co_filename == __file__ and c.co_name.startswith("call_") for c in codes)


def _out_of_inference_mode(call: Call) -> Call | None:
    """Return a call with aliases of what was made in that mode, or None if some can have none."""
    values = [*call.args, *call.kwargs.values()]
    made_there = [each for each in tensors_in(values) if each.is_inference()]
    ordinary = {id(each) for each in values if torch.is_tensor(each) and is_ordinary(each)}
    if hides_tensors(values) or not ordinary.issuperset(map(id, made_there)):
        return None
    with torch.inference_mode(False):  # where an alias may be written, and its source may not
        aliases = {id(each): on_storage(each, each.untyped_storage()) for each in made_there}
    args, kwargs = (aliases.get(id(each), each) for each in call.args), call.kwargs.items()
    return Call(tuple(args), {name: aliases.get(id(each), each) for name, each in kwargs})


class GuardedModule(Prepared):
    """A snapshot of a model that runs as the optimized graphs that Dynamo finds in it.

    Dynamo guards a graph by all that the model's Python looks at, and records another one where
    that differs: other sizes, other arguments. A call that is recorded, transformed, under
    autocast or differentiated runs the snapshot, and so do others after eight recordings, and all
    after one that failed. The graphs stay in the process: copies and pickles record their own.
    """

    def __init__(self, model: nn.Module, optimize: Optimize, about: Report) -> None:
        super().__init__()
        self.model, self.training = model, model.training
        self._optimize, self.about = optimize, about  # of the model as a whole
        self._reports: list[Report] = []  # of its graphs

    @property
    def report(self) -> Report:
        """What was rewritten and refused in all graphs that were recorded until now."""
        return self.about.with_graphs(self._reports)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the graphs that were recorded for such a call, or record them."""
        differentiated = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in tensors_in((args, kwargs))
        )
        if is_watched() or is_tracing() or differentiated:
            return self.model(*args, **kwargs)
        inside = torch.is_inference_mode_enabled()  # where Dynamo would record a call once more
        outside = _out_of_inference_mode(Call(args, kwargs)) if inside else None
        with torch.inference_mode(inside and outside is None), torch.no_grad():
            args, kwargs = outside or (args, kwargs)
            try:
                return self._recorded(*args, **kwargs)
            except Exception as error:
                if not type(error).__module__.startswith("torch._dynamo."):
                    raise
                had_begun = _had_begun(error)  # the rest is lost, as a part was made
                answer = had_begun or self.model(*args, **kwargs)  # which may raise, too
                self._run_as_it_is(error)
                if had_begun:
                    raise
                return answer

    def _run_as_it_is(self, error: Exception) -> None:
        """Record no more calls: such a failure takes as long as a recording, each time."""
        self.__dict__["_recorded"] = self.model
        remark = f"run as it is since Dynamo failed: {reason_of(error)}"
        self.about = replace(self.about, remarks=(*self.about.remarks, remark))

    @cached_property
    def _recorded(self) -> Callable[..., Any]:
        """What Dynamo makes of the model: not a submodule."""
        optimize, reports = self._optimize, list[Report]()
        self._reports = reports

        def optimize_graph(graph: fx.GraphModule, call: Call) -> Any:
            fast: Any = optimize(graph, call)
            reports.append(fast.report)
            return fast

        # Where no write to a weight can be seen, only this module's methods may change them.
        frozen = any(tensor.device.type != "cpu" for tensor in self.model.parameters())
        return _compiled(self.model, partial(DynamoGraph, optimize=optimize_graph, frozen=frozen))

    def lower(self, example_inputs: ExampleInputs) -> tuple[Choice, ...]:
        """Record and prepare calls like this one; return what was chosen for each new region.

        Such a call is made, once, and what it changes in the model is put back.

        Args:
            example_inputs: a tensor, a tuple of positional, or a mapping of keyword arguments.

        Raises:
            InputError: `example_inputs` has no use, or a call with it raises.
        """
        call, count = as_call(example_inputs).copied(), len(self._reports)
        tensors = (*self.model.parameters(), *held_tensors(self.model))
        rejected = raised_as(InputError, "the model cannot be called so: {}")
        with restored(Outside(self.model), *tensors), forked_rng(), torch.no_grad(), rejected:
            self(*call.args, **call.kwargs)
        return tuple(choice for report in self._reports[count:] for choice in report.choices)

    def _forget(self) -> None:
        self.__dict__.pop("_recorded", None)

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in vars(self).items() if name != "_recorded"}
