"""nn.Module -> GraphModule, with one spelling per operation and the facts of each node."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from optimizer.core.context import put_back, undisturbed
from optimizer.core.copy import part, structural_copy
from optimizer.core.errors import CaptureError, require
from optimizer.core.inputs import Call, ExampleInputs, as_call, require_module, storages_in
from optimizer.core.node import attribute, clean, has_global_hooks, is_plain, line_of, reason_of
from optimizer.core.random import DRAWS, ProcessState, undrawn
from optimizer.facts.effects import called_as_they_are, is_users_module, may_do_anything
from optimizer.facts.propagation import Fact, Facts
from optimizer.frontend.arguments import sees_how_it_is_called
from optimizer.frontend.caches import are_constants, listing, put_entries, take_entries
from optimizer.frontend.canonicalize import spell
from optimizer.frontend.names import give_free_names, require_written
from optimizer.frontend.state import Outside, python_state
from optimizer.frontend.tracer import Tracer
from optimizer.frontend.type_tests import tests_for_none


def recorded(tracer: Tracer, model: nn.Module) -> tuple[fx.Graph, set[str]]:
    """The graph of a forward, and the modules that then hold or reach something else than before.

    What a model reaches outside it is put back.

    Raises:
        CaptureError: it cannot be recorded.
    """
    outside = tracer.outside
    assert outside is not None
    before = _state(model, outside)
    with outside.kept(), torch.enable_grad():
        graph = tracer.trace(model)
        after = _state(model, outside)
    for node in graph.nodes:
        if node.target in tracer.opaque:
            node.meta["opaque"] = tracer.opaque[str(node.target)]
    return graph, {name for name, state in before.items() if after.get(name) != state}


def _state(model: nn.Module, outside: Outside) -> dict[str, Any]:
    """What each module holds, and what it reaches outside the model, by name."""
    reached = outside.state()
    return {name: (state, reached.get(name)) for name, state in python_state(model).items()}


def differing_when_recorded_again(model: nn.Module, tracer: Tracer, graph: fx.Graph) -> set[str]:
    """The module that does something else in a second recording, if any.

    Its state is of a kind that does not show, so it is asked where one reaches any.
    """
    copied = structural_copy(model)
    outside = Outside(copied)
    again = tracer.again(outside)
    found, _ = recorded(again, copied)
    nothing = ("", "", torch.empty(0))
    pairs = zip_longest(_noted(graph, tracer.root), _noted(found, again.root), fillvalue=nothing)
    for (within, does, bits), (other, does_then, bits_then) in pairs:
        if does != does_then or not torch.equal(bits, bits_then):
            name = max(within, other, key=len)
            while name and name not in outside.reaches:
                name = name.rpartition(".")[0]
            return {name}
    return set()


def _noted(graph: fx.Graph, root: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Of each node: whose forward made it, what it does, and all bits of a constant, NaN too."""
    for node in graph.nodes:
        does = repr((node.op, node.target, node.args, node.kwargs))
        bits = torch.empty(0)
        if str(node.target).startswith("_tensor_constant"):
            constant: torch.Tensor = attribute(root, str(node.target))
            does += repr((constant.dtype, constant.shape))
            bits = constant.detach().contiguous().view(-1).view(torch.uint8)
        yield node.meta.get("within", ""), does, bits


_LASTING = (
    "source",
    "tested",
    "is_wrapped",
    "opaque",
)  # of the meta of a node, and facts of no other run


def capture(model: nn.Module, example_inputs: ExampleInputs | None = None) -> fx.GraphModule:
    """Record a model's forward as a graph over a snapshot of it; the model is not changed.

    Submodules whose forward cannot be recorded, that have hooks, or that keep Python state of
    their own are called as they are. With example inputs, every node carries the facts that passes
    ask for.

    Raises:
        InputError: `model` is no module, or holds no data, or `example_inputs` has no use.
        CaptureError: the model's own forward cannot be recorded; the message says why.
    """
    call = None if example_inputs is None else as_call(example_inputs)
    copied = structural_copy(require_module(model), share=False)
    captured = undisturbed(lambda: capture_call(copied, call))
    clean(captured)
    module = fx.GraphModule(captured, captured.graph, type(captured).__name__)  # has its code now
    module.meta = captured.meta
    return module


