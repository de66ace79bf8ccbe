"""What is computed twice, in vain, or to the same value."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.guards import key_of
from optimizer.core.node import arg
from optimizer.facts.facts import (
    aliases,
    facts_of,
    is_fresh,
    is_pure,
    is_read_only,
    is_returned,
    is_unchanged,
    is_written,
)
from optimizer.rewrite.contract import call, require, rewrite, whole_graph

DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
)  # fmt: skip


@rewrite(call(name="again"), numerics="exact", phase="simplify")
def eliminate_common_subexpressions(again: fx.Node) -> fx.Node | None:
    """Compute once what is computed twice from the same values.

    f(x), f(x) -> one f(x), read twice.

    The two call the same function, or the same module, with the same arguments: numbers of
    one type with the same bits, since x + 1 and x + 1.0, or x / 0.0 and x / -0.0, differ. It
    does nothing but yield its value and draws no random number, and nothing that it reads is
    written in between. That the results are one tensor is seen only by who writes one of
    them: no node does, and the caller gets at most one.
    """
    first = _twin(again)
    if first is None or not is_pure(again):
        return None
    unchanged = all(is_unchanged(given, first, again) for given in again.all_input_nodes)
    of_constants = again.op != "call_module" or not is_written(again)
    read_only = is_read_only(first) and is_read_only(again)
    require(unchanged and of_constants, "what it reads may be written in between")
    require(read_only, "a result is written, which the other must not see")
    require(not (is_returned(first) and is_returned(again)), "both are returned")

    return first


def _twin(again: fx.Node) -> fx.Node | None:
    """An earlier call of the same on the same, whose result is no list that may be filled."""
    facts = facts_of(again.graph)
    if facts is None or not again.all_input_nodes:
        return None
    if isinstance(again.meta["fact"].value, list | dict):
        return None
    call_of_again = _call(again)
    first = facts.calls.setdefault(call_of_again, again)
    if first is not again and _call(first) == call_of_again and first < again:
        return first
    facts.calls[call_of_again] = again
    return None


def _call(node: fx.Node) -> Any:
    return node.op, node.target, key_of((node.args, node.kwargs))


@whole_graph(numerics="exact", phase="simplify")
def eliminate_dead_code(graph: fx.Graph) -> list[fx.Node]:
    """Remove nodes whose value nobody reads and that do nothing else.

    A value that nobody reads is not computed, unless computing it does something else.

    A node does something else if one of its operators writes a tensor that outlives it or
    draws a random number (read off the operators' schemas), if it is Python code of unknown
    effect, or if it is an assertion. Readers go before what they read, so one sweep ends it.
    """
    dead = []
    for node in reversed(graph.nodes):
        if not node.users and is_pure(node):
            graph.erase_node(node)
            dead.append(node)
    return dead


@rewrite(call("clone", torch.clone, name="clone"), numerics="exact", phase="simplify")
def remove_clones(clone: fx.Node) -> fx.Node | None:
    """Read a value instead of its copy, where neither of them is written or seen from outside.

    f(clone(x)) -> f(x), where nobody can tell the copy from x.

    A copy keeps what x was while x or the copy changes. Here nothing writes the copy, and after
    the copy nothing writes x, also not what is needed for a gradient. No view of the copy is
    taken and none is returned, so that all its readers compute with its numbers only. A value
    that was made here lies densely in memory, and its copy in the same way.
    """
    source = arg(clone, 0)
    if len(clone.args) != 1 or clone.kwargs or not isinstance(source, fx.Node):
        return None
    require(is_fresh(source), "what is copied was not made here, and may lie anyhow in memory")
    require(not is_returned(clone) and not any(aliases(clone)), "the copy or a view of it is seen")
    require(is_read_only(clone), "the copy is written")
    require(is_unchanged(source, clone), "what is copied is written later")

    return source


@rewrite(call(nn.Identity, *DROPOUTS, name="identity"), numerics="exact", phase="simplify")
def remove_identities(identity: fx.Node) -> fx.Node:
    """Remove Identity, and the Dropouts and StochasticDepth that are not in training mode.

    dropout(x) -> x and identity(x) -> x, in inference.

    Outside training each of them returns its input, the very same tensor: not even a writer
    or a reader of the alias can tell it from what it was given.
    """
    training = identity.op == "call_function" and arg(identity, 2) is not False
    require(not training, "it is in training mode and drops values")
    source: fx.Node = arg(identity, 0)
    require(isinstance(source, fx.Node), "its input is a constant")

    return source
