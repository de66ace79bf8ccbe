"""A region as basic operators of ATen, which every engine can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from optimizer.lowering.trace import Recorder


def in_aten(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The basic operators that a region runs for inputs like these, on its weights.

    An engine may keep the memory of those beside what it packs; it asks for it as if to write it,
    so that a snapshot has its own from then on.

    Raises:
        ValueError: a value is empty.
    """
    recorder = _Recorder(inputs, region.buffers(), frozenset())
    with torch.inference_mode(), recorder:
        outputs = region(*inputs)
    made = recorder.finished(outputs)
    if not all(node.meta["val"].numel() for node in made.graph.nodes if "val" in node.meta):
        raise ValueError("a tensor is empty")  # OpenVINO ends the process
    return made.eval()


class _Recorder(Recorder):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.split.Tensor:
            with self:
                return _slices(*args)
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            with self:
                args, kwargs = _ungrouped(args, kwargs)
        if func is torch.ops.aten.as_strided_.default and _lies_as_before(*args):
            return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        if func is torch.ops.aten.upsample_bilinear2d.default:  # OpenVINO wants the size alone
            return super()._call(func.overloadpacket.vec, (*args[:3], None), {})
        return super()._call(func, args, kwargs)


def _ungrouped(args: Sequence[Any], kwargs: Any) -> tuple[Sequence[Any], Any]:
    """Attention whose every head has a key and a value of its own, as OpenVINO knows it."""
    query, key, value, *rest = args
    if not (kwargs or {}).get("enable_gqa"):
        return args, kwargs
    times = query.shape[-3] // key.shape[-3]
    own = [each.repeat_interleave(times, -3) for each in (key, value)]
    return (query, *own, *rest), {**kwargs, "enable_gqa": False}


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
