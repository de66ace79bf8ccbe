"""The candidates for a region, by name, and those that each kind of device is offered.

What is offered is timed, so that it may lose. What is known to lose is not offered: on MPS,
convolutions in channels_last were 4 to 9 times slower (pytorch issue 192551), and no operator fuses
one with what follows: level 2 only saves calls there. On any other device, nothing is lowered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.backends.cpu import get_cpu_capability

from optimizer.core.device import Cuda, Program, device_of
from optimizer.core.errors import require
from optimizer.core.node import name_of_call
from optimizer.lowering import packed as _packed
from optimizer.lowering.packed import packable_in, with_packed_weights
from optimizer.lowering.partition import arguments_of, as_function, convolutions_of

AS_IT_IS = "as it is"
_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def in_channels_last(
    region: fx.GraphModule, inputs: Sequence[torch.Tensor], *, weights: bool = True
) -> fx.GraphModule:
    """Return the same region with its images in channels_last; `weights` too, unless packed."""
    module = fx.GraphModule(region, copy.deepcopy(region.graph))
    for node, example in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        memory_format: Any = _MEMORY_FORMATS.get(example.dim())
        # Where a product reads it, the channels are its last dimension already.
        if memory_format and all(name_of_call(user) != "linear" for user in node.users):
            options = {"memory_format": memory_format}
            with module.graph.inserting_after(node):
                image = module.graph.call_method("contiguous", (node,), options)
            image.meta = dict(node.meta)
            node.replace_all_uses_with(image)
            image.args = (node,)
    for node in module.graph.nodes:
        if name_of_call(node) == "view" and isinstance(node.args[-1], int | tuple | list):
            node.target = torch.ops.aten.reshape.default  # a layout may not allow a view
    for name, weight in module.named_buffers() if weights else ():
        if weight.dim() in _MEMORY_FORMATS:
            laid_out = weight.clone(memory_format=_MEMORY_FORMATS[weight.dim()])
            module.register_buffer(name, laid_out)
    return fx.GraphModule(module, module.graph)


def laid_out(program: Program, region: fx.GraphModule) -> Program:
    """Return a program that runs a region, with outputs laid out as the region's own.

    What reads them was recorded so: another layout may not have a view, or have it elsewhere.
    """
    outputs: Any = region.graph.output_node().args[0]
    run, strides = as_function(program), [node.meta["val"].stride() for node in outputs]
    return lambda *inputs: tuple(map(_laid_out, run(*inputs), strides))


def _laid_out(tensor: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
    """Return the same values with these strides; along one of 0, they are repeated."""
    if tensor.stride() == steps:
        return tensor
    if all(n == 1 or a == b for n, a, b in zip(tensor.shape, tensor.stride(), steps, strict=True)):
        return tensor.as_strided(tensor.shape, steps)
    source = tensor[tuple(slice(0, None if stride else 1) for stride in steps)]
    result = torch.empty_strided(source.shape, steps, dtype=tensor.dtype, device=tensor.device)
    return result.copy_(source).expand(tensor.shape)


def as_cuda_graph(program: Program, inputs: Sequence[torch.Tensor]) -> Program:
    """Return a program as one CUDA graph: all kernels in one launch, on memory of their own.

    It reads and writes the same memory in every replay: inputs of a call, sized and laid out as
    `inputs`, are copied there, and outputs from there. Calls take turns, also those of several
    threads or streams. It holds the program, whose weights the kernels read, what one forward
    needs at its peak, its inputs and outputs.

    Raises:
        RuntimeError: the program does something that cannot be recorded, such as to wait.
    """
    device = device_of(inputs)
    assert isinstance(device, Cuda), f"{device.name} has no CUDA graphs"
    turn, (replay, copies, outputs) = device.turns(), device.record(program, inputs)

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        if Cuda.is_measured:
            return program(*map(torch.clone, inputs))
        with turn():
            torch._foreach_copy_(copies, inputs)
            replay()
            return tuple(output.clone() for output in outputs)

    return run


Maker = Callable[[Any, Sequence[torch.Tensor]], Any]  # raises what it cannot do
CANDIDATES: dict[str, Maker] = {
    AS_IT_IS: lambda region, inputs: region,
    "channels_last": in_channels_last,
    "packed weights": with_packed_weights,
    "packed weights, channels_last": lambda region, inputs: with_packed_weights(
        in_channels_last(region, inputs, weights=False), inputs
    ),
    "packed Linear, channels_last": lambda region, inputs: with_packed_weights(
        in_channels_last(region, inputs), inputs, convolutions=False
    ),
    "CUDA graph": as_cuda_graph,
}


class Policy(NamedTuple):
    """The candidates for a kind of device; by default none, so that level 2 only saves calls."""

    # Those for a region, the most promising first, and whether that is faster for certain.
    offered: Callable[[fx.GraphModule, Sequence[torch.Tensor]], list[str]] = lambda *_: []
    pays: Callable[[fx.GraphModule, Sequence[torch.Tensor]], bool] = lambda *_: False
    settings: Callable[[], Hashable] = lambda: ()  # of its kernels; False while no plan may run
    hardware: Callable[[], str] = lambda: ""  # the name of what a decision is for
    for_calls: tuple[str, ...] = ()  # those for a whole call, once each region is chosen


def _offered_on_cpu(region: fx.GraphModule, _: Sequence[torch.Tensor]) -> list[str]:
    images = convolutions_of(region)
    if not (_packed.is_available() and packable_in(region)):
        return ["channels_last"] if images else []
    if not images:
        return ["packed weights"]
    grouped = any(arguments_of(each)["groups"] > 1 for each in images)
    return ["packed weights, channels_last", *["packed Linear, channels_last"] * grouped]


def _settings_on_cuda() -> Hashable:
    return not Cuda.is_capturing() and (
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        torch._C._get_fp32_precision_getter("cuda", "conv"),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_deterministic_algorithms(),
    )


_UNKNOWN = Policy(settings=bool)
POLICIES = {
    "cpu": Policy(
        _offered_on_cpu,
        # Products were faster by oneDNN on one processor (AVX-512), and slower on another.
        lambda region, _: 2 * len(convolutions_of(region)) >= len(packable_in(region)),
        torch.get_num_threads,
        get_cpu_capability,
    ),
    "cuda": Policy(
        lambda region, _: ["channels_last"] if convolutions_of(region) else [],
        settings=_settings_on_cuda,
        hardware=lambda: torch.cuda.get_device_name(),
        for_calls=("CUDA graph",),
    ),
    "mps": Policy(),
}


def policy_of(tensors: Iterable[torch.Tensor]) -> Policy:
    """Return the policy for the device that work on `tensors` is done on."""
    kinds = (tensor.device.type for tensor in tensors)
    return POLICIES.get(next((kind for kind in kinds if kind != "cpu"), "cpu"), _UNKNOWN)


def require_one_device(tensors: Iterable[torch.Tensor]) -> None:
    """Require that all tensors, but single numbers, are on one known device."""
    devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"}
    require(len(devices) <= 1, "its tensors are on several devices")
    known = POLICIES.keys() >= {device.type for device in devices}
    require(known, "nothing is known of its device")
