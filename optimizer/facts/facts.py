"""The facts that passes ask for: shape, dtype, shared storage, who reads and writes it.

To ask for a fact that is not known is to be refused (`Refused`), so a rewrite whose safety
argument needs it does not fire and the report says why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.guards import GUARDS
from optimizer.core.inputs import storages_in
from optimizer.core.node import (
    attribute_of,
    called_on,
    callee,
    describe,
    has_plain_tensors,
    is_plain,
    module_of,
    tensors_of,
)
from optimizer.core.ops import INPLACE_OPERATORS, LAYOUTS, LINEAR_LAYERS, add_over, mul_over
from optimizer.facts.effects import runs_known_code
from optimizer.facts.propagation import Fact, Facts


class Refused(Exception):  # noqa: N818 - a remark in the report, not an error
    """A rewrite's safety argument does not hold here; the message says why."""


def facts_of(graph: fx.Graph) -> Facts | None:
    """The facts of a graph, or None where it was captured without example inputs."""
    return graph.owning_module.meta.get("facts") if graph.owning_module is not None else None


def fact(node: fx.Node) -> Fact:
    """All that is known of a node."""
    known = node.meta.get("fact")
    if known is None:
        raise Refused("the graph was captured without example inputs")
    if known.error:
        raise Refused(f"'{node.name}' has no known shape: {known.error}")
    return known  # type: ignore[no-any-return]


def tensor(node: fx.Node) -> torch.Tensor:
    """A meta tensor with the shape, dtype and strides of a node's value."""
    value = fact(node).value
    if not isinstance(value, torch.Tensor):
        raise Refused(f"'{node.name}' is not a tensor")
    return value


def rank(node: fx.Node) -> int:
    """The number of dimensions of a node's value; a rewrite that asks is guarded by it."""
    return _guarded(node, "rank").dim()


def dtype(node: fx.Node) -> torch.dtype:
    """The dtype of a node's value; a rewrite that asks is guarded by it."""
    return _guarded(node, "dtype").dtype


def _guarded(node: fx.Node, kind: str) -> torch.Tensor:
    value, facts = tensor(node), facts_of(node.graph)
    assert facts is not None
    if kind == "rank" and fact(node).rank_varies:
        raise Refused("its rank depends on sizes, through a squeeze")
    for given in fact(node).inputs:
        example = given.meta["fact"].value
        if isinstance(example, torch.Tensor):
            facts.asked.add((kind, given))
        elif isinstance(example, list | tuple | dict):
            raise Refused(f"it rests on the {kind} of tensors inside the input '{given.name}'")
    return value


def rely_on_asked(graph: fx.Graph) -> None:
    """Keep the guards that were requested: a rewrite that fired rests on them."""
    facts = facts_of(graph)
    if facts is not None:
        facts.relied |= facts.asked


def aliases(node: fx.Node) -> Iterator[fx.Node]:
    """The other nodes whose values share storage with this one's, or may do so."""
    facts = facts_of(node.graph)
    for storage in fact(node).storages:
        for holder in facts.holders[storage] if facts else ():
            if holder is not node and not holder._erased and holder.op != "output":
                yield holder
            yield from (user for user in holder.users if user.meta["fact"].error)


def is_external(node: fx.Node) -> bool:
    """Whether a node's value is seen from outside: an input, a parameter, a buffer, a view."""
    facts = facts_of(node.graph)
    return facts is None or not facts.external.isdisjoint(fact(node).storages)


def is_fresh(node: fx.Node) -> bool:
    """Whether a value was made here: it is no view, no input and no part of the model."""
    written = node.kwargs.get("out")  # the result is that very tensor
    if isinstance(written, fx.Node):
        return is_fresh(written)
    return not is_external(node) and all(node < other for other in aliases(node))


def is_unchanged(node: fx.Node, since: fx.Node, until: fx.Node | None = None) -> bool:
    """Whether no node between two, or until the end, writes a value; inputs may be one tensor."""
    end = until or node.graph.output_node()
    facts, held = facts_of(node.graph), fact(node).storages
    assert facts is not None
    if is_external(node):
        held |= facts.external & facts.writers.keys()
    writers = (each for storage in held for each in facts.writers.get(storage, ()))
    return not any(since < each < end and not each._erased for each in writers)


def _exposed(graph: fx.Graph, facts: Facts) -> set[int]:
    """The storages that outlive a call which a node writes, or a caller may: it gets them."""
    output: Fact = graph.output_node().meta["fact"]
    written = facts.external & facts.writers.keys()
    return facts.external & output.storages | {n for n in written if facts.any_written((n,))}