def capture_call(model: nn.Module, call: Call | None) -> fx.GraphModule:
    """`capture` for arguments that are known to be usable."""
    try:
        require(not has_global_hooks(), "hooks of all modules see each call: remove them first")
        state = ProcessState()
        module = put_back(state.restore, lambda: _carefully_captured(model, call, state))
        require(not _writes_a_constant(module), "it writes a tensor that it makes itself")
        part(tensor for _, tensor in _constants(module))
        spell(module)
        require_written(module.graph)
        module.graph.lint()
    except Exception as error:  # whatever a user's forward does with traced values
        raise CaptureError(_told(error)) from error
    return module


def _carefully_captured(model: nn.Module, call: Call | None, state: ProcessState) -> fx.GraphModule:
    """Record, and again where the first time showed that it took too much for granted."""
    trusting, watched = True, call is None
    while True:
        module = _captured(model, call, state if watched else None, trusting=trusting)
        unclear = _writes_a_constant(module) or not are_constants(module.graph)
        if not watched and (state.changed() or may_draw(module)):
            watched = True  # does it seed what it draws?
        elif trusting and unclear and call is not None:
            trusting = False
        else:
            unseen = state.alone and not state.touched and state.changed()
            require(not unseen, DRAWS)
            return module


def _told(error: Exception) -> str:
    """Why a forward cannot be recorded, where, and what can be done about it."""
    way_out = "in a submodule of its own it would be called as it is, and the rest optimized"
    return f"{reason_of(error)}: {way_out}" if line_of(error) else reason_of(error)


def _captured(
    model: nn.Module, call: Call | None, generators: ProcessState | None, *, trusting: bool
) -> fx.GraphModule:
    """Trace and observe; if `trusting`, what depends on no input is taken to be a constant."""
    tracer = partial(Tracer, call, record_factories=not trusting, generators=generators)
    copied, graph, fills_caches = _trace(model, call, tracer, trusting=trusting)
    give_free_names(copied, graph)
    module = _LazyGraphModule(copied, graph, type(model).__name__)
    module.meta["fills_caches"] = fills_caches
    for name, tensor in _constants(module):  # a global's tensor is an object of the caller's
        setattr(module, name, tensor.detach().requires_grad_(tensor.requires_grad))
    if call is not None:
        with Outside(copied).kept():
            undrawn(lambda: observe(module, call))
        require(not _hides_none(module, copied), "it may test a value inside it that is None")
        changed = next(filter(_changes_a_container, module.graph.nodes), None)
        require(changed is None, f"it changes a container ('{changed}')")
        _own_what_is_written(module)
    return module


def _trace(
    model: nn.Module, call: Call | None, tracer_of: Callable[..., Tracer], *, trusting: bool
) -> tuple[nn.Module, fx.Graph, bool]:
    """Trace a copy, once more around each submodule that does not let it; does it fill caches?"""
    opaque: dict[str, str] = {}
    while True:
        copied = structural_copy(model)
        outside = Outside(copied)
        opaque |= outside.unknown
        tracer = tracer_of(opaque=opaque, outside=outside)
        require(is_plain(copied), "the model itself has hooks, parametrizations or a __call__")
        if isinstance(copied, fx.GraphModule) and issubclass(copied._tracer_cls or object, Tracer):
            return copied, _recorded_before(copied), False
        told = call is not None or not sees_how_it_is_called(type(copied).forward)
        require(told, "its forward is decorated and may see how it is called: pass example inputs")
        require("" not in opaque, opaque.get("", ""))
        try:
            graph, stateful = recorded(tracer, copied)
        except CaptureError:
            if tracer.opaque == opaque:
                raise
        if tracer.opaque != opaque:  # nothing of what was recorded in vain is to stay
            opaque = dict(tracer.opaque)
            continue
        if not stateful and outside.keeps_state:
            stateful = differing_when_recorded_again(model, tracer, graph)
        again = partial(tracer_of, opaque=opaque)
        if not stateful or (trusting and call and _finds(copied, model, again, graph)):
            return copied, graph, bool(stateful)
        known = "" in stateful or stateful <= set(opaque)
        require(not known, "its forward keeps state in Python")
        opaque |= dict.fromkeys(stateful, "its forward keeps state in Python")


