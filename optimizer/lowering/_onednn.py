"""A region on oneDNN Graph, which PyTorch carries inside TorchScript.

The region is traced and frozen, then called with the fuser on: the executor profiles it, fuses
convolutions and matrix products with what follows them, packs their weights once, and keeps the
result. The switch of the fuser belongs to the process, so it is only on during these calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx, nn

from optimizer._undisturbed import ignoring
from optimizer.lowering._interleave import with_interleaved_channels
from optimizer.lowering._regions import name_of

Program = nn.Module  # from the tensors of a region to a tuple of those that it returns

_PROFILED_RUNS = 2  # the executor records in one, and compiles and runs in the next
_SWITCH = threading.Lock()


def is_available() -> bool:
    """Whether this build of torch has TorchScript with oneDNN Graph."""
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.jit, "enable_onednn_fusion")
        and hasattr(torch.jit, "freeze")
    )


def on_onednn(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program:
    """Prepare a region for inputs of these shapes, dtypes and strides.

    It does not look at them again: called with other strides, it ends the process.

    Raises:
        RuntimeError: oneDNN Graph cannot run it.
    """
    if any(node.kwargs.get("approximate", "none") != "none" for node in region.graph.nodes):
        raise RuntimeError("oneDNN Graph takes a gelu by tanh for one by erf")
    if any(map(_reads_a_sum_of_two_convolutions, region.graph.nodes)):
        raise RuntimeError("oneDNN Graph ends the process at a sum of two convolutions and more")
    # TorchScript is deprecated, and keeps in the process which module is traced.
    with _SWITCH, ignoring("`torch.jit", DeprecationWarning):
        traced: Any = torch.jit.trace(  # type: ignore[no-untyped-call]
            region, tuple(inputs), check_trace=False
        )
        program = torch.jit.freeze(traced.eval())
    with _fusing():
        for _ in range(_PROFILED_RUNS):
            program(*inputs)
    return cast("Program", program)


def _reads_a_sum_of_two_convolutions(node: fx.Node) -> bool:
    """Whether it is `f(conv + conv) * y`, of values that nothing else reads."""
    sums = [_behind(each) for each in node.all_input_nodes]
    parts = [map(_behind, s.all_input_nodes) for s in sums if s and name_of(s) in _SUMS]
    return (
        not _is_convolution(node)
        and len(sums) > 1
        and any(all(map(_is_convolution, each)) for each in parts)
    )


def _behind(node: fx.Node) -> fx.Node | None:
    """What pointwise functions of one value are computed from; None if others read it, too."""
    while len(node.users) == 1 and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node if len(node.users) == 1 or _is_convolution(node) else None


def _is_convolution(node: fx.Node | None) -> bool:
    return node is not None and "conv" in name_of(node)


@contextmanager
def _fusing() -> Iterator[None]:
    with _SWITCH:
        before = torch.jit.onednn_fusion_enabled()  # type: ignore[no-untyped-call]
        torch.jit.enable_onednn_fusion(True)
        try:
            yield
        finally:
            torch.jit.enable_onednn_fusion(before)


def in_channels_last(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor], *, weights: bool = True
) -> fx.GraphModule:
    """The same region with its images, and the weights that read them, in channels_last.

    Without the weights for a library that packs them in any case: they are shared, not copied.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    module = fx.GraphModule(region, region.graph)
    example = iter(inputs)
    for node in region.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder":
            memory_format = _MEMORY_FORMATS.get(next(example).dim())
            if memory_format and not _is_multiplied(node):
                options: dict[str, Any] = {"memory_format": memory_format}
                copies[node] = graph.call_method("contiguous", (copies[node],), options)
        elif node.target == "view" and isinstance(node.args[-1], int | tuple | list):
            copies[node].target = "reshape"  # a layout may not allow a view
        elif node.op == "get_attr" and weights:
            weight = getattr(region, str(node.target))
            if weight.dim() in _MEMORY_FORMATS:
                laid_out = weight.clone(memory_format=_MEMORY_FORMATS[weight.dim()])
                setattr(module, str(node.target), laid_out)
    return with_interleaved_channels(fx.GraphModule(module, graph), inputs)


def _is_multiplied(node: fx.Node) -> bool:
    """Whether the channels of a tensor are its last dimension already."""
    return any(name_of(user) == "linear" for user in node.users)


_SUMS = frozenset(("add", "add_", "iadd"))
_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
