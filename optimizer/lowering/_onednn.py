"""A region on oneDNN Graph, which PyTorch carries inside TorchScript.

The region is traced and frozen, then called with the fuser on: the executor profiles it, fuses
convolutions and matrix products with what follows them, packs their weights once, and keeps the
result. The switch of the fuser belongs to the process, so it is only on during these calls.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from optimizer.lowering._function import as_function
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

    Raises:
        RuntimeError: oneDNN Graph cannot run it.
    """
    if any(node.kwargs.get("approximate", "none") != "none" for node in region.graph.nodes):
        raise RuntimeError("oneDNN Graph takes a gelu by tanh for one by erf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns of every size that is a number
        traced: Any = torch.jit.trace(  # type: ignore[no-untyped-call]
            region, tuple(inputs), check_trace=False
        )
        program = torch.jit.freeze(traced.eval())
    with _fusing():
        for _ in range(_PROFILED_RUNS):
            program(*inputs)
    return _ForStrides(program, region, inputs)


class _ForStrides(nn.Module):
    """A program where the inputs lie as those that it was prepared with, else the region.

    oneDNN Graph does not look at strides again: on others it ends the process.
    """

    def __init__(
        self, program: Program, region: fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self.program, self.region = program, region
        self.run, self.run_region = as_function(program), as_function(region)
        self.strides = [tensor.stride() for tensor in inputs]

    def forward(self, *inputs: torch.Tensor) -> Any:
        as_prepared = list(map(torch.Tensor.stride, inputs)) == self.strides
        return self.run(*inputs) if as_prepared else self.run_region(*inputs)


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


_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
