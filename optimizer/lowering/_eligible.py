"""Which graphs may be lowered: those whose calls do nothing but compute their output."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from optimizer._facts import facts_of, is_trusted
from optimizer._graph import describe, is_plain, module_of
from optimizer._guards import GUARDS
from optimizer._observation import Fact, Facts


def obstacle(graph: fx.Graph) -> str:
    """Why a graph must run as it is; empty if it need not.

    A value of the graph may be written, an input or an attribute may not.
    """
    facts = facts_of(graph)
    if facts is None:
        return "nothing is known of the graph"
    return next((text for node in graph.nodes for text in _obstacles(node, facts)), "")


def _obstacles(node: fx.Node, facts: Facts) -> Iterator[str]:
    if node.op in ("placeholder", "output", "get_attr") or node.target in GUARDS:
        return
    known: Fact | None = node.meta.get("fact")
    if known is None or known.error:
        yield f"nothing is known of what '{node.name}' does"
    elif known.random:
        yield f"'{node.name}' draws random numbers"
    elif not facts.external.isdisjoint(known.writes):
        yield f"'{node.name}' writes an input or an attribute"
    elif not _is_known_code(node):
        yield f"'{node.name}' runs code that may do more ({describe(node)})"


def _is_known_code(node: fx.Node) -> bool:
    if node.op == "call_module":
        module = module_of(node)
        return is_trusted(type(module)) and all(map(is_plain, module.modules()))
    return node.op == "call_method" or node.target is getattr or is_trusted(node.target)
