"""What a decision is remembered by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from optimizer.lowering._policies import describe_device
from optimizer.lowering._regions import name_of


def key_of(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor], engines: Iterable[str] = ()
) -> str:
    """The same for all regions that compute the same of alike inputs, with whatever weights.

    Another where other engines are offered, or other versions of them.
    """
    places = {node: place for place, node in enumerate(region.graph.nodes)}
    parts = [f"torch {torch.__version__}", *engines, describe_device(inputs)]
    parts += map(_geometry, inputs)
    for node in region.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda arg: places[arg])
        held = _geometry(getattr(region, str(node.target))) if node.op == "get_attr" else ""
        parts.append(f"{node.op} {held or name_of(node)} {arguments}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _geometry(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device}"
