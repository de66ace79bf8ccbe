"""The graph of an `ExportedProgram`, as a captured one.

Export ran the model's Python once, so what that Python saw is baked into the program: sizes,
dtypes, devices, layouts, and the values of arguments that are no tensors. The graph begins with a
check of each of them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from optimizer.core.copy import structural_copy
from optimizer.core.errors import CaptureError, require
from optimizer.core.guards import expect_like, expect_structure, expect_value
from optimizer.core.inputs import Call, storages_in
from optimizer.core.node import attribute, line_in
from optimizer.facts.propagation import Facts
from optimizer.frontend.arguments import inputs_as_called, sees_how_it_is_called
from optimizer.frontend.aten import from_aten
from optimizer.frontend.symbolic import adopt

# What the ranges of sizes and the equality of symbols say already.
_SIZE = r"L\[\S+\]\.size\(\)\[\d+\]"
_IMPLIED = re.compile(rf"{_SIZE} == {_SIZE}|{_SIZE} (==|<|<=|>|>=) \d+|\d+ (<|<=) {_SIZE}")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _bound(model: nn.Module, call: Call) -> inspect.BoundArguments:
    return inspect.signature(model.forward).bind(*call.args, **call.kwargs)


def _passed(model: nn.Module, call: Call) -> Call:
    """What the forward is called with: as in the example, where it can see that."""
    bound = _bound(model, call)
    seen = sees_how_it_is_called(type(model).forward, call)
    return call if seen else Call(bound.args, bound.kwargs)


@contextmanager
def _as_capture_error() -> Iterator[None]:
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:  # whatever a user's forward does with fake tensors
        raise CaptureError(str(error).strip().split("\n")[0] or type(error).__name__) from error


@_as_capture_error()
def capture_program(program: Any, model: nn.Module, call: Call) -> fx.GraphModule:
    """The graph of an exported program behind the signature of its model, guarded.

    Raises:
        CaptureError: a part of it cannot be guarded, or is no plain call.
    """
    told = all(map(_IMPLIED.fullmatch, program._guards_code))
    require(told, "export found a condition on sizes that cannot be guarded")
    root = structural_copy(program.module(check_guards=False), share=False)
    inputs = root.graph.find_nodes(op="placeholder")
    graph = fx.Graph()
    values = _Inputs(graph, [node.meta["val"] for node in inputs], program.range_constraints)
    copies: dict[fx.Node, Any] = dict(zip(inputs, values.leaves(model, call), strict=True))
    for node in root.graph.nodes:
        if node.op == "output":
            flat = fx.node.map_arg(node.args[0], copies.__getitem__)
            graph.output(_held(graph, pytree.tree_unflatten(flat, program.call_spec.out_spec)))
        elif node.op != "placeholder":
            _require_plain(node)
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {"source": line_in(node.meta.get("stack_trace") or "")}
    module = fx.GraphModule(root, graph, type(model).__name__)
    module.training = model.training
    from_aten(graph)
    adopted = adopt(module, _passed(model, call))
    constants = program.graph_signature.lifted_tensor_constants  # export itself writes those
    fixed = [*root.parameters(), *(attribute(root, name) for name in constants)]
    require(not _writes(adopted, fixed), "it writes a tensor that is no buffer")
    return adopted


def _require_plain(node: fx.Node) -> None:
    operator = isinstance(node.target, torch._ops.OpOverload) or node.op == "get_attr"
    home = getattr(node.target, "__module__", "")
    require(operator or home in ("_operator", "math", "torch"), f"it enters {node.target}")
    asserts = node.target is torch.ops.aten._assert_scalar.default
    require(not asserts, "it asserts something of a number that it reads off the data")


def _writes(module: fx.GraphModule, tensors: list[torch.Tensor]) -> bool:
    facts: Facts = module.meta["facts"]
    return facts.any_written(storages_in(facts.to_meta(tensors)))


def _held(graph: fx.Graph, value: Any) -> Any:
    """A result as a graph can hold it."""
    if isinstance(value, list | tuple):
        require(type(value) in (list, tuple), f"it returns a {type(value).__name__}")
        return type(value)(_held(graph, item) for item in value)
    if isinstance(value, dict):
        require(type(value) in (dict, OrderedDict), f"it returns a {type(value).__name__}")
        items = {key: _held(graph, item) for key, item in value.items()}
        ordered = type(value) is OrderedDict
        return graph.call_function(OrderedDict, (list(items.items()),)) if ordered else items
    known = isinstance(value, fx.Node | int | float | str | None)
    require(known, f"it returns a {type(value).__name__}")  # a tree that the user registered
    return value


def _flat(call: Call) -> list[Any]:
    return [*call.args, *call.kwargs.values()]


class _Inputs:
    """The arguments of a graph, and a check of all that export took from the examples."""

    def __init__(self, graph: fx.Graph, fakes: list[Any], ranges: Any) -> None:
        self.graph, self.fakes, self.ranges = graph, iter(fakes), ranges
        self.symbols: dict[Any, tuple[fx.Node, int]] = {}

    def leaves(self, model: nn.Module, call: Call) -> list[fx.Node]:
        """What stands for each input of the program, in order."""
        if sees_how_it_is_called(type(model).forward, call):
            inputs = inputs_as_called(self.graph, call)
            pairs = zip(_flat(inputs), _flat(call), strict=True)
            return [leaf for node, value in pairs for leaf in self._leaves_of(node, value)]
        bound = _bound(model, call)
        given = bound.arguments
        plain = [p for p in bound.signature.parameters.values() if p.kind not in _VARIADIC]
        nodes = [self.graph.placeholder(p.name, default_value=p.default) for p in plain]
        leaves = []
        for node, parameter in zip(nodes, plain, strict=True):
            if parameter.name in given:
                leaves += self._leaves_of(node, given[parameter.name])
            else:
                self._expect(expect_value, node, parameter.default)
        return leaves

    def _leaves_of(self, node: fx.Node, value: Any) -> list[fx.Node]:
        leaves, structure = pytree.tree_flatten(value)
        parts = [node]
        if leaves != [value]:
            whole = self._expect(expect_structure, node, str(structure))
            parts = [self._part(whole, f"{node.name}_{i}", i) for i in range(len(leaves))]
        for part, leaf, fake in zip(parts, leaves, self.fakes, strict=False):
            if isinstance(leaf, torch.Tensor):
                like = (fake.dtype, fake.device, leaf.is_contiguous())
                self._expect(expect_like, part, tuple(self._sizes(part, fake)), *like)
            else:
                self._expect(expect_value, part, leaf)
        return parts

    def _part(self, whole: fx.Node, name: str, index: int) -> fx.Node:
        return self.graph.create_node("call_function", getitem, (whole, index), {}, name)

    def _expect(self, guard: Any, node: fx.Node, *expected: Any) -> fx.Node:
        return self.graph.call_function(guard, (node, *expected, node.name))

    def _sizes(self, node: fx.Node, fake: torch.Tensor) -> Iterator[Any]:
        """Each size: a number, another input's, or the least and the greatest that it may be."""
        for dimension, size in enumerate(fake.shape):
            symbol = size.node.expr if isinstance(size, torch.SymInt) else None
            if symbol is None:
                yield size
            elif symbol in self.symbols:
                yield self.graph.call_method("size", self.symbols[symbol])
            else:
                self.symbols[symbol] = node, dimension
                bounds = self.ranges[symbol]
                yield int(bounds.lower), int(min(bounds.upper, sys.maxsize))
