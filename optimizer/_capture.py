"""nn.Module -> GraphModule with one spelling per operation and the facts of every value."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from optimizer._caches import Place, are_constants, listing, put_entries, take_entries
from optimizer._copy import structural_copy
from optimizer._errors import CaptureError
from optimizer._graph import clean, is_plain, module_of
from optimizer._inputs import Call, ExampleInputs, as_call, require_module
from optimizer._none_tests import tests_for_none
from optimizer._observation import Fact, Facts
from optimizer._source import line_of, reason_of
from optimizer._spelling import spell
from optimizer._state import python_state, random_fingerprint, random_state_kept
from optimizer._tracer import Tracer
from optimizer._trees import storages_in

_LASTING = (
    "source",
    "tested",
    "is_wrapped",
    "opaque",
)  # of the meta of a node, and facts of no other run


def capture(model: nn.Module, example_inputs: ExampleInputs | None = None) -> fx.GraphModule:
    """Record a model's forward as a graph over a copy of it; the model is not changed.

    Parameters are shared with `model`. Submodules whose forward cannot be recorded, that have
    hooks, or that keep Python state of their own are called as they are. With example inputs,
    every node carries the facts that passes ask for.

    Raises:
        InputError: `model` is no module, or holds no data, or `example_inputs` has no use.
        CaptureError: the model's own forward cannot be recorded; the message says why.
    """
    call = None if example_inputs is None else as_call(example_inputs)
    module = capture_call(require_module(model), call)
    clean(module)
    return module


def capture_call(model: nn.Module, call: Call | None) -> fx.GraphModule:
    """`capture` for arguments that are known to be usable."""
    try:
        module = _captured(model, call, trusting=True)
        if call is not None and (_writes_a_constant(module) or not are_constants(module.graph)):
            module = _captured(model, call, trusting=False)
        require(not _writes_a_constant(module), "it writes a tensor that it makes itself")
        spell(module)
        module.graph.lint()
    except Exception as error:  # whatever a user's forward does with traced values
        raise CaptureError(_told(error)) from error
    return module


def _told(error: Exception) -> str:
    """Why a forward cannot be recorded, where, and what can be done about it."""
    way_out = "in a submodule of its own it would be called as it is, and the rest optimized"
    return f"{reason_of(error)}: {way_out}" if line_of(error) else reason_of(error)


def called_as_they_are(module: fx.GraphModule) -> list[str]:
    """What was not recorded, because nothing is known of what it does; and the reasons."""
    calls = {node.target: node for node in module.graph.nodes if node.op == "call_module"}
    reasons = {name: _why_opaque(node) for name, node in calls.items()}
    return [
        f"'{name}' ({type(module_of(calls[name])).__name__}) is called as it is: {reason}"
        for name, reason in reasons.items()
        if reason
    ]


def _why_opaque(node: fx.Node) -> str:
    """Why a call of a submodule was not recorded; empty for the layers of torch."""
    module = module_of(node)
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted"
    hooked = "" if is_plain(module) else "it has hooks, parametrizations or a __call__"
    return str(node.meta.get("opaque", hooked))


def _captured(model: nn.Module, call: Call | None, *, trusting: bool) -> fx.GraphModule:
    """Trace and observe; if `trusting`, what depends on no input is taken to be a constant."""
    copied, graph = _trace(model, call, trusting=trusting)
    module = fx.GraphModule(copied, graph, type(model).__name__)
    if call is not None:
        observe(module, call)
        require(not _hides_none(module, copied), "it may test a value inside it that is None")
        _own_what_is_written(module)
    return module


def _trace(model: nn.Module, call: Call | None, *, trusting: bool) -> tuple[nn.Module, fx.Graph]:
    """Trace a copy; once more around each submodule that turns out not to let it."""
    opaque: dict[str, str] = {}
    while True:
        tracer = Tracer(call, opaque, record_factories=not trusting)
        copied = structural_copy(model)
        require(is_plain(copied), "the model itself has hooks, parametrizations or a __call__")
        if isinstance(copied, fx.GraphModule) and issubclass(copied._tracer_cls or object, Tracer):
            return copied, _recorded_before(copied)
        before = python_state(copied)
        try:
            graph = _recorded(tracer, copied)
        except CaptureError:
            if tracer.opaque == opaque:
                raise
            opaque = dict(tracer.opaque)
            continue
        stateful = _changed(before, copied)
        if stateful and trusting and call is not None and (entries := take_entries(copied)):
            again = Tracer(call, opaque, record_factories=False)
            if _finds(entries, model, again, graph):
                return copied, graph
        if not stateful:
            return copied, graph
        known = "" in stateful or stateful <= set(opaque)
        require(not known, "its forward keeps state in attributes of the model")
        opaque |= dict.fromkeys(stateful, "its forward keeps state in attributes")


def _changed(before: dict[str, Any], model: nn.Module) -> set[str]:
    """The names of the modules that hold something else than before."""
    after = python_state(model)
    return {name for name, state in before.items() if after.get(name) != state}


def _finds(
    entries: dict[Place, fx.Node], model: nn.Module, tracer: Tracer, graph: fx.Graph
) -> bool:
    """Whether a forward that finds entries in its caches does what it did when it made them."""
    filled = structural_copy(model)
    names = put_entries(filled, entries)
    before = python_state(filled)
    try:
        found = _recorded(tracer, filled)
    except CaptureError:  # pragma: no cover - it asks for data once its caches are full
        return False
    return not _changed(before, filled) and listing(found, {}) == listing(graph, names)


def _recorded_before(module: fx.GraphModule) -> fx.Graph:
    """The graph of a module that was captured, under the names that its nodes have."""
    for node in module.graph.nodes:
        node.meta = {key: node.meta[key] for key in _LASTING if key in node.meta}
    return module.graph


def _recorded(tracer: Tracer, model: nn.Module) -> fx.Graph:
    with random_state_kept(), torch.enable_grad():
        drawn = random_fingerprint()
        graph = tracer.trace(model)
        require(random_fingerprint() == drawn, "it draws or seeds random numbers in Python")
    for node in graph.nodes:
        if node.op == "call_module" and node.target in tracer.opaque:
            node.meta["opaque"] = tracer.opaque[node.target]
    return graph


def adopt(module: fx.GraphModule, call: Call) -> fx.GraphModule:
    """Bring a graph that was recorded elsewhere to the form of a captured one."""
    observe(module, call)
    spell(module)
    module.graph.lint()
    return module


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise CaptureError(reason)


def _writes_a_constant(module: fx.GraphModule) -> bool:
    """Whether a tensor that was made while tracing is written or returned by a call.

    It would be made once and not once a call. Without facts, none is let through.
    """
    nodes = module.graph.nodes
    made = [n for n in nodes if n.op == "get_attr" and "_tensor_constant" in str(n.target)]
    facts: Facts | None = module.meta.get("facts")
    if facts is None:
        return bool(made)
    output: Fact = next(iter(reversed(nodes))).meta["fact"]
    held = {storage for node in made for storage in node.meta["fact"].storages}
    return facts.any_written(held) or not held.isdisjoint(output.storages)


def _hides_none(module: fx.GraphModule, model: nn.Module) -> bool:
    """Whether an opaque call gave a None, and the model's code may have looked for one."""
    given = [n for n in module.graph.nodes if n.op == "call_module" or n.target is operator.getitem]
    facts: list[Fact] = [node.meta["fact"] for node in given]
    return any(f.value is None and not f.error for f in facts) and tests_for_none(model)