def is_returned(node: fx.Node) -> bool:
    """Whether a call returns a node's value, or a view of it."""
    output: Fact = node.graph.output_node().meta["fact"]
    return not fact(node).storages.isdisjoint(output.storages | output.writes)


def is_written(node: fx.Node) -> bool:
    """Whether a node or a caller may write the tensors of the module that this one calls."""
    if has_plain_tensors(module_of(node)):  # of those nothing is known
        return True
    facts, held = facts_of(node.graph), tensors_of(module_of(node))
    if facts is None:
        read = {id(attribute_of(n)) for n in node.graph.nodes if n.op == "get_attr"}
        return any(id(tensor) in read for tensor in held)
    exposed = _exposed(node.graph, facts)
    return bool(exposed) and not exposed.isdisjoint(storages_in(facts.to_meta(held)))


def is_read_only(node: fx.Node) -> bool:
    """Whether no node writes a value or its storage, nor may a caller, who gets it."""
    facts = facts_of(node.graph)
    if facts is not None:
        written = facts.any_written(fact(node).storages)
        return not written and fact(node).storages.isdisjoint(_exposed(node.graph, facts))
    return all(user.target in _ONLY_READ for user in node.users)


_ONLY_READ = (F.linear, F.conv1d, F.conv2d, F.conv3d)
_PURE_BY_DEFINITION = (*LAYOUTS, *LINEAR_LAYERS, nn.Identity)


def is_pure(node: fx.Node) -> bool:
    """Whether a node does nothing but yield its value, so that it may go when none reads it."""
    known: Fact | None = node.meta.get("fact")
    if known is None:
        return callee(node) in _PURE_BY_DEFINITION
    nothing = known.value is None  # a guard, for one; what is not known may write all it is given
    if known.writes or known.random or nothing:
        return False
    if node.op == "call_method":  # of a list or a dict may change it, and no ATen operator tells
        given = node.args[0].meta["fact"].value if isinstance(node.args[0], fx.Node) else None
        return isinstance(given, torch.Tensor)
    kinds = ("get_attr", "call_module", "call_function")
    return node.op in kinds and runs_known_code(node) and node.target not in INPLACE_OPERATORS


def computation(last: fx.Node, accepts: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """All nodes that a value is computed from, in order; none if one of them is not accepted."""
    found: set[fx.Node] = set()
    pending = [last]
    while pending:
        node = pending.pop()
        if not accepts(node):
            return []
        found.add(node)
        pending += [each for each in node.all_input_nodes if each not in found]
    return sorted(found)


def value_of(nodes: list[fx.Node], given: Callable[[Any], Any]) -> Any:
    """What the last of some nodes yields, on the tensors and modules that `given` makes of them."""
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        reads = node.op in ("get_attr", "call_module")
        held = given(attribute_of(node)) if reads else None
        values[node] = held if node.op == "get_attr" else called_on(node, held, args, kwargs)
    return values[nodes[-1]]


# They always make a tensor, a dense one, and do not keep it for a backward pass.
_MAKERS = (
    *LINEAR_LAYERS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm,
    operator.matmul, torch.matmul, torch.bmm, torch.cat, operator.add, operator.mul, torch.add,
    torch.mul, add_over, mul_over,
)  # fmt: skip


def is_spare(value: object) -> bool:
    """Whether a value is a new tensor, of which no view exists, and read by one node only."""
    if not isinstance(value, fx.Node) or callee(value) not in _MAKERS:
        return False
    return len(value.users) == 1 and "out" not in value.kwargs


def obstacle(graph: fx.Graph) -> str:
    """Why a graph must run as it is, as one that writes an attribute; empty if it need not."""
    facts = facts_of(graph)
    if facts is None:
        return "nothing is known of the graph"
    inputs = [fact(node).storages for node in graph.find_nodes(op="placeholder")]
    held = facts.external.difference(*inputs)
    for node in graph.nodes:
        if not node.op.startswith("call") or node.target in GUARDS:
            continue
        known: Fact | None = node.meta.get("fact")
        if known is None or known.error:
            return f"nothing is known of what '{node.name}' does"
        if known.random:
            return f"'{node.name}' draws random numbers"
        if not held.isdisjoint(known.writes):
            return f"'{node.name}' writes an attribute"
        plain = node.op != "call_module" or all(map(is_plain, module_of(node).modules()))
        if not (plain and runs_known_code(node)):
            return f"'{node.name}' runs code that may do more ({describe(node)})"
    return ""
