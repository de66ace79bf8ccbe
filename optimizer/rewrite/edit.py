"""Calls added to a graph or put in the place of others, and what their readers read then.

What passes insert has facts; `insert_call` is for a graph without any.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn
from torch.fx.operator_schemas import get_signature_for_torch_op

from optimizer.core.errors import InputError
from optimizer.core.node import adopt, module_of
from optimizer.core.ops import MAKE_A_TENSOR, writes
from optimizer.facts.facts import facts_of, runs_known_code
from optimizer.frontend.names import literal

_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def insert(before: fx.Node, kind: str, *call: Any, like: fx.Node | None = None) -> fx.Node:
    """Put a new node just before one that it replaces: its kind, its target and its arguments.

    The result has the shape, dtype and strides of that of `like`, or those that a run tells.
    """
    with before.graph.inserting_before(before):
        return _described(before.graph.create_node(kind, *call), before, like)


def insert_function(
    before: fx.Node, target: Callable[..., Any] | str, args: tuple[Any, ...], **kwargs: Any
) -> fx.Node:
    """Call a function, or a method by its name, just before a node that it replaces."""
    args, kwargs = literal((args, kwargs))
    kind = "call_method" if isinstance(target, str) else "call_function"
    return insert(before, kind, target, args, kwargs)


def insert_module(
    before: fx.Node,
    module: nn.Module,
    args: tuple[Any, ...],
    stem: str,
    *,
    like: fx.Node | None = None,
) -> fx.Node:
    """Call a new module just before a node, under a fresh name close to `stem`."""
    name = adopt(before.graph, stem, module)
    return insert(before, "call_module", name, args, like=like)


def insert_copy(before: fx.Node, node: fx.Node, operand: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Call what a node calls once more, on other operands, just before a node."""
    with node.graph.inserting_before(before):
        return _described(node.graph.node_copy(node, operand), node)


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
    node.replace_all_uses_with(replacement, lambda user: after < user)


def supersede(node: fx.Node, replacement: fx.Node) -> None:
    """Let every reader of a node read `replacement` instead; the node goes."""
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def insert_call(
    root: fx.GraphModule, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.Node:
    """Call a method by its name, a module, a new module of a class, or a function."""
    if not (callable(target) or hasattr(torch.Tensor, str(target))):
        raise InputError(f"a tensor has no method '{target}': name one that it has.")
    if isinstance(target, str):
        return root.graph.call_method(target, args, kwargs)
    if isinstance(target, type) and issubclass(target, nn.Module):
        try:
            target = target().train(root.training)
        except TypeError as error:
            raise InputError(f"{target.__name__} needs arguments: pass a module.") from error
    _require_takes(target, args, kwargs)
    if isinstance(target, nn.Module):
        name = adopt(root.graph, type(target).__name__.lower(), target)
        return root.graph.call_module(name, args, kwargs)
    return root.graph.call_function(target, args, kwargs)


def _require_takes(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    choices = signatures(target)
    for signature in choices:
        with suppress(TypeError):
            signature.bind(*args, **kwargs)
            return
    if choices:
        name = getattr(target, "__name__", type(target).__name__)
        shown = ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])
        raise InputError(f"{name} does not take ({shown}): use toolkit.decompose with a rule.")


def signatures(target: Any) -> list[inspect.Signature]:
    """Return the ways to call a module or function, as far as they are known."""
    try:
        return [inspect.signature(target.forward if isinstance(target, nn.Module) else target)]
    except ValueError:  # a builtin; torch knows its own
        overloads: list[inspect.Signature] | None = get_signature_for_torch_op(target)
        return overloads or []


def operands(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments without those that are defaults, and without the in-place mark."""
    bound = _bound_arguments(node)
    if bound is None:
        return node.args, dict(node.kwargs)
    default = {name: each.default for name, each in bound.signature.parameters.items()}
    args = bound.arguments
    required = tuple(args.pop(n) for n in [*args] if default[n] is inspect.Parameter.empty)
    return required, {n: v for n, v in args.items() if n != "inplace" and v != default[n]}


def _bound_arguments(node: fx.Node) -> inspect.BoundArguments | None:
    """Return the arguments of a call of a function in Python by their names."""
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a module, a method, a builtin
        return None
    kinds = {parameter.kind for parameter in bound.signature.parameters.values()}
    return bound if kinds.isdisjoint(_OPEN) else None


def overwrites(node: fx.Node) -> bool:
    """Return whether a call stores its result in its first argument."""
    if node.op == "call_module":
        return bool(getattr(module_of(node), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    by_name = writes("call_method", getattr(node.target, "__name__", node.target))
    if by_name or writes(node.op, node.target) or "out" in node.kwargs:
        return True
    bound = _bound_arguments(node)
    return bound is not None and bool(bound.arguments.get("inplace"))


def may_write(node: fx.Node) -> bool:
    """Return whether a node may write an argument, or a tensor of its module."""
    if not runs_known_code(node) or overwrites(node):
        return True
    layer = module_of(node) if node.op == "call_module" else None
    return layer is not None and bool(layer.training)


def take_place(node: fx.Node, value: fx.Node) -> None:
    """Let the readers of a call read another value; what overwrote a tensor still does.

    y = op_(x) leaves y in x too: x.copy_(value) follows, unless x is a layer's and read here alone.
    """
    if overwrites(node) and not overwrites(value):
        written = node.args[0]
        assert isinstance(written, fx.Node)
        layer = module_of(written) if written.op == "call_module" else None
        if len(written.users) > 1 or not isinstance(layer, MAKE_A_TENSOR):
            with node.graph.inserting_before(node):
                value = node.graph.call_method("copy_", (written, value))
    supersede(node, value)
