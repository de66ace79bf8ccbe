"""nn.Module -> GraphModule, with one spelling per operation and the facts of each node."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from optimizer.core.context import undisturbed
from optimizer.core.copy import structural_copy, unshare
from optimizer.core.errors import CaptureError, require
from optimizer.core.guards import autocast, expect_autocast
from optimizer.core.inputs import Call, ExampleInputs, as_call, require_module, storages_in
from optimizer.core.node import has_global_hooks, is_plain, module_of, reason_of, tensors_of
from optimizer.facts.facts import Fact, Facts, is_exposed, runs_known_code
from optimizer.frontend.canonicalize import from_aten, spell
from optimizer.frontend.materialize import materialize
from optimizer.frontend.names import rename_attributes, require_printable
from optimizer.frontend.outside import restored
from optimizer.frontend.traceable import Code
from optimizer.frontend.tracer import ALONE, Tracer, sees_how_it_is_called

_LASTING = ("source", "tested", "is_wrapped")  # of the meta of a node, and facts of no other run


def capture(model: nn.Module, example_inputs: ExampleInputs | None = None) -> fx.GraphModule:
    """Record a model's forward as a graph over a snapshot of it; the model is not changed.

    With example inputs, every node carries the facts that passes ask for.

    Raises:
        InputError: `model` is no module, or holds no data, or `example_inputs` has no use.
        CaptureError: a forward cannot be recorded; the message says why.
    """
    call = None if example_inputs is None else as_call(example_inputs)
    copied = structural_copy(require_module(model), share_parameters=False)
    with undisturbed():
        captured = capture_call(copied, call)
    module = fx.GraphModule(captured, captured.graph, type(captured).__name__)  # has its code now
    module.meta = captured.meta
    return module


def capture_call(model: nn.Module, call: Call | None) -> fx.GraphModule:
    """Do as `capture` does, for arguments that are known to be usable."""
    try:
        is_script = isinstance(model, torch.jit.ScriptModule)
        require(not is_script, "it is TorchScript: optimize the module that it was made of")
        require(not has_global_hooks(), "hooks of all modules see each call: remove them first")
        module = _captured(model, call, record_factories=call is None)
        if call is not None and _writes_a_constant(module):
            module = _captured(model, call, record_factories=True)
        require(not _writes_a_constant(module), "it writes a tensor that it makes itself")
        return finished(module)
    except Exception as error:  # whatever a user's forward does with traced values
        raise CaptureError(reason_of(error)) from error


def finished(module: fx.GraphModule) -> fx.GraphModule:
    """Bring a graph that was recorded, and observed, to the form of a captured one."""
    spell(module)
    require_printable(module.graph)
    module.graph.lint()
    return module


def _captured(model: nn.Module, call: Call | None, *, record_factories: bool) -> fx.GraphModule:
    """Trace a copy and observe it."""
    copied = structural_copy(model)
    materialized = materialize(copied)
    held = storages_in(tensors_of(copied))
    with ALONE:  # what another thread's recording patches is not the model's
        graph, tests_for_none = _recorded(copied, call, record_factories)
    rename_attributes(copied, graph)
    module = _LazyGraphModule(copied, graph, type(model).__name__)
    module.meta["materialized"] = materialized
    from_aten(graph)
    for name, tensor in _constants(module):  # a global's tensor is an object of the caller's
        setattr(module, name, tensor.detach().requires_grad_(tensor.requires_grad))
    unshare(tensor for _, tensor in _constants(module) if not held & storages_in(tensor))
    if call is not None:
        facts = observe(module, call)
        for node in graph.nodes:
            _require_seen(node, tests_for_none)
        weights = tensors_of(module)  # what is written is not the caller's, but is shared as before
        unshare(each for each in weights if any(facts.writers_of(storages_in(facts.to_meta(each)))))
    return module


def _require_seen(node: fx.Node, tests_for_none: bool) -> None:
    """Require that a node yields no None that was tested, and changes no list or dict."""
    fact: Fact = node.meta["fact"]
    may_hide = node.op == "call_module" or node.target is operator.getitem
    hidden = tests_for_none and may_hide and fact.value is None and not fact.error
    require(not hidden, "it may test a value inside it that is None")
    changed = node.args[0] if node.target in _CHANGES else None
    value = isinstance(changed, fx.Node) and changed.meta["fact"].value
    require(not isinstance(value, list | dict), f"it changes a container ('{node}')")


def _recorded(model: nn.Module, call: Call | None, record_factories: bool) -> tuple[fx.Graph, bool]:
    """Return the graph of a forward, and whether it may ask what is None."""
    require(is_plain(model), "the model itself has hooks, parametrizations or a __call__")
    if isinstance(model, fx.GraphModule) and issubclass(model._tracer_cls or object, Tracer):
        for node in model.graph.nodes:  # it was captured: its nodes keep their names
            node.meta = {key: node.meta[key] for key in _LASTING if key in node.meta}
        return model.graph, False
    code = Code(model)
    obstacle = next(code.obstacles(), "")
    require(not obstacle, obstacle)
    sees_names = sees_how_it_is_called(type(model).forward)
    require(not sees_names, "its forward can tell how its arguments are passed")
    tracer = Tracer(call, code, record_factories=record_factories)
    before = _attributes(model)
    with restored(code) as changed, torch.enable_grad():
        graph = tracer.trace(model)
    layers = graph.find_nodes(op="call_module") if call is None and tracer.tests_for_none else ()
    readers = {user.target for each in layers for user in each.users}
    require(operator.getitem not in readers, "it may test a value inside it that is None")
    require(not changed, "it changes what its code finds")
    same = [*map(id, before)] == [*map(id, _attributes(model))]
    require(same, "its forward changes a module")
    if any("autocast" in name for each in code.codes() for name in each.co_names):
        inputs = graph.find_nodes(op="placeholder")
        require(bool(inputs), "it takes no argument and asks for autocast")
        with graph.inserting_after(inputs[-1]):
            graph.call_function(expect_autocast, (inputs[0], autocast()))
    return graph, tracer.tests_for_none


def _attributes(model: nn.Module) -> list[Any]:
    """Return the objects that modules hold, to be compared by identity."""
    return [
        value
        for each in model.modules()
        if not isinstance(each, torch.jit.ScriptModule)  # asked, it makes new objects
        for table in (vars(each), each._parameters, each._buffers, each._modules)
        for name, value in table.items()
        if not name.startswith("_tensor_constant")
    ]


def _writes_a_constant(module: fx.GraphModule) -> bool:
    """Return whether a tensor that was made while tracing is written or returned by a call.

    It would be made once and not once a call. Without facts, none is let through.
    """
    reads = module.graph.find_nodes(op="get_attr")
    constants = [node for node in reads if "_tensor_constant" in str(node.target)]
    facts: Facts | None = module.meta.get("facts")
    if facts is None:
        return bool(constants)
    storages = {storage for node in constants for storage in node.meta["fact"].storages}
    return is_exposed(module.graph, storages)


_CHANGES = frozenset((
    operator.setitem, operator.delitem, "append", "clear", "extend", "insert", "pop", "popitem",
    "remove", "reverse", "setdefault", "sort", "update",
))  # fmt: skip


def _constants(module: fx.GraphModule) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that were made while tracing, or reached outside the module."""
    buffers = module._buffers.items()
    return [(k, v) for k, v in buffers if v is not None and k.startswith("_tensor_constant")]


