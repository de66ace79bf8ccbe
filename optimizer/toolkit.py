"""Verbs for people who rewrite graphs by hand: find, replace, insert, remove, decompose.

They work on what `optimizer.capture` returns. A verb that takes a module gives back a new one,
which shares its weights; one that takes a node edits the graph that the node is in. Either way
the graph is checked and its code is generated. What passes are written with is here too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx, nn

from optimizer.core.errors import InputError, Refused, require
from optimizer.core.inputs import require_graph
from optimizer.core.node import arg, callee, clean, describe, module_of, owner, shape_text
from optimizer.core.report import columns
from optimizer.facts.facts import dtype, is_read_only, is_returned, is_unchanged, rank
from optimizer.frontend.canonicalize import spelled
from optimizer.rewrite.contract import Pass, Target, call, rewrite, whole_graph
from optimizer.rewrite.edit import insert_call, insert_function, insert_module, operands, take_place
from optimizer.rewrite.subgraph import inline, paths_of, record, replace_matches

__all__ = [
    "Pass", "Refused", "arg", "call", "decompose", "dtype", "find", "insert_after",
    "insert_function", "insert_module", "is_read_only", "is_returned", "is_unchanged",
    "module_of", "rank", "remove_node", "replace_op",
    "replace_pattern", "require", "rewrite", "table", "whole_graph",
]  # fmt: skip


def find(module: fx.GraphModule, target: Target | tuple[Target, ...]) -> list[fx.Node]:
    """Return the calls of a function, of plain modules of a class, or of a method, in order.

    Each spelling finds what the capture makes of it: `torch.relu`, `nn.ReLU` and `"relu"` find
    the same. A node has its inputs in `all_input_nodes` and its readers in `users`.
    """
    targets = target if isinstance(target, tuple) else (target,)
    for each in targets:
        if isinstance(each, nn.Module) or not (callable(each) or isinstance(each, str)):
            raise InputError(f"pass a function, a module's class or a method's name, not {each!r}.")
    spellings = set(map(spelled, targets))
    return [node for node in require_graph(module).nodes if callee(node) in spellings]


def table(nodes: fx.GraphModule | Iterable[fx.Node]) -> str:
    """Return nodes as text: what each calls and reads, what reads it, its shape where known."""
    rows = [("name", "calls", "reads", "read by", "shape")]
    for node in nodes.graph.nodes if isinstance(nodes, fx.GraphModule) else nodes:
        reads = " ".join(each.name for each in node.all_input_nodes)
        readers = " ".join(each.name for each in node.users)
        rows.append((node.name, describe(node), reads, readers, shape_text(node)))
    return "\n".join(columns(rows))


def replace_op(
    module: fx.GraphModule, target: Target | tuple[Target, ...], replacement: Target | nn.Module
) -> fx.GraphModule:
    """Call something else wherever `target` is called, as `find` finds it.

    A function or method takes the arguments that differ from their defaults; a module, or a new
    one of a class for each call, takes the values alone. What was done in place still is.

    Raises:
        InputError: the replacement does not take the arguments.
    """
    edited = _copy(module)
    kind = replacement if isinstance(replacement, type) else type(replacement)
    for node in find(edited, target):
        args, kwargs = operands(node)
        if issubclass(kind, nn.Module):
            args, kwargs = tuple(node.all_input_nodes), {}
        with node.graph.inserting_before(node):
            value = insert_call(edited, replacement, args, kwargs)
        take_place(node, value)
    return _copy(edited)


def insert_after(
    node: fx.Node,
    target: Target | nn.Module,
    *args: Any,
    readers: Iterable[fx.Node] | None = None,
    **kwargs: Any,
) -> fx.Node:
    """Call something on a node's value, and let the node's readers read the result instead.

    The value is the first argument of a function, a method by its name, a module or a new one of
    a class. All of the node's readers read the result if `readers` is None.

    Raises:
        InputError: `node` is the output, an argument is computed later, or a reader reads another.
    """
    if node.op == "output":
        raise InputError("nothing comes after the output: insert after the node that it returns.")
    last = node.graph.find_nodes(op="placeholder")[-1] if node.op == "placeholder" else node
    read: list[fx.Node] = []
    fx.node.map_arg((args, kwargs), read.append)
    if any(last < each for each in read):
        raise InputError(f"an argument is computed after '{node.name}': insert after that one.")
    users = list(node.users if readers is None else readers)
    if not node.users.keys() >= set(users):
        raise InputError(f"a reader does not read '{node.name}': pass some of its users.")
    with node.graph.inserting_after(last):
        added = insert_call(owner(node), target, (node, *args), kwargs)
    for reader in users:
        reader.replace_input_with(node, added)
    _tidy(owner(node))
    return added


def remove_node(node: fx.Node, instead: fx.Node | None = None) -> fx.GraphModule:
    """Erase a node; its readers read its input instead, or the node that is named.

    Raises:
        InputError: the node is an argument or the output of the model; or it is read, and there
            is no one input that could be read in its place.
    """
    if node.op in ("placeholder", "output"):
        raise InputError(f"'{node.name}' belongs to the model's signature: it cannot be removed.")
    if node.users and instead is None:
        if len(node.all_input_nodes) != 1:
            names = ", ".join(each.name for each in node.all_input_nodes) or "nothing"
            raise InputError(f"'{node.name}' reads {names}: name with instead= what to read now.")
        instead = node.all_input_nodes[0]
    if instead is not None:
        if not instead < node:
            raise InputError(f"'{instead.name}' is not computed before '{node.name}'.")
        node.replace_all_uses_with(instead)
    node.graph.erase_node(node)
    return _tidy(owner(node))


def decompose(module: fx.GraphModule, rules: Mapping[Target, Callable[..., Any]]) -> fx.GraphModule:
    """Replace operations by what rules compute, until none is left that has a rule.

    A rule is Python code on the values and on the arguments that differ from their defaults:
    `{torch.relu: lambda x: (x > 0) * x}`. The rule of a module's class takes the module first.
    What a rule calls may have a rule itself.

    Raises:
        CaptureError: a rule cannot be recorded.
        InputError: a rule leads back to itself, or returns no single value.
    """
    edited = _copy(module)
    rule_of = {spelled(target): rule for target, rule in rules.items()}
    inside: tuple[Any, ...] = ()  # the operations whose rules a node comes from
    pending = [(node, inside) for node in edited.graph.nodes]
    while pending:
        node, inside = pending.pop()
        operation = callee(node)
        if operation not in rule_of:
            continue
        if operation in inside:
            raise InputError(f"the rules never end: what replaces '{describe(node)}' calls it.")
        pending += [(each, (*inside, operation)) for each in _expand(node, rule_of[operation])]
    return _copy(edited)


def replace_pattern(
    module: fx.GraphModule,
    pattern: nn.Module | Callable[..., Any],
    replacement: nn.Module | Callable[..., Any],
) -> fx.GraphModule:
    """Replace what computes a pattern, keeping the weights of what was matched.

    Args:
        module: where to look.
        pattern: a module or function that returns one value. Its modules match plain modules of
            the same class; a value inside that is read elsewhere is no match.
        replacement: of as many inputs as the pattern. A submodule or tensor of the pattern's
            name *is* the one that was matched. Where the pattern has modules, it may be a
            function too: its parameters name them, and it returns the module to call, or None
            to leave this match alone.

    Raises:
        CaptureError: the pattern or the replacement cannot be recorded.
        InputError: the replacement has no place for a tensor of the pattern.
    """
    edited = _copy(module)
    replace_matches(edited, pattern, replacement)
    return _copy(edited)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph, without facts, over what it calls and reads and nothing else."""
    graph = copy.deepcopy(require_graph(module))
    return _tidy(fx.GraphModule(module, graph, type(module).__name__))


