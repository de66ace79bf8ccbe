"""Small graphs inside a larger one: recorded, found, replaced with their weights kept."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import fx, nn

from optimizer.core.errors import CaptureError, InputError
from optimizer.core.guards import key_of
from optimizer.core.node import adopt, attribute, callee, computation, module_of
from optimizer.frontend.canonicalize import spell
from optimizer.frontend.tracer import Tracer
from optimizer.rewrite.edit import insert_call, may_write, overwrites, signatures, take_place


def record(
    function: Callable[..., Any],
    names: Sequence[str] | None = None,
    modules: Mapping[str, nn.Module] | None = None,
) -> fx.GraphModule:
    """Return the canonical graph of a function, or of a module, whose tensors it shares.

    The inputs are the parameters `names`, or those that have no default. The `modules` that a
    function uses get their names in the graph. A CaptureError says why it cannot be.
    """
    try:
        root = function if isinstance(function, nn.Module) else _as_module(function, names)
        for name, module in (modules or {}).items():
            root.add_module(name, module)
        part = fx.GraphModule(root, Tracer().trace(root))
        spell(part)
    except Exception as error:  # whatever a user's code does with traced values
        name = getattr(function, "__name__", type(function).__name__)
        raise CaptureError(f"{name} cannot be recorded as a graph: {error}") from error
    return part


def _as_module(function: Callable[..., Any], names: Sequence[str] | None) -> nn.Module:
    def forward(self: nn.Module, *args: Any) -> Any:
        return function(*args)

    if names is None:
        overloads = signatures(function)
        if not overloads:
            raise CaptureError("its parameters are not known, write it as a lambda")
        parameters = overloads[0].parameters.values()
        names = [each.name for each in parameters if each.default is each.empty]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in ("self", *names)])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    root: nn.Module = type("Function", (nn.Module,), {"forward": forward})()
    return root


def _inputs_of(part: fx.GraphModule) -> list[fx.Node]:
    return list(part.graph.find_nodes(op="placeholder"))


def _result_of(part: fx.GraphModule) -> Any:
    return part.graph.output_node().args[0]


def paths_of(part: fx.GraphModule) -> set[str]:
    """Return the names of the modules and tensors that a graph uses."""
    return {str(n.target) for n in part.graph.nodes if n.op in ("call_module", "get_attr")}


def inline(
    before: fx.Node, part: fx.GraphModule, operands: Sequence[Any], paths: Mapping[str, str]
) -> tuple[Any, list[fx.Node]]:
    """Compute just before a node what `part` computes; return the result and the new nodes.

    `paths` names the owner's modules and tensors that stand for those of `part`; others are added.
    """
    values: dict[fx.Node, Any] = dict(zip(_inputs_of(part), operands, strict=True))
    names, added = dict(paths), []
    for node in part.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        with before.graph.inserting_before(before):
            copied = values[node] = before.graph.node_copy(node, values.__getitem__)
        if node.op in ("call_module", "get_attr"):
            path = str(node.target)
            if path not in names:
                names[path] = adopt(before.graph, path, attribute(part, path))
            copied.target = names[path]
        copied.meta.update(new=True, source=before.meta.get("source", ""))
        added.append(copied)
    return fx.node.map_arg(_result_of(part), values.__getitem__), added


class Match:
    """Nodes that compute what a pattern computes, if `found`, and that may be replaced.

    Modules match by class; their settings have to agree too but for those under the paths `kept`.
    """

    def __init__(self, root: fx.Node, pattern: fx.GraphModule, kept: Collection[str]) -> None:
        self.values: dict[fx.Node, Any] = {}  # for each node of the pattern
        self.paths: dict[str, str] = {}  # of the owner, for each path of the pattern
        self.kept = kept
        self.found = self._same(_result_of(pattern), root) and self._is_closed(root)

    @property
    def nodes(self) -> list[fx.Node]:
        """Return the nodes that the match replaces, in the order in which they run."""
        return sorted({value for key, value in self.values.items() if key.op != "placeholder"})

    def _same(self, expected: Any, actual: Any) -> bool:
        if isinstance(expected, fx.Node):
            return self._same_node(expected, actual)
        if type(expected) is not type(actual):
            return False
        if not isinstance(expected, slice | dict | list | tuple):
            return bool(key_of(expected) == key_of(actual))
        left, right = _parts(expected), _parts(actual)
        return left.keys() == right.keys() and all(self._same(left[k], right[k]) for k in left)

    def _same_node(self, expected: fx.Node, actual: Any) -> bool:
        if expected in self.values:
            return bool(key_of(self.values[expected]) == key_of(actual))
        self.values[expected] = actual
        if expected.op == "placeholder":
            return True
        return (
            isinstance(actual, fx.Node)
            and expected.op == actual.op
            and self._same_target(expected, actual)
            and self._same(expected.args, actual.args)
            and self._same(expected.kwargs, actual.kwargs)
        )

    def _same_target(self, expected: fx.Node, actual: fx.Node) -> bool:
        if expected.op not in ("call_module", "get_attr"):
            return expected.target == actual.target
        path = str(expected.target)
        if self.paths.setdefault(path, str(actual.target)) != actual.target:
            return False
        if expected.op == "get_attr":
            return True
        alike = path in self.kept or _settings(expected) == _settings(actual)
        return callee(expected) is not None and callee(expected) is callee(actual) and alike

    def _is_closed(self, root: fx.Node) -> bool:
        """Return whether no other node reads the inside, or writes while it is computed."""
        nodes = self.nodes
        inside = [node for node in nodes if node is not root and node.op != "get_attr"]
        if any(user not in nodes for node in inside for user in node.users):
            return False
        if any(overwrites(node) and node.args[0] not in inside for node in inside):
            return False
        first = min([root, *inside])
        between = (node for node in root.graph.nodes if first < node < root)
        return not any(may_write(node) for node in between if node not in nodes)


def _parts(tree: Any) -> Mapping[Any, Any]:
    if isinstance(tree, dict):
        return tree
    return dict(enumerate((tree.start, tree.stop, tree.step) if isinstance(tree, slice) else tree))


def _settings(node: fx.Node) -> dict[str, Any]:
    attributes = vars(module_of(node)).items()
    return {name: key_of(value) for name, value in attributes if name[0] != "_"}


# From the node to replace, the inputs of the pattern there, and the owner's path for each of it.
Build = Callable[[fx.Node, tuple[Any, ...], Mapping[str, str]], Any]


def replace_matches(module: fx.GraphModule, pattern: Any, replacement: Any) -> None:
    """Replace, in place, every match of a pattern that may be replaced."""
    wanted = _pattern(_in_mode(pattern, module))
    if paths_of(wanted) and not isinstance(replacement, nn.Module):
        kept, build = paths_of(wanted), _by_function(module, wanted, replacement)
    else:
        part = record(_in_mode(replacement, module))
        kept, build = _kept_paths(wanted, part), _by_graph(wanted, part)
    for node in list(module.graph.nodes):
        if node._erased or not (match := Match(node, wanted, kept)).found:
            continue
        values = tuple(match.values[each] for each in _inputs_of(wanted))
        if (value := build(node, values, match.paths)) is not None:
            take_place(node, value)
            for inside in reversed(match.nodes):
                if not inside._erased and not inside.users:
                    inside.graph.erase_node(inside)


def _in_mode(pattern: Any, module: fx.GraphModule) -> Any:
    """Return a copy of a pattern's module in the mode of `module`, to be recorded in that."""
    if not isinstance(pattern, nn.Module):
        return pattern
    return copy.deepcopy(pattern).train(module.training)