def _own_what_is_written(module: fx.GraphModule) -> None:
    """A parameter that the forward writes is not shared with the caller's model."""
    facts: Facts = module.meta["facts"]
    for parameter in module.parameters():
        if facts.any_written(storages_in(facts.to_meta(parameter))):
            parameter.data = parameter.data.clone()


def observe(module: fx.GraphModule, call: Call) -> Facts:
    """Run the graph on meta tensors and attach what is learned of each node."""
    facts = module.meta["facts"] = Facts()
    for tensor in (*module.parameters(), *module.buffers()):
        facts.to_meta(tensor)
    examples = dict(zip(_parameter_names(module), call.args, strict=False)) | call.kwargs
    for node in module.graph.nodes:
        if node.op == "placeholder":
            default = node.args[0] if node.args else None
            facts.input(node, examples.get(str(node.target), default))
        else:
            facts.evaluate(node)
    return facts


def _parameter_names(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]


def has_unknown_facts(module: fx.GraphModule) -> bool:
    """Whether a node could not be run on meta tensors."""
    facts: Facts | None = module.meta.get("facts")
    return facts is not None and bool(facts.failures)


def writes_nothing_lasting(module: fx.GraphModule) -> bool:
    """Whether a call is sure to leave inputs, parameters and buffers as they are."""
    facts: Facts | None = module.meta.get("facts")
    return facts is not None and not facts.any_written(facts.external)