def _finds(
    recorded_copy: nn.Module, model: nn.Module, tracer_of: Callable[..., Tracer], graph: fx.Graph
) -> bool:
    """Whether a forward that finds entries in its caches does what it did when it made them."""
    if not (entries := take_entries(recorded_copy)):
        return False
    filled = structural_copy(model)
    tracer = tracer_of(outside=Outside(filled))
    names = put_entries(filled, entries)
    try:
        found, stateful = recorded(tracer, filled)
    except CaptureError:  # pragma: no cover - it asks for data once its caches are full
        return False
    return not stateful and listing(found, {}) == listing(graph, names)


def _recorded_before(module: fx.GraphModule) -> fx.Graph:
    """The graph of a module that was captured, under the names that its nodes have."""
    for node in module.graph.nodes:
        node.meta = {key: node.meta[key] for key in _LASTING if key in node.meta}
    return module.graph


def adopt(module: fx.GraphModule, call: Call) -> fx.GraphModule:
    """Bring a graph that was recorded elsewhere to the form of a captured one."""
    observe(module, call)
    spell(module)
    require_written(module.graph)
    module.graph.lint()
    return module


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
    return any(f.value is None and not f.error for f in facts) and tests_for_none(Outside(model))


_CHANGES = frozenset((
    operator.setitem, operator.delitem, "append", "clear", "extend", "insert", "pop", "popitem",
    "remove", "reverse", "setdefault", "sort", "update",
))  # fmt: skip


def _changes_a_container(node: fx.Node) -> bool:
    """Whether a call writes into a list or a dict, which no fact would tell of."""
    held = node.args[0] if node.target in _CHANGES else None
    return isinstance(held, fx.Node) and isinstance(held.meta["fact"].value, list | dict)


def _own_what_is_written(module: fx.GraphModule) -> None:
    """A parameter that the forward writes is not shared with the caller's model."""
    facts: Facts = module.meta["facts"]
    for parameter in module.parameters():
        if facts.any_written(storages_in(facts.to_meta(parameter))):
            parameter.data = parameter.data.clone()


def _constants(module: fx.GraphModule) -> list[tuple[str, torch.Tensor]]:
    """Tensors that were made while tracing, or that the forward reached outside its module."""
    buffers = module._buffers.items()
    return [(k, v) for k, v in buffers if v is not None and k.startswith("_tensor_constant")]


def observe(module: fx.GraphModule, call: Call) -> Facts:
    """Run the graph on meta tensors and attach what is learned of each node."""
    facts = module.meta["facts"] = Facts()
    for tensor in (*module.parameters(), *module.buffers()):
        facts.to_meta(tensor)
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    examples = dict(zip(names, call.args, strict=False)) | call.kwargs
    for node in module.graph.nodes:
        if node.op == "placeholder":
            default = node.args[0] if node.args else None
            facts.input(node, examples.get(str(node.target), default))
        else:
            facts.evaluate(node)
    return facts


def has_unknown_facts(module: fx.GraphModule) -> bool:
    """Whether a node could not be run on meta tensors."""
    facts: Facts | None = module.meta.get("facts")
    return facts is not None and bool(facts.failures)


def may_draw(module: fx.GraphModule) -> bool:
    """Whether a call may draw random numbers, by operators of torch."""
    known = [(node, node.meta.get("fact")) for node in module.graph.nodes]
    return any(not f or f.random or f.error or is_users_module(node) for node, f in known)


def leaves_nothing_behind(module: fx.GraphModule) -> bool:
    """Whether a call is sure to change nothing at all: the caller's own model may be called."""
    clean = writes_nothing_lasting(module) and not has_unknown_facts(module)
    calls = any(map(may_do_anything, module.graph.nodes)) or called_as_they_are(module)
    return clean and not (calls or may_draw(module) or module.meta.get("fills_caches"))


def writes_nothing_lasting(module: fx.GraphModule) -> bool:
    """Whether a call is sure to leave inputs, parameters and buffers as they are."""
    facts: Facts | None = module.meta.get("facts")
    return facts is not None and not facts.any_written(facts.external)
