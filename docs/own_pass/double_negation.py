"""-(-x) = x: a pass of somebody else, in a repository of their own."""

from __future__ import annotations

import operator

import torch
from torch import fx

from optimizer.toolkit import (
    arg,
    call,
    is_read_only,
    is_returned,
    is_unchanged,
    require,
    rewrite,
)

NEGATIONS = (torch.neg, operator.neg)


@rewrite(
    call(*NEGATIONS, args=(call(*NEGATIONS, name="inner"),), name="outer"),
    numerics="rounding",
    phase="simplify",
)
def fold_double_negation(inner: fx.Node, outer: fx.Node) -> fx.Node:
    """Replace the negation of a negation by the value itself.

    The numbers are the same; a layer that reads them may round otherwise if they lie otherwise.
    """
    value: fx.Node = arg(inner, 0)
    require(not is_returned(outer), "the result is returned")
    require(is_read_only(inner) and is_read_only(outer), "a negation is written")
    *_, end = outer.graph.nodes
    require(is_unchanged(value, inner, end), "what is negated is written later")
    return value
