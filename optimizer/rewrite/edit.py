"""Adding calls to a graph, with their facts, and re-pointing readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from optimizer.core.literals import literal
from optimizer.core.node import fresh_name, owner
from optimizer.facts.facts import Refused, facts_of


def insert_function(
    before: fx.Node, target: Callable[..., Any] | str, args: tuple[Any, ...], **kwargs: Any
) -> fx.Node:
    """Call a function, or a method by its name, just before a node.

    The new node stands for `before` in the report.

    Raises:
        Refused: code cannot name one of the arguments.
    """
    try:
        args, kwargs = literal((args, kwargs))
    except TypeError as error:
        raise Refused(str(error)) from error
    kind = "call_method" if isinstance(target, str) else "call_function"
    with before.graph.inserting_before(before):
        return _described(before.graph.create_node(kind, target, args, kwargs), before)


def insert_module(
    before: fx.Node,
    module: nn.Module,
    args: tuple[Any, ...],
    stem: str,
    *,
    like: fx.Node | None = None,
) -> fx.Node:
    """Call a new module just before a node, under a fresh name close to `stem`.

    Args:
        before: where to insert the call.
        module: what to call.
        args: its positional arguments.
        stem: a name, made fresh if it is taken.
        like: a node whose result has the same shape, dtype and strides, if there is one; else
            the call is run on meta tensors to find out.
    """
    name = fresh_name(owner(before), stem)
    owner(before).add_submodule(name, module)
    return call_module(before, name, args, like=like)


def call_module(
    before: fx.Node, name: str, args: tuple[Any, ...], *, like: fx.Node | None = None
) -> fx.Node:
    """Call the module that the graph's owner has under `name`, just before a node."""
    with before.graph.inserting_before(before):
        return _described(before.graph.call_module(name, args), before, like)


def insert_copy(before: fx.Node, node: fx.Node, operand: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Call what a node calls once more, on other operands, just before a node."""
    with node.graph.inserting_before(before):
        return _described(node.graph.node_copy(node, operand), node)


def insert_buffer(before: fx.Node, value: torch.Tensor, stem: str) -> fx.Node:
    """Read a new buffer just before a node, under a fresh name close to `stem`."""
    name = fresh_name(owner(before), stem)
    owner(before).register_buffer(name, value)
    with before.graph.inserting_before(before):
        return _described(before.graph.get_attr(name), before)


def _described(node: fx.Node, origin: fx.Node, like: fx.Node | None = None) -> fx.Node:
    source, made_from = origin.meta.get("source", ""), origin.meta.get("made_from", (origin.name,))
    node.meta.update(new=True, source=source, made_by="", made_from=made_from)
    facts = facts_of(node.graph)
    if facts is not None and like is not None:
        facts.record(node, like.meta["fact"])
    elif facts is not None:
        facts.evaluate(node)
    return node


def erase_run(root: fx.Node, inner: Iterable[fx.Node]) -> None:
    """Erase calls that are read by one another and by a node that is about to be replaced."""
    root.args, root.kwargs = (), {}
    for node in sorted(inner, reverse=True):
        node.graph.erase_node(node)


def replace_later_uses(node: fx.Node, replacement: fx.Node, after: fx.Node) -> None:
    """Let every reader of a private `node` that runs after `after` read `replacement` instead."""
    facts = facts_of(node.graph)
    if facts is not None:
        facts.rename_after(replacement, node)
    for user in list(node.users):
        if after < user:
            user.replace_input_with(node, replacement)


def supersede(node: fx.Node, replacement: fx.Node) -> None:
    """Let every reader of a node read `replacement` instead; the node goes."""
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)
