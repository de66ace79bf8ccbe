"""Attention that is spelled out as one call, where what joins its scores is the same in each.

softmax(a * (q @ k^T) + b) @ v is scaled_dot_product_attention(a * q, k, v, b), which never holds
all scores at once. Here b are constants: a bias by relative positions, a mask of windows or of
what comes later. So it can be seen that no query is hidden from all keys, for which eager has NaN
and torch's attention zeros. Code that runs for other sizes and weights cannot see it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional as F

from optimizer._graph import is_attribute
from optimizer.lowering._regions import extract, name_of, named_arguments, result_of

_MATMULS = ("matmul", "__matmul__")
_SUMS = ("add", "__add__", "__radd__", "sub", "__sub__", "masked_fill")
_PRODUCTS = ("mul", "__mul__", "__rmul__", "div", "__truediv__")
_COMMUTE = ("add", "mul")
_VIEWS = ("view", "reshape", "unsqueeze", "squeeze", "flatten")
_MOVES = ("transpose", "permute", "contiguous", "reshape", "flatten")
_SOFTMAX = {"input": None, "dim": None, "_stacklevel": 3, "dtype": None}


@dataclass(frozen=True)
class _Attention:
    """What is read, and what happens to q and k, to the scores, and to the result."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    factors: list[fx.Node]
    scores: fx.Node
    steps: list[fx.Node]
    weights: fx.Node
    root: fx.Node
    moves: list[fx.Node]

    def nodes(self) -> list[fx.Node]:
        """All of it, in the order of the graph."""
        own = {*self.factors, self.scores, *self.steps, self.weights, self.root, *self.moves}
        return [node for node in self.root.graph.nodes if node in own]


def extract_attention(outer: fx.GraphModule) -> None:
    """Make of each attention that can be one call a GraphModule that the code calls."""
    for place, found in enumerate(list(_attentions(outer.graph))):
        nodes = found.nodes()
        constants = (arg for node in nodes for arg in node.all_input_nodes if is_attribute(arg))
        extract(outer, nodes, f"attention_{place}", constants)


def holds_attention(region: fx.GraphModule) -> bool:
    """Whether there is an attention that can be one call."""
    return any(_attentions(region.graph))


