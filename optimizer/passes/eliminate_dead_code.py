"""A value that nobody reads is not computed, unless computing it does something else."""

from __future__ import annotations

import torch
from torch import fx, nn

from optimizer.facts.facts import is_pure
from optimizer.rewrite.contract import whole_graph


@whole_graph(numerics="exact", phase="simplify")
def eliminate_dead_code(graph: fx.Graph) -> list[fx.Node]:
    """Remove nodes whose value nobody reads and that do nothing else.

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


class _DeadBranch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.exp(x)  # nobody reads it
        return torch.relu(x)


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _DeadBranch().eval(), (torch.randn(4, width),)
