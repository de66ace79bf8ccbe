"""One call in the place of another: its arguments, whether it writes, what its readers get."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn
from torch.fx.operator_schemas import get_signature_for_torch_op

from optimizer.core.errors import InputError
from optimizer.core.node import fresh_name, is_plain, module_of
from optimizer.core.ops import MAKE_A_TENSOR, writes
from optimizer.facts.effects import runs_known_code
from optimizer.rewrite.edit import supersede

_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def insert_call(
    root: fx.GraphModule, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.Node:
    """Call a method by its name, a module, a new module of a class, or a function.

    Raises:
        InputError: it does not take these arguments.
    """
    if isinstance(target, str):
        if not hasattr(torch.Tensor, target):
            raise InputError(f"a tensor has no method '{target}': name one that it has.")
        return root.graph.call_method(target, args, kwargs)
    if is_module_class(target):
        try:
            target = target().train(root.training)
        except TypeError as error:
            raise InputError(
                f"{target.__name__} cannot be made without arguments ({error}): pass a module."
            ) from error
    _require_takes(target, args, kwargs)
    if isinstance(target, nn.Module):
        name = fresh_name(root, type(target).__name__.lower())
        root.add_submodule(name, target)
        return root.graph.call_module(name, args, kwargs)
    return root.graph.call_function(target, args, kwargs)


def is_module_class(target: object) -> bool:
    """Whether something is a class of modules."""
    return isinstance(target, type) and issubclass(target, nn.Module)


def _require_takes(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    known = signatures(target)
    for signature in known:
        with suppress(TypeError):
            signature.bind(*args, **kwargs)
            return
    if known:
        name = getattr(target, "__name__", type(target).__name__)
        shown = ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())])
        raise InputError(
            f"{name} does not take ({shown}): write a rule for it and use toolkit.decompose."
        )


def signatures(target: Any) -> list[inspect.Signature]:
    """The ways to call a module or function, as far as they are known."""
    try:
        called = target.forward if isinstance(target, nn.Module) else target
        return [inspect.signature(called)]
    except ValueError:  # a builtin; torch knows its own
        known: list[inspect.Signature] | None = get_signature_for_torch_op(target)
        return known or []


def operands(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments without those that are defaults, and without the in-place mark."""
    named = _named(node)
    if named is None:
        return node.args, dict(node.kwargs)
    default, given = named
    required = tuple(given.pop(n) for n in [*given] if default[n] is inspect.Parameter.empty)
    return required, {n: v for n, v in given.items() if n != "inplace" and v != default[n]}


def _named(node: fx.Node) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The defaults of a function in Python, and the arguments of a call by their names."""
    try:
        signature = inspect.signature(node.target)  # type: ignore[arg-type]
        given = signature.bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a module, a method, a builtin
        return None
    if any(parameter.kind in _OPEN for parameter in signature.parameters.values()):
        return None
    return {name: p.default for name, p in signature.parameters.items()}, dict(given)


def overwrites(node: fx.Node) -> bool:
    """Whether a call stores its result in the first tensor that it is given."""
    if node.op == "call_module":
        return bool(getattr(module_of(node), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    by_name = writes("call_method", getattr(node.target, "__name__", node.target))
    if by_name or writes(node.op, node.target) or "out" in node.kwargs:
        return True
    named = _named(node)
    return named is not None and bool(named[1].get("inplace"))


def may_write(node: fx.Node) -> bool:
    """Whether a node may write a tensor that it is given, or that its module holds."""
    if not runs_known_code(node) or overwrites(node):
        return True
    layer = module_of(node) if node.op == "call_module" else None
    return layer is not None and (layer.training or not is_plain(layer))


def take_place(node: fx.Node, value: fx.Node) -> None:
    """Let the readers of a call read another value; what overwrote a tensor still does.

    y = op_(x) also leaves y in x. So x.copy_(value) follows, unless x is the result of a layer
    that nobody else reads.
    """
    if overwrites(node) and not (value.op != "placeholder" and overwrites(value)):
        written = node.args[0]
        assert isinstance(written, fx.Node)
        layer = module_of(written) if written.op == "call_module" else None
        seen = any(value < user for user in written.users if user is not node)
        if seen or not isinstance(layer, MAKE_A_TENSOR):
            with node.graph.inserting_before(node):
                value = node.graph.call_method("copy_", (written, value))
    supersede(node, value)
