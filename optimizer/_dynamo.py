"""`torch.compile(model, backend="optimizer")`: the same passes on each graph that Dynamo finds.

Dynamo passes parameters and buffers as arguments, so that one graph serves every module that runs
the same code. Those that the graph does not write become constants, for passes to fold. A snapshot
of them is kept, so that torch gives a weight other memory at its first write, by whatever way:
each call compares addresses, and optimizes again where one differs. Weights of which torch makes
no such snapshot (on a GPU; memory that something else holds, too) stay arguments, and nothing is
folded into them unless `options={"freeze": True}` says that they will not change.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from optimizer._optimize import Run
from optimizer.core.context import undisturbed
from optimizer.core.copy import structural_copy
from optimizer.core.errors import InputError, OptimizerWarning, require
from optimizer.core.inputs import Call, require_flags
from optimizer.core.node import has_global_hooks, line_in
from optimizer.core.ops import FACTORIES
from optimizer.facts.propagation import Facts
from optimizer.frontend.choose import FrontEnds
from optimizer.frontend.module import OptimizedModule
from optimizer.frontend.symbolic import adopt, observe
from optimizer.passes import select
from optimizer.rewrite.contract import REDUCED, Pass
from optimizer.rewrite.subgraph import hold

_torch: Any = torch._C  # whose stubs lack what tells of copies on write
log = logging.getLogger("optimizer")
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"level": 1, "check": "final", "only": None, "disable": (), "freeze": False}
)
_MOST = 32  # times that one graph is optimized: then its other weights are run as they are


def backend(
    module: fx.GraphModule,
    example_inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """What Dynamo calls with each graph. Reports go to the log `optimizer`, at level INFO.

    Args:
        module: the graph.
        example_inputs: its first arguments.
        options: `level`, `check`, `only` and `disable`, as in `optimizer.optimize`; and `freeze`,
            the promise that the weights of the first call stay as they are.

    Raises:
        InputError: there is no such option, or it has no such value. Dynamo wraps it in an error
            of its own.
    """
    given = {**_DEFAULTS, **(options or {})}
    passes = _passes(given)
    tensors = [each for each in example_inputs if isinstance(each, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        graph = "a graph of torch.compile(backend='optimizer')"
        remark = "runs as it is while gradients are recorded: call it under torch.no_grad()"
        warnings.warn(f"{graph} {remark}", OptimizerWarning, stacklevel=2)
        return module.forward
    if any(torch.is_autocast_enabled(tensor.device.type) for tensor in tensors):
        return module.forward
    return _Graph(module, example_inputs, given, passes)


def _passes(options: dict[str, Any]) -> tuple[Pass, ...]:
    """The passes that options ask for, which are all options that there are."""
    if unknown := set(options) - set(_DEFAULTS):
        raise InputError(f"no option {sorted(map(str, unknown))}: there are {sorted(_DEFAULTS)}.")
    level, check, only, disable, freeze = (options[name] for name in _DEFAULTS)
    require_flags(freeze=freeze)
    if check not in ("final", "each", None):
        raise InputError(f"check={check!r} does not exist: use 'final', 'each' or None.")
    passes = select(level, only, disable)
    if level == REDUCED:
        raise InputError("level 3 takes a precision, which is no option here: use 0, 1 or 2.")
    return passes


class _Variant(NamedTuple):
    """A graph optimized for certain weights. While their snapshot lives, nothing writes there."""

    weights: list[weakref.ref[torch.Tensor]]  # of those that are freed, others get the ids
    addresses: list[int]
    snapshot: nn.Module
    run: Callable[..., Any]

    def fits(self, weights: list[torch.Tensor], frozen: bool) -> bool:
        """Whether it was made for these weights, as they are now unless those are `frozen`."""
        same = all(known() is each for known, each in zip(self.weights, weights, strict=True))
        return same and (frozen or self.addresses == _addresses(weights))


class _Graph:
    """A graph of Dynamo's, optimized for the weights that it is called with."""

    def __init__(
        self,
        module: fx.GraphModule,
        examples: list[Any],
        options: dict[str, Any],
        passes: tuple[Pass, ...],
    ) -> None:
        self.module, self.options, self.passes = module, options, passes
        self.lock = threading.RLock()  # what is held changes while the graph is optimized
        inputs = zip(module.graph.find_nodes(op="placeholder"), examples, strict=True)
        self.held = [i for i, (node, value) in enumerate(inputs) if _is_held(node, value)]
        self.variants: dict[tuple[int, ...], _Variant] = {}
        self.made = 0

    def __call__(self, *args: Any) -> Any:
        if has_global_hooks():  # Dynamo recorded what they do; of layers, there are none here
            return self.module.forward(*args)
        run = self._known(args)
        if run is None:
            with self.lock:
                run = self._known(args) or self._made(args)
        return run(*args)

    def _known(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        weights = [args[i] for i in self.held]
        known = self.variants.get(tuple(map(id, weights)))
        return known.run if known and known.fits(weights, self.options["freeze"]) else None

    def _made(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        if self.made == _MOST:
            return self.module
        if not self.made:
            self.held = self._unwritten(args)
        self.made += 1
        return self._optimized(args).run

    def _unwritten(self, args: tuple[Any, ...]) -> list[int]:
        graph = _copied(self.module, {})
        facts: Facts = observe(fx.GraphModule(self.module, graph), Call(args, {}))
        stored = [node.meta["fact"].storages for node in graph.find_nodes(op="placeholder")]
        return [i for i in self.held if not facts.any_written(stored[i])]

    def _optimized(self, args: tuple[Any, ...]) -> _Variant:
        snapshot = self._snapshot(args)
        weights = [args[i] for i in self.held]
        run = self._run(self._bound(snapshot), args)
        variant = _Variant(list(map(weakref.ref, weights)), _addresses(weights), snapshot, run)
        self.variants[tuple(map(id, weights))] = variant
        return variant

    def _snapshot(self, args: tuple[Any, ...]) -> nn.Module:
        """The weights whose changes will be seen, or do not count; by their places."""
        held = nn.Module()  # statistics as parameters too: those are copied on write
        held._parameters.update({str(i): args[i] for i in self.held})
        snapshot = undisturbed(lambda: structural_copy(held, share=False))
        if not self.options["freeze"]:
            self.held = [i for i in self.held if _torch._is_cow_tensor(args[i])]
        return snapshot

    def _run(self, bound: nn.Module, args: tuple[Any, ...]) -> Callable[..., Any]:
        free = [i for i in range(len(args)) if i not in self.held]
        call = Call(tuple(args[i] for i in free), {})
        front_ends: FrontEnds = {"dynamo": _capture}
        level, check = self.options["level"], self.options["check"]
        run = Run(bound, call, front_ends, level, check, self.passes)
        fast = undisturbed(run.result)
        log.info("%s", fast.report)
        if not isinstance(fast, OptimizedModule):
            return self.module.forward
        return lambda *args: fast(*[args[i] for i in free])

    def _bound(self, snapshot: nn.Module) -> fx.GraphModule:
        """The graph with its weights as attributes instead of arguments."""
        root = nn.Module()
        for name, child in self.module.named_children():
            root.add_module(name, child)
        for name, tensor in (*self.module._parameters.items(), *self.module._buffers.items()):
            hold(root, name, tensor)
        nodes = self.module.graph.find_nodes(op="placeholder")
        weights = {nodes[i]: snapshot.get_parameter(str(i)) for i in self.held}
        for node, weight in weights.items():
            hold(root, node.name, weight)
        module = fx.GraphModule(root, _copied(self.module, weights), "Dynamo")
        module.training = False  # what depends on it is in the graph already
        return module


def _is_held(node: fx.Node, value: Any) -> bool:
    """Whether an argument is a parameter or a buffer."""
    if type(value) not in (torch.Tensor, nn.Parameter):
        return False
    known = node.meta.get("tensor_dict") or {}
    static = isinstance(value, nn.Parameter) or "_dynamo_static_input_type" in known
    return static and value.layout is torch.strided


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(_torch._data_address, tensors))


def _copied(module: fx.GraphModule, weights: Any) -> fx.Graph:
    """A copy of a graph that reads `weights` off its owner."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node in weights:
            copies[node] = graph.get_attr(node.name)
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {"source": line_in(node.meta.get("stack_trace") or "")}
    return graph


def _capture(model: nn.Module, call: Call | None) -> fx.GraphModule:
    assert isinstance(model, fx.GraphModule)
    assert call is not None
    require(not any(map(_changes_a_mode, model.graph.nodes)), "it enters a mode")
    return adopt(fx.GraphModule(model, _copied(model, {}), "Dynamo"), call)


def _changes_a_mode(node: fx.Node) -> bool:
    """Whether a call takes no value and makes no tensor: set_grad_enabled, enter_autocast."""
    called = node.op == "call_function" and not node.all_input_nodes
    return called and node.target not in FACTORIES