def observe(module: fx.GraphModule, call: Call) -> Facts:
    """Run the graph on meta tensors and attach what is learned of each node."""
    facts = module.meta["facts"] = Facts()
    facts.to_meta([*module.parameters(), *module.buffers()])
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    examples = dict(zip(names, call.args, strict=False)) | call.kwargs
    for node in module.graph.nodes:
        if node.op == "placeholder":
            facts.input(node, examples.get(str(node.target), *node.args))  # or its default
        else:
            facts.evaluate(node)
    return facts


def opaque_calls(root: fx.GraphModule) -> list[str]:
    """Return a remark on each module that is called as it is, since its calls may do anything."""
    modules = {n.target: module_of(n) for n in root.graph.find_nodes(op="call_module")}
    return [
        f"'{name}' ({type(module).__name__}) is called as it is: it is scripted, or it has hooks,"
        " parametrizations or a __call__"
        for name, module in modules.items()
        if isinstance(module, torch.jit.ScriptModule) or not is_plain(module)
    ]


def may_draw(module: fx.GraphModule) -> bool:
    """Return whether a call may draw random numbers, or runs code of which nothing is known."""
    facts = ((node, node.meta.get("fact")) for node in module.graph.nodes)
    return any(not f or f.random or f.error or not runs_known_code(node) for node, f in facts)


def writes_nothing_lasting(module: fx.GraphModule) -> bool:
    """Return whether a call is sure to leave inputs, parameters and buffers as they are."""
    facts: Facts | None = module.meta.get("facts")
    return facts is not None and not any(facts.writers_of(facts.external))
