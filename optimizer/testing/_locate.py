"""The node at which a wrong candidate leaves its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from optimizer.core.inputs import as_call
from optimizer.testing._assemble import Spec
from optimizer.verify.check import first_divergence, values


def first_divergent_node(
    spec: Spec, subject: Callable[..., Any], *, exact: bool, dtype: torch.dtype
) -> str:
    """The first node of the candidate whose value differs from what it stands for, as text.

    The model's graph is what the subject's `unchanged` gives, if it has one; else its trace.
    """
    model, inputs = spec.build(dtype), spec.inputs(dtype)
    unchanged = getattr(subject, "unchanged", lambda model, inputs: fx.symbolic_trace(model))
    try:
        with spec.surroundings():
            graphs = unchanged(model, inputs), subject(model, inputs)
    except Exception as error:  # whatever is wrong with the subject
        return f"none, for there are no two graphs: {type(error).__name__}"
    if not all(isinstance(each, fx.GraphModule) for each in graphs):
        return "none, for there are no two graphs"
    with spec.surroundings():
        expected, actual = (values(each, as_call(inputs)) for each in graphs)
    found = first_divergence(expected, actual, exact=exact)
    if found:
        return found
    alike = f"{len(expected.keys() & actual.keys())} of the {len(actual)} nodes"
    return f"none: {alike} stand for one of the model's, and agree with it here"
