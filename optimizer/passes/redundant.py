"""What is computed twice, in vain, to the same value, or anew in each call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.errors import Refused, require
from optimizer.core.guards import key_of
from optimizer.core.node import adopt, arg, attribute_of, computation, owner, run_nodes, tensors_of
from optimizer.facts.facts import (
    aliases,
    fact,
    facts_of,
    is_external,
    is_fresh,
    is_pure,
    is_read_only,
    is_returned,
    is_unchanged,
    tensor,
    weights_exposed,
)
from optimizer.rewrite.contract import call, rewrite, whole_graph
from optimizer.rewrite.edit import insert

DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
)  # fmt: skip
MAY_GROW_TO = 1 << 20  # bytes


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
    unchanged = all(is_unchanged(node, first, again) for node in again.all_input_nodes)
    of_constants = again.op != "call_module" or not weights_exposed(again)
    read_only = is_read_only(first) and is_read_only(again)
    require(unchanged and of_constants, "what it reads may be written in between")
    require(read_only, "a result is written, which the other must not see")
    require(not (is_returned(first) and is_returned(again)), "both are returned")

    return first


def _twin(again: fx.Node) -> fx.Node | None:
    """Return an earlier call of the same on the same, unless its result is a list or dict."""
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
    """Remove nodes whose value is not read and that do nothing else.

    A value that is not read is not computed, unless one of its operators writes a tensor that
    outlives it or draws a random number, as their schemas tell, or it is Python code of unknown
    effect or an assertion. Readers go before what they read, so one sweep ends it.
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

    f(clone(x)) -> f(x), where the copy cannot be told from x.

    Nothing writes the copy, and after it nothing writes x, also not what a gradient needs. No view
    of the copy is taken or returned: its readers compute with its numbers only. A value that was
    made here lies densely in memory, and its copy in the same way.
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


@rewrite(call(name="last"), numerics="exact", phase="simplify")
def fold_constants(last: fx.Node) -> fx.Node | None:
    """Compute once what depends on no input, and keep it as a buffer.

    f(constants) -> one constant, computed once.

    The graph's own operators run on the model's own tensors, where those lie, and so yield the
    bits of every call: they draw nothing, and no node writes what they read. What a call
    writes or returns stays its own. A buffer is moved and cast with the model, so the result
    must be one that a cast of the model would cast. No gradient reaches what was folded, as
    with all folded weights; in training mode nothing that learns is. A view costs nothing and
    is left; so is what is refused, though not the constants that it reads.
    """
    if not _is_constant(last) or all(map(_is_folded, last.users)):
        return None
    if not (nodes := _foldable(last)):
        return None
    with torch.no_grad():
        value = _value_of(nodes, lambda each: each)
    require(value.dtype == tensor(last).dtype, "autocast gives it another dtype")
    return insert(last, "get_attr", adopt(last.graph, f"{last.name}_folded", value))


def _is_constant(node: fx.Node) -> bool:
    result = node.meta.get("fact")
    computed = node.op == "get_attr" or (node.op.startswith("call") and node.all_input_nodes)
    return bool(computed and result and not result.inputs) and is_pure(node)


def _is_folded(user: fx.Node) -> bool:
    """Return whether a reader of a constant is about to be folded together with it."""
    try:
        return bool(_foldable(user))
    except Refused:
        return False


def _foldable(last: fx.Node) -> list[fx.Node]:
    """Return the nodes that make a new tensor of nothing but the model's own, if they do."""
    nodes = computation(last, _is_constant)
    if not nodes or not isinstance(fact(last).value, torch.Tensor) or is_external(last):
        return []
    attributes = [attribute_of(n) for n in nodes if n.op in ("get_attr", "call_module")]
    tensors = ([a] if isinstance(a, torch.Tensor) else tensors_of(a) for a in attributes)
    read = {id(each): each for several in tensors for each in several}.values()
    written = (not is_read_only(n) or (n.op == "call_module" and weights_exposed(n)) for n in nodes)
    learns = owner(last).training and any(each.requires_grad for each in read)
    require(not any(written), "the forward writes it, or what it is made of")
    require(not is_returned(last), "it is returned, and so has to be new in each call")
    require(not learns, "the model is in training mode, and may be learning it")
    small = _bytes(tensor(last)) <= max(MAY_GROW_TO, sum(map(_bytes, read)))
    require(small, "it is larger than what it is made of")
    require(_follows_the_model(nodes), "it would not be cast or moved with the model")
    return nodes


def _value_of(nodes: list[fx.Node], convert: Callable[[Any], Any]) -> Any:
    """Return the value of the last node, run on what `convert` makes of tensors and modules."""
    *_, (_, value) = run_nodes(nodes, {}, lambda node: convert(attribute_of(node)))
    return value


def _bytes(value: torch.Tensor) -> int:
    return max(value.numel() * value.element_size(), value.untyped_storage().nbytes())


def _follows_the_model(nodes: list[fx.Node]) -> bool:
    """Return whether a cast or move of the model does to the result what it does to a buffer."""
    value, facts = tensor(nodes[-1]), facts_of(nodes[-1].graph)
    other = torch.float32 if value.dtype == torch.float64 else torch.float64

    def cast(part: Any) -> Any:
        moved = copy.deepcopy(facts.to_meta(part)) if facts else part
        return moved.to(other) if isinstance(part, nn.Module) or part.is_floating_point() else moved

    try:
        result = _value_of(nodes, cast)
    except Exception:  # an operator that takes no other dtype
        return False
    follows = result.dtype == (other if value.is_floating_point() else value.dtype)
    return result.is_meta and follows and not value.is_complex()
