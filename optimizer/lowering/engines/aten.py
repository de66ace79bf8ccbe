"""A region as functions of ATen, which every engine can read."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary


def in_aten(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The functions of ATen that a region calls for inputs like these, on its weights.

    An engine may keep the memory of those beside what it packs; it asks for it as if to write it,
    so that a snapshot has its own from then on. (`make_fx` does the same in five times the time:
    swin_t took 2 seconds.)

    Raises:
        ValueError: a value is empty.
    """
    held = dict(region.named_buffers())
    recorder = _Recorder(inputs, held)
    with torch.no_grad(), recorder:
        outputs = fx.GraphModule(held, region.graph)(*inputs)
    return fx.GraphModule(held, recorder.finished(outputs)).eval()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, inputs: Sequence[torch.Tensor], held: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.held = fx.Graph(), held
        self.nodes = WeakTensorKeyDictionary()
        for place, tensor in enumerate(inputs):
            self._note(self.graph.placeholder(f"input_{place}"), tensor)
        for name, tensor in held.items():
            self._note(self.graph.get_attr(name), tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.split.Tensor:
            with self:
                return _slices(*args)
        same = func is torch.ops.aten.as_strided_.default and _lies_as_before(*args)
        result = func(*args, **(kwargs or {}))
        if not same and func is not torch.ops.aten.lift_fresh.default:
            read = pytree.tree_map_only(torch.Tensor, self._node, (args, kwargs or {}))
            self._note(self.graph.call_function(*_spelled(func, *read)), result)
        return result

    def _note(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            node.meta["val"] = result.to("meta")
            self.nodes[result] = node
            return
        for place, each in enumerate(result):
            self._note(self.graph.call_function(operator.getitem, (node, place)), each)

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        if not tensor.numel():  # OpenVINO ends the process
            raise ValueError("a tensor is empty")
        if tensor not in self.nodes:  # the numbers of an index that is a list
            name = f"made_{len(self.held)}"
            self.held[name] = tensor
            self._note(self.graph.get_attr(name), tensor)
        return self.nodes[tensor]  # type: ignore[no-any-return]

    def finished(self, outputs: Sequence[torch.Tensor]) -> fx.Graph:
        """The graph that returns `outputs`."""
        self.graph.output(tuple(map(self._node, outputs)))
        self.graph.eliminate_dead_code()
        return self.graph


def _slices(tensor: torch.Tensor, size: int, dim: int = 0) -> list[torch.Tensor]:
    """What split makes; OpenVINO does not take a last part that is smaller."""
    starts = range(0, tensor.shape[dim], size)
    cut = torch.ops.aten.slice.Tensor
    return [cut(tensor, dim, at, min(at + size, tensor.shape[dim])) for at in starts]


def _lies_as_before(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], *offset: int
) -> bool:
    """Whether other strides are only those of single elements, as after an average of an image."""
    if offset or tuple(tensor.shape) != tuple(size):
        return False
    strides = zip(size, tensor.stride(), stride, strict=True)
    return all(count == 1 or before == after for count, before, after in strides)


def _spelled(func: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, Any, Any]:
    """A call as OpenVINO knows it: of an enlarged image, by its size alone."""
    taken = {torch.ops.aten.upsample_bilinear2d.default: 3}.get(func)
    if taken is None:
        return func, args, kwargs
    return func.overloadpacket.vec, (*args[:taken], None), {}
