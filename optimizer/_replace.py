"""pattern -> replacement, in which what was matched keeps its weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from optimizer._calls import insert_call, take_place
from optimizer._errors import InputError
from optimizer._graph import attribute
from optimizer._subgraph import Match, inline, inputs_of, paths_of, record, result_of

Build = Callable[[fx.Node, Match], Any]


def replace_matches(module: fx.GraphModule, pattern: Any, replacement: Any) -> None:
    """Replace, in place, every match of a pattern that may be replaced."""
    wanted = _pattern(_in_mode(pattern, module))
    if paths_of(wanted) and not isinstance(replacement, nn.Module):
        bound, build = paths_of(wanted), _by_function(module, wanted, replacement)
    else:
        part = record(_in_mode(replacement, module))
        bound, build = _bound(wanted, part), _by_graph(wanted, part)
    for node in list(module.graph.nodes):
        match = None if node._erased else Match.at(node, wanted, bound)
        value = build(node, match) if match else None
        if match and value is not None:
            take_place(node, value)
            _erase_unread(match)


def _in_mode(pattern: Any, module: fx.GraphModule) -> Any:
    """A copy in the mode of the module: what depends on it is recorded as the module has it."""
    if not isinstance(pattern, nn.Module):
        return pattern
    return copy.deepcopy(pattern).train(module.training)


def _pattern(pattern: Any) -> fx.GraphModule:
    part = record(pattern)
    result = result_of(part)
    needed = {result} if isinstance(result, fx.Node) else set()
    for node in reversed(part.graph.nodes):
        needed |= set(node.all_input_nodes) if node in needed else set()
    if len(needed) + 1 != len(part.graph.nodes) or result.op == "placeholder":
        raise InputError("a pattern returns one value, and does nothing that this does not need.")
    return part


def _by_graph(wanted: fx.GraphModule, part: fx.GraphModule) -> Build:
    if len(inputs_of(wanted)) != len(inputs_of(part)):
        raise InputError("the replacement takes another number of inputs than the pattern.")
    if not isinstance(result_of(part), fx.Node):
        raise InputError("the replacement has to return one value, as the pattern does.")

    def build(node: fx.Node, match: Match) -> Any:
        values = [match.values[each] for each in inputs_of(wanted)]
        return inline(node, part, values, match.paths)[0]

    return build


def _bound(wanted: fx.GraphModule, part: fx.GraphModule) -> set[str]:
    """The paths of the pattern that the replacement has too."""
    for path in sorted(paths_of(wanted)):
        theirs = attribute(wanted, path)
        if path not in paths_of(part):
            if not isinstance(theirs, nn.Module) or theirs.state_dict():
                raise InputError(
                    f"the replacement has no '{path}', whose weights would be lost: pass a"
                    f" function of {', '.join(sorted(paths_of(wanted)))} that returns the module"
                    " to call."
                )
        elif type(attribute(part, path)) is not type(theirs):
            raise InputError(
                f"'{path}' is a {type(theirs).__name__} in the pattern and none in the"
                " replacement: pass a function that makes one of the other."
            )
    return paths_of(wanted) & paths_of(part)


def _by_function(module: fx.GraphModule, wanted: fx.GraphModule, function: Any) -> Build:
    known = {path.replace(".", "_"): path for path in paths_of(wanted)}
    names = list(inspect.signature(function).parameters)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"the pattern has no module '{unknown[0]}': it has {', '.join(known)}.")

    def build(node: fx.Node, match: Match) -> Any:
        held = {name: attribute(module, match.paths[known[name]]) for name in names}
        made = function(**held)
        if made is None:
            return None
        if not isinstance(made, nn.Module):
            raise InputError(f"the replacement made a {type(made).__name__}: return a module.")
        with node.graph.inserting_before(node):
            return insert_call(
                module, made, tuple(match.values[each] for each in inputs_of(wanted)), {}
            )

    return build


def _erase_unread(match: Match) -> None:
    for node in reversed(match.nodes):
        if not node._erased and not node.users:
            node.graph.erase_node(node)
