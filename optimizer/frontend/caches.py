"""Caches that a forward fills: dicts of its modules whose new entries depend on no input.

`if key not in self.cache: self.cache[key] = self.bias[:, self.index]` is state that changes no
answer. It is recorded as any computation is, where a forward that finds the entries is seen to
do the same, and their values are constants that nobody else sees.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import fx, nn

from optimizer.facts.facts import computation, is_pure, is_read_only, is_returned, value_of
from optimizer.frontend.state import OF_EVERY_MODULE

Place: TypeAlias = tuple[str, str, Any]  # the module, its attribute that is a dict, the key


def take_entries(model: nn.Module) -> dict[Place, fx.Node]:
    """Remove the traced values that a trace left in dicts of modules; say where they were.

    Each node notes all that its dict holds, which must be one value under several keys.
    """
    taken: dict[Place, fx.Node] = {}
    for name, module in model.named_modules():
        for attr, held in vars(module).items():
            if type(held) is not dict or attr in OF_EVERY_MODULE:
                continue
            new = {key: value.node for key, value in held.items() if isinstance(value, fx.Proxy)}
            for key, node in new.items():
                taken[name, attr, key] = node
                node.meta["cached"] = tuple(new.get(k, v) for k, v in held.items())
            for key in new:
                del held[key]
    return taken


def put_entries(model: nn.Module, places: dict[Place, fx.Node]) -> dict[fx.Node, str]:
    """Let dicts of modules hold a tensor at each place, as attributes of the model; their names."""
    names = {}
    for index, ((module, attr, key), node) in enumerate(places.items()):
        names[node] = f"_cached_{index}"
        vars(model)[names[node]] = torch.empty(0)
        getattr(model.get_submodule(module), attr)[key] = vars(model)[names[node]]
    return names


def listing(graph: fx.Graph, names: dict[fx.Node, str]) -> list[str]:
    """What each node calls, except for those that only serve to compute the named ones."""
    names, only_for_them, lines = dict(names), set(names), list[str]()
    for node in reversed(graph.nodes):
        if node.users and only_for_them.issuperset(node.users):
            only_for_them.add(node)
    for node in graph.nodes:
        if node.op == "get_attr":
            names[node] = str(node.target)
        elif node not in only_for_them:
            arguments = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            names[node] = f"%{len(lines)}"
            lines.append(repr((node.op, node.target, arguments)))
    return lines


def are_constants(graph: fx.Graph) -> bool:
    """Whether what is cached is the same in all calls, and under all keys of its dict."""
    return all(_is_constant(node) for node in graph.nodes if "cached" in node.meta)


def _is_constant(node: fx.Node) -> bool:
    values = [_value(each) for each in node.meta["cached"]]
    if not all(isinstance(each, torch.Tensor) for each in values) or is_returned(node):
        return False
    first, *others = values
    return all(each.dtype == first.dtype and torch.equal(each, first) for each in others)


def _value(cached: Any) -> Any:
    if not isinstance(cached, fx.Node):
        return cached
    nodes = computation(cached, lambda node: is_pure(node) and is_read_only(node))
    return value_of(nodes, lambda held: held) if nodes else None
