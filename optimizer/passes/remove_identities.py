"""dropout(x) -> x and identity(x) -> x, in inference."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.node import arg
from optimizer.rewrite.contract import require, rewrite
from optimizer.rewrite.pattern import call

DROPOUTS = (
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
)  # fmt: skip


@rewrite(call(nn.Identity, *DROPOUTS, name="identity"), numerics="exact", phase="simplify")
def remove_identities(identity: fx.Node) -> fx.Node:
    """Remove Identity, and the Dropouts and StochasticDepth that are not in training mode.

    Outside training each of them returns its input, the very same tensor: not even a writer
    or a reader of the alias can tell it from what it was given.
    """
    training = identity.op == "call_function" and arg(identity, 2) is not False
    require(not training, "it is in training mode and drops values")
    source: fx.Node = arg(identity, 0)
    require(isinstance(source, fx.Node), "its input is a constant")

    return source


def example(width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A smallest model on which the pass fires."""
    model = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.Identity())
    return model.eval(), (torch.randn(4, width),)
