"""f(clone(x)) -> f(x), where nobody can tell the copy from x."""

from __future__ import annotations

import torch
from torch import fx, nn

from optimizer.core.node import arg
from optimizer.facts.facts import aliases, is_fresh, is_read_only, is_returned, is_unchanged
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.pattern import call


@rewrite(call("clone", torch.clone, name="clone"), numerics="exact", phase="simplify")
def remove_clones(clone: fx.Node) -> fx.Node | None:
    """Read a value instead of its copy, where neither of them is written or seen from outside.

    A copy keeps what x was while x or the copy changes. Here nothing writes the copy, and after
    the copy nothing writes x, also not what is needed for a gradient. No view of the copy is
    taken and none is returned, so that all its readers compute with its numbers only. A value
    that was made here lies densely in memory, and its copy in the same way.
    """
    source = arg(clone, 0)
    if len(clone.args) != 1 or clone.kwargs or not isinstance(source, fx.Node):
        return None
    require(is_fresh(source), "what is copied was not made here, and may lie anyhow in memory")
    require(not is_returned(clone) and not any(aliases(clone)), "the copy or a view of it is seen")
    require(is_read_only(clone), "the copy is written")
    require(is_unchanged(source, clone), "what is copied is written later")

    return source


class _Saved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        saved = y.clone()
        return torch.relu(y) + saved


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    return _Saved().eval(), (torch.randn(4, width),)