def _tidy(module: fx.GraphModule) -> fx.GraphModule:
    """Drop the facts, which hold of no edited graph, and what is not called; check the rest."""
    module.meta.pop("facts", None)
    for node in module.graph.nodes:
        node.meta.pop("fact", None)
    module.delete_all_unused_submodules()
    clean(module)
    return module


def _expand(node: fx.Node, rule: Callable[..., Any]) -> list[fx.Node]:
    """Put what a rule computes in the place of a node; return the new nodes."""
    read, call = node.all_input_nodes, operands(node)
    modules = {"layer": module_of(node)} if node.op == "call_module" else {}

    def traced(*values: Any) -> Any:
        args, kwargs = fx.node.map_arg(call, dict(zip(read, values, strict=True)).__getitem__)
        return rule(*modules.values(), *args, **kwargs)

    traced.__name__ = f"the rule for {describe(node)}"
    part = record(traced, [f"operand_{index}" for index in range(len(read))], modules)
    inner = [path for path in paths_of(part) if path.partition(".")[0] == "layer"]
    paths = {path: f"{node.target}{path.removeprefix('layer')}" for path in inner}
    value, added = inline(node, part, read, paths)
    if not isinstance(value, fx.Node):
        raise InputError(f"the rule for '{describe(node)}' has to return one value.")
    take_place(node, value)
    return added
