"""One call of attention as two products and a softmax, which oneDNN Graph runs head by head.

torch's attention goes through the keys in blocks and multiplies by MKL, which keeps its widest
instructions to one vendor's processors: on another, oneDNN was twice as fast. While it is
prepared, all scores are held twice; later those of one head.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import fx, nn

from optimizer.lowering._laid_out import LaidOut
from optimizer.lowering._onednn import on_onednn
from optimizer.lowering._regions import extract, name_of, named_arguments

_CALL = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0,
    "is_causal": False, "scale": None, "enable_gqa": False,
}  # fmt: skip
_MOST = 2  # scores to each number that is read or made: up to 512 tokens in heads of 64
_PLAIN = ("attn_mask", "dropout_p", "is_causal", "enable_gqa")


def extract_calls(outer: fx.GraphModule) -> None:
    """Make of each plain call of attention a GraphModule that the code calls."""
    for place, node in enumerate(list(filter(_is_plain, outer.graph.nodes))):
        extract(outer, [node], f"call_of_attention_{place}", ())


def calls_attention(region: fx.GraphModule) -> bool:
    """Whether there is a plain call of attention."""
    return any(map(_is_plain, region.graph.nodes))


def as_products(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> nn.Module:
    """The same region, which is one call of attention, as products on oneDNN Graph.

    Raises:
        ValueError: its scores would take much more memory than what they are made of.
        RuntimeError: oneDNN Graph cannot run it.
    """
    module = fx.GraphModule(region, copy.deepcopy(region.graph))
    (call,) = filter(_is_plain, module.graph.nodes)
    given = named_arguments(call, _CALL)
    nodes = [given[name] for name in ("query", "key", "value")]
    read = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    q, k, v = (read[node] for node in nodes)
    _require_few_scores(q, k, v)
    scale = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
    with module.graph.inserting_before(call):
        call.replace_all_uses_with(_products(module.graph, nodes, scale))
    module.graph.erase_node(call)
    return LaidOut(on_onednn(fx.GraphModule(module, module.graph), inputs), region(*inputs))


def _is_plain(node: fx.Node) -> bool:
    """Whether a call of attention has no mask, drops nothing and groups no heads."""
    if name_of(node) != "scaled_dot_product_attention":
        return False
    given = named_arguments(node, _CALL)
    return all(given[name] == _CALL[name] for name in _PLAIN)


def _require_few_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        raise ValueError("its batches differ")
    scores, result = (q.shape[:-1].numel() * each for each in (k.shape[-2], v.shape[-1]))
    if scores > _MOST * (q.numel() + k.numel() + v.numel() + result):
        raise ValueError("its scores would take much more memory than what they are made of")


def _products(graph: fx.Graph, nodes: Sequence[fx.Node], scale: float) -> fx.Node:
    """softmax((scale * q) @ k^T) @ v; oneDNN Graph does not compile one that is scaled behind."""
    q, k, v = nodes
    scaled = graph.call_function(torch.mul, (q, scale))
    scores = graph.call_function(
        torch.matmul, (scaled, graph.call_method("transpose", (k, -2, -1)))
    )
    weights = graph.call_function(torch.softmax, (scores, -1))
    return graph.call_function(torch.matmul, (weights, v))
