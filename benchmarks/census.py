"""`python -m benchmarks.census [MODEL ...]`: what no pass removes, counted in optimized models.

One line for each model, and the sums: how many, and in how many models. By default torchvision's of
the workloads and a small one of each architecture that timm has a file for.
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

VIEWS = {"view", "reshape", "reshape_as", "squeeze", "unsqueeze", torch.flatten, torch.reshape,
         torch.squeeze, torch.unsqueeze, nn.Flatten}  # fmt: skip
TRANSPOSES = {torch.permute, torch.transpose, torch.t, torch.movedim}
MOVABLE = {"mean", "sum", "amax", "amin", "softmax", torch.mean, torch.sum, torch.softmax,
           operator.getitem, "chunk", "split", "unbind", torch.chunk, torch.split, torch.unbind,
           torch.cat}  # fmt: skip
CASTS = {"to", "float", "half", "type", "type_as"}
SMALL = ("tiny", "small", "_s", "18", "_b0", "nano", "26", "xs", "pico", "femto", "xxs")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.census", description=__doc__)
    parser.add_argument("names", nargs="*", help="models; by default one of each architecture")
    names = parser.parse_args(arguments).names
    sums, having, seen = Counter[str](), Counter[str](), 0
    for name in names or architectures():
        graph = getattr(_optimized(name), "graph", fx.Graph())
        found = Counter(kind for node in graph.nodes for kind in _kinds(node))
        seen += bool(graph.nodes)
        sums += found
        having.update(found.keys())
        print(f"{name}: {dict(found) if graph.nodes else 'left as it is'}", flush=True)
    print(f"{seen} models", *(f"{sums[each]} {each} in {having[each]}" for each in sums), sep="; ")


def architectures() -> Iterator[str]:
    """The workloads of torchvision's, and a small model of each architecture of timm's."""
    import models

    timm = import_timm()
    yield from models.names("torchvision")
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        yield from [name for name in names if any(word in name for word in SMALL)][:1] or names[:1]


def import_timm() -> Any:
    """The library, which imports torchvision."""
    from models._torchvision_import import import_torchvision

    import_torchvision()
    import timm

    return timm


def load(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model for inference, of the workloads or of timm, and inputs to call it with."""
    import models
    from models._randomize import randomize

    if name in models.names():
        workload = models.load(name)
        return workload.module, workload.example_inputs
    generator = torch.Generator().manual_seed(0)
    model = import_timm().create_model(name).eval()
    randomize(model, generator)
    size = model.pretrained_cfg.get("input_size", (3, 224, 224))
    return model, (torch.randn(1, *size, generator=generator),)


def _optimized(name: str) -> Any:
    import optimizer

    return optimizer.optimize(*load(name), check=None, level=1)


def _kinds(node: fx.Node) -> Iterator[str]:
    """What can be said of a node and of the one whose value it reads first."""
    from optimizer.core.node import callee

    source = node.args[0] if node.op.startswith("call") and node.args else None
    if not isinstance(source, fx.Node):
        return
    target, before = callee(node), callee(source)
    if {target, before} <= VIEWS:
        yield "views of views"
    if target in TRANSPOSES and _behind(source) in TRANSPOSES and before not in TRANSPOSES:
        yield "pairs of transposes around a reduction, a cut or a cat"
    facts = (each.meta.get("fact") for each in (source, node))
    given, made = (getattr(fact, "value", None) for fact in facts)
    if not (isinstance(given, Tensor) and isinstance(made, Tensor)):
        return
    if target == "contiguous" and given.is_contiguous():
        yield "idle contiguous"
    if target in CASTS and given.dtype == made.dtype:
        yield "idle casts"


def _behind(node: Any) -> Any:
    """What is called before any reductions, cuts and joins that a node is the end of."""
    from optimizer.core.node import callee

    while isinstance(node, fx.Node) and node.op.startswith("call") and callee(node) in MOVABLE:
        node = node.args[0][0] if callee(node) is torch.cat else node.args[0]
    return callee(node) if isinstance(node, fx.Node) and node.op.startswith("call") else None


if __name__ == "__main__":
    main(sys.argv[1:])