def _pattern(pattern: Any) -> fx.GraphModule:
    part = record(pattern)
    result = _result_of(part)
    needed = computation(result, lambda _: True) if isinstance(result, fx.Node) else []
    if len(needed) + 1 != len(part.graph.nodes) or result.op == "placeholder":
        raise InputError("a pattern returns one value, and does nothing that this does not need.")
    return part


def _by_graph(wanted: fx.GraphModule, part: fx.GraphModule) -> Build:
    if len(_inputs_of(wanted)) != len(_inputs_of(part)):
        raise InputError("the replacement takes another number of inputs than the pattern.")
    if not isinstance(_result_of(part), fx.Node):
        raise InputError("the replacement has to return one value, as the pattern does.")
    return lambda node, values, paths: inline(node, part, values, paths)[0]


def _kept_paths(wanted: fx.GraphModule, part: fx.GraphModule) -> set[str]:
    """Return the paths of the pattern that the replacement has too."""
    names = ", ".join(sorted(paths_of(wanted)))
    for path in sorted(paths_of(wanted)):
        theirs = attribute(wanted, path)
        if path not in paths_of(part):
            if not isinstance(theirs, nn.Module) or theirs.state_dict():
                advice = f"pass a function of {names} that returns the module to call."
                raise InputError(f"the replacement loses the weights of '{path}': {advice}")
        elif type(attribute(part, path)) is not type(theirs):
            advice = "pass a function that makes one of the other."
            raise InputError(f"'{path}' is a {type(theirs).__name__} in the pattern only: {advice}")
    return paths_of(wanted) & paths_of(part)


def _by_function(module: fx.GraphModule, wanted: fx.GraphModule, function: Any) -> Build:
    paths = {path.replace(".", "_"): path for path in paths_of(wanted)}
    names = list(inspect.signature(function).parameters)
    unknown = [name for name in names if name not in paths]
    if unknown:
        raise InputError(f"the pattern has no module '{unknown[0]}': it has {', '.join(paths)}.")

    def build(node: fx.Node, values: tuple[Any, ...], found: Mapping[str, str]) -> Any:
        layer = function(**{n: attribute(module, found[paths[n]]) for n in names})
        if layer is None:
            return None
        if not isinstance(layer, nn.Module):
            raise InputError(f"the replacement made a {type(layer).__name__}: return a module.")
        with node.graph.inserting_before(node):
            return insert_call(module, layer, values, {})

    return build
