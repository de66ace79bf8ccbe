"""nn.Module -> GraphModule with one spelling per operation and the facts of every value."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from optimizer._copy import structural_copy
from optimizer._errors import CaptureError
from optimizer._graph import clean, is_plain
from optimizer._inputs import Call, ExampleInputs, as_call, require_module
from optimizer._observation import Facts
from optimizer._spelling import spell
from optimizer._tracer import FACTORIES, Tracer


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
    return capture_call(require_module(model), call)


def capture_call(model: nn.Module, call: Call | None) -> fx.GraphModule:
    """`capture` for arguments that are known to be usable."""
    copied, graph = _trace(model, call)
    module = fx.GraphModule(copied, graph, type(model).__name__)
    if call is not None:
        _observe(module, call)
    spell(module)
    clean(module)
    return module


def _trace(model: nn.Module, call: Call | None) -> tuple[nn.Module, fx.Graph]:
    """Trace a copy; where a submodule keeps state in Python, once more around it."""
    opaque: frozenset[str] = frozenset()
    while True:
        copied = structural_copy(model)
        if not is_plain(copied):
            raise CaptureError("the model itself has hooks or parametrizations")
        before = _python_state(copied)
        graph = _traced(copied, call, opaque)
        after = _python_state(copied)
        stateful = {name for name, state in before.items() if after.get(name) != state}
        if "" in stateful or stateful <= opaque:
            _require(not stateful, "its forward keeps state in attributes of the model")
            return copied, graph
        opaque |= stateful


def _traced(copied: nn.Module, call: Call | None, opaque: frozenset[str]) -> fx.Graph:
    try:
        graph = Tracer(call, opaque).trace(copied)
    except CaptureError:
        raise
    except Exception as error:  # whatever a user's forward raises on traced values
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CaptureError(f"its forward cannot be recorded: {reason}") from error
    for node in graph.nodes:
        if node.target in FACTORIES:
            node.meta.pop("is_wrapped", None)  # torch.zeros needs no mark to be traced again
    return graph


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise CaptureError(reason)


def _python_state(model: nn.Module) -> dict[str, Any]:
    """The identities of what each module holds, containers one level deep."""
    return {name: _state_of(module) for name, module in model.named_modules()}


def _state_of(module: nn.Module) -> dict[str, Any]:
    held = {k: v for k, v in vars(module).items() if not k.startswith("_tensor_constant")}
    return {name: _identity(value) for name, value in held.items()}


def _identity(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: id(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [id(item) for item in value]
    return id(value)


def _observe(module: fx.GraphModule, call: Call) -> None:
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


def _parameter_names(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "placeholder"]


def has_unknown_facts(module: fx.GraphModule) -> bool:
    """Whether a node could not be run on meta tensors."""
    facts: Facts | None = module.meta.get("facts")
    return facts is not None and bool(facts.failures)
