"""What an engine is given of a region, what it makes of it, and when that runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from optimizer.core.node import attribute_of, name_of_call
from optimizer.lowering.partition import ENLARGED, LARGEST, as_function
from optimizer.lowering.trace import Recorder, layout_of

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class Engine(Protocol):
    """A compiler or runtime for float32 on the CPU.

    Attributes:
        name: what `engines=` calls it.
        title: what a report calls it.
        module: what is imported.
    """

    name: str
    title: str
    module: str

    def compile(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor], threads: int) -> Run:
        """A program for contiguous float32 inputs of these sizes, or an exception of any kind.

        Any thread may call it; it leaves them as they are and returns memory of its own. `graph`
        holds functions of ATen, and weights that it may keep.
        """


class Compiled(nn.Module):
    """A region by an engine, for moderate inputs; by torch for others.

    Engines make 0 of NaN in a ReLU. A norm is beyond the bound where an element is NaN, infinite
    or huge; of others, which a region makes only finite numbers of, a product with a float32
    weight overflows only where layers amplify 10^28-fold. A forked process has none of the
    engine's threads: there the region runs by torch, too.
    """

    def __init__(
        self, engine: Engine, region: fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        read = region.graph.find_nodes(op="get_attr")
        read = [node for node in read if any(name_of_call(user) != "index" for user in node.users)]
        held = list(map(attribute_of, read))
        if not all(each.is_cpu and each.dtype == torch.float32 for each in (*inputs, *held)):
            raise ValueError("it is not in float32 on the CPU")
        if not all(map(_is_moderate, held)):
            raise ValueError("a constant is not finite, or huge")
        self.region, self.run_region = region, as_function(region)
        self.run = engine.compile(in_aten(region, inputs), inputs, torch.get_num_threads())
        self.process = os.getpid()

    def forward(self, *inputs: torch.Tensor) -> Any:
        """What the region makes of inputs of the sizes that it was compiled for."""
        if os.getpid() == self.process and all(map(_is_moderate, inputs)):
            return self.run([tensor.resolve_neg().contiguous() for tensor in inputs])
        return self.run_region(*inputs)


def _is_moderate(tensor: torch.Tensor) -> bool:
    return bool(torch.linalg.vector_norm(tensor).item() <= LARGEST)


def in_aten(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The basic operators that a region runs for inputs like these, on its weights.

    An engine may keep the memory of those beside what it packs; it asks for it as if to write it,
    so that a snapshot has its own from then on.
    """
    recorder = _Recorder(inputs, region.buffers(), ENLARGED)
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
            tensor, size, dim = (*args, 0)[:3]
            cut, whole = torch.ops.aten.slice.Tensor, tensor.shape[dim]
            with self:  # OpenVINO does not take a last part that is smaller
                starts = range(0, whole, size)
                return [cut(tensor, dim, at, min(at + size, whole)) for at in starts]
        if func._opname in ENLARGED:  # OpenVINO wants the size alone
            corners = [each for each in args[2:3] if isinstance(each, bool)]
            args = (args[0], [*func(*args).shape[2:]], *corners, None)
            func = func.overloadpacket.vec
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            with self:
                args, kwargs = _ungrouped(args, kwargs)
        if func is torch.ops.aten.as_strided_.default:  # as averages do
            moved = torch.as_strided(*args)
            same = moved.storage_offset() == args[0].storage_offset()
            if same and layout_of(moved) == layout_of(args[0]):
                return func(*args)
        return super().__torch_dispatch__(func, types, args, kwargs)


def _ungrouped(args: Sequence[Any], kwargs: Any) -> tuple[Sequence[Any], Any]:
    """Attention whose every head has a key and a value of its own, as OpenVINO knows it."""
    query, key, value, *rest = args
    if not (kwargs or {}).get("enable_gqa"):
        return args, kwargs
    times = query.shape[-3] // key.shape[-3]
    own = [each.repeat_interleave(times, -3) for each in (key, value)]
    return (query, *own, *rest), {**kwargs, "enable_gqa": False}