def as_one_call(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The same region, which is one attention, as one call for inputs of these shapes.

    Raises:
        ValueError: torch has no faster kernel for it, or it cannot be one call.
    """
    module = fx.GraphModule(region, copy.deepcopy(region.graph))
    (found,) = _attentions(module.graph)
    ShapeProp(module).propagate(*inputs)
    _require_kernel(found)
    factor, bias = _on_scores(found, inputs[0].device)
    module.register_buffer("factor", factor)
    module.register_buffer("bias", bias)
    with module.graph.inserting_before(found.root):
        found.root.replace_all_uses_with(_one_call(found, factor))
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        (made,) = output.all_input_nodes
        output.args = ((module.graph.call_method("contiguous", (made,)),),)  # it may be viewed
    module.graph.eliminate_dead_code()
    return fx.GraphModule(module, module.graph)


def _one_call(found: _Attention, factor: torch.Tensor) -> fx.Node:
    graph, q, scale = found.root.graph, found.q, 1.0
    if factor.numel() == 1:
        scale = factor.item()
    else:
        q = graph.call_function(torch.mul, (q, graph.get_attr("factor")))
    k = graph.call_method("transpose", (found.k, -2, -1))
    options: dict[str, Any] = {"attn_mask": graph.get_attr("bias"), "scale": scale}
    return graph.call_function(F.scaled_dot_product_attention, (q, k, found.v), options)


def _attentions(graph: fx.Graph) -> Iterator[_Attention]:
    for node in graph.nodes:
        found = _attention(node) if name_of(node) in _MATMULS else None
        if found is not None:
            yield found


def _attention(root: fx.Node) -> _Attention | None:
    weights: Any
    weights, v = root.args if len(root.args) == 2 else (None, None)
    if not _is_softmax(weights) or len(weights.users) > 1 or not isinstance(v, fx.Node):
        return None
    scores, steps = _before(weights.args[0], _SUMS + _PRODUCTS + _VIEWS)
    joined = any(name_of(step) in _SUMS for step in steps)
    if not joined or name_of(scores) not in _MATMULS or len(scores.users) > 1 or scores.kwargs:
        return None
    (q, of_q), (k, of_k) = (_before(arg, _PRODUCTS, numbers=True) for arg in scores.args)
    return _Attention(q, k, v, of_q + of_k, scores, steps, weights, root, _after(root))


def _is_softmax(node: Any) -> bool:
    """Whether it is a softmax over the keys, of four dimensions if it says 3."""
    if not isinstance(node, fx.Node) or name_of(node) != "softmax" or not node.args:
        return False
    given = named_arguments(node, _SOFTMAX)
    third_is_no_dtype = given["_stacklevel"] == 3  # as it is for torch.softmax and a tensor's
    return given["dim"] in (-1, 3) and third_is_no_dtype and given["dtype"] is None


def _before(node: Any, names: Sequence[str], *, numbers: bool = False) -> tuple[Any, list[fx.Node]]:
    """Where a chain of such calls begins, each of which only the next one reads; and the chain."""
    steps = list[fx.Node]()
    while isinstance(node, fx.Node) and name_of(node) in names and len(node.users) == 1:
        source = _value(node)
        if source is None or (numbers and len(node.all_input_nodes) > 1):
            break
        steps.insert(0, node)
        node = source
    return node, steps


def _value(step: fx.Node) -> fx.Node | None:
    """The value that a call reads, if all else are numbers and constants."""
    values = [arg for arg in step.args if isinstance(arg, fx.Node) and not is_attribute(arg)]
    if step.kwargs or len(values) != 1:
        return None
    if name_of(step) == "masked_fill" and step.args[2] != -math.inf:
        return None  # a number in place of the scores is not one that joins them
    return values[0] if values[0] is step.args[0] or name_of(step) in _COMMUTE else None


def _after(root: fx.Node) -> list[fx.Node]:
    """The moves that alone read it, one after another.

    They are part of it because torch's attention lays its result out as q: mostly so that what
    would copy it has nothing to do.
    """
    moves, node = list[fx.Node](), root
    while len(node.users) == 1 and name_of(next(iter(node.users))) in _MOVES:
        (node,) = node.users
        moves.append(node)
    return moves


def _require_kernel(found: _Attention) -> None:
    """On CPUs, torch has one of its own for four dimensions and heads of one size."""
    q, k, v = (each.meta["tensor_meta"].shape for each in (found.q, found.k, found.v))
    if not (len(q) == 4 and q[:2] == k[:2] == v[:2] and q[3] == v[3]):
        raise ValueError("torch has no faster kernel for it")


def _on_scores(found: _Attention, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What the product of q and k is multiplied with, a number or one a head, and what joins it."""
    made = found.scores.meta["tensor_meta"]
    factor = torch.ones(made.shape, dtype=made.dtype, device=device)
    bias = torch.zeros_like(factor)
    for step in found.steps:
        bias = result_of(step, bias)
        factor = factor if name_of(step) in _SUMS else result_of(step, factor)
    for step in found.factors:
        factor = result_of(step, factor)
    if bias.shape != made.shape or bias.dtype != made.dtype:
        raise ValueError("its scores change their shape or dtype")
    if not bias.amax(-1).isfinite().all():
        raise ValueError("a query may be hidden from all keys")
    factor, bias = _without_repeats(factor), _without_repeats(bias)
    if factor.shape[2:].numel() > 1:
        raise ValueError("its scores have factors of their own")
    return factor, bias


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """One of each dimension along which the values repeat; it broadcasts to what it was."""
    for dim in range(tensor.dim()):
        first = tensor.narrow(dim, 0, 1)
        tensor = first if torch.equal(first.expand_as(tensor), tensor) else tensor
    return tensor.contiguous()
