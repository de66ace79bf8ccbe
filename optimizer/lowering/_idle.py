"""Calls in straight-line code that give back the values that they are given."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from optimizer.lowering._regions import name_of, named_arguments

_DROPOUT = {"input": None, "p": 0.5, "training": True}
_PAD = {"input": None, "pad": None}


def skip_idle(made: Mapping[fx.Node, set[int]], returned: set[int]) -> None:
    """Let what reads an idle call read what that is given.

    Not where a caller gets its memory: padding by nothing is a copy, which may be written.

    Args:
        made: for each call, the storages of its result.
        returned: the storages of the output.
    """
    for node, storages in made.items():
        if _is_idle(node) and storages.isdisjoint(returned):
            node.replace_all_uses_with(node.all_input_nodes[0])


def _is_idle(node: fx.Node) -> bool:
    """Whether it is a dropout that drops nothing, or pads by nothing."""
    if name_of(node) == "dropout":
        return not named_arguments(node, _DROPOUT)["training"]
    return name_of(node) == "pad" and not any(named_arguments(node, _PAD)["pad"])
