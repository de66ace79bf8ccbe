"""What may run a region, by name; each is held to the region's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from optimizer.core.copy import on_storage
from optimizer.core.inputs import Call
from optimizer.lowering.cuda_graph import CudaGraph
from optimizer.lowering.packed import with_packed_weights
from optimizer.lowering.partition import name_of
from optimizer.lowering.policies import AS_IT_IS
from optimizer.verify.equivalence import Answer, compare_answers, difference

_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


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
            # Where a product reads it, the channels are its last dimension already.
            if memory_format and all(name_of(user) != "linear" for user in node.users):
                options: dict[str, Any] = {"memory_format": memory_format}
                copies[node] = graph.call_method("contiguous", (copies[node],), options)
        elif node.target == "view" and isinstance(node.args[-1], int | tuple | list):
            copies[node].target = "reshape"  # a layout may not allow a view
        elif node.op == "get_attr" and weights:
            weight = getattr(region, str(node.target))
            if weight.dim() in _MEMORY_FORMATS:
                laid_out = weight.clone(memory_format=_MEMORY_FORMATS[weight.dim()])
                setattr(module, str(node.target), laid_out)
    return fx.GraphModule(module, graph)


Program = nn.Module  # from the tensors of a region to a tuple of those that it returns
Maker = Callable[[Any, Sequence[torch.Tensor]], Program]
Makers = Mapping[str, Maker]
Run = Callable[[str, Program, Sequence[Any]], Any]  # of a name, a program and its inputs


def _packed_in_channels_last(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program:
    return with_packed_weights(in_channels_last(region, inputs, weights=False), inputs)


def _in_channels_last(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program:
    return with_packed_weights(in_channels_last(region, inputs), inputs, convolutions=False)


CANDIDATES: dict[str, Maker] = {
    AS_IT_IS: lambda region, inputs: region,
    "channels_last": in_channels_last,
    "packed weights": with_packed_weights,
    "packed weights, channels_last": _packed_in_channels_last,
    "packed Linear, channels_last": _in_channels_last,
    "CUDA graph": CudaGraph,
}


def prepared(make: Maker, region: Program, inputs: Sequence[torch.Tensor]) -> Program | str:
    """A candidate, ready to run; or why it cannot."""
    try:
        return make(region, inputs)
    except Exception as error:  # whatever a backend raises
        return _in_words(error)


def tried(make: Maker, region: Program, inputs: Sequence[torch.Tensor]) -> Program | str:
    """The same, once it has run: an operator may be missing, or a layout not do."""
    program = prepared(make, region, inputs)
    if program is region or isinstance(program, str):
        return program
    try:
        program(*inputs)
    except Exception as error:
        return _in_words(error)
    return program


def verified(
    make: Maker, region: Program, inputs: Sequence[torch.Tensor], name: str, run: Run
) -> Program | str:
    """The same, once it has given the region's answers; `run` calls either, by its name."""
    program = prepared(make, region, _copies(inputs))
    if program is region or isinstance(program, str):
        return program
    try:
        return _wrong(region, name, program, inputs, run) or program
    except Exception as error:  # it may run once, and no more
        return _in_words(error)


def _in_words(error: Exception) -> str:
    last = str(error).strip().rpartition("\n")[2]
    return f"{type(error).__name__}: {last[:200]}"


def _wrong(
    region: Program, name: str, program: Program, inputs: Sequence[torch.Tensor], run: Run
) -> str:
    """What is wrong with a candidate: on the given inputs and on others, and what it overwrites."""
    given = _copies(inputs)
    others = [varied(tensor) for tensor in given]
    calls = [Call(tuple(tensors), {}) for tensors in (given, others)]
    both = {AS_IT_IS: region, name: program}
    answers = [[Answer(tuple(run(*each, c.args)), ()) for each in both.items()] for c in calls]
    for call, (expected, actual) in zip(calls, answers, strict=True):
        found = compare_answers(region, call, expected, actual, exact=False)
        if found is not None:
            return str(found)
    overwritten = difference(Answer((), [*inputs]), Answer((), given), exact=True)
    return "it overwrites its inputs" if overwritten else ""


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the very strides, gaps included; what is to be negated in reading is by then."""
    tensors = [each.resolve_neg() for each in tensors]
    storages = [each.untyped_storage().clone() for each in tensors]  # type: ignore[no-untyped-call]
    return list(map(on_storage, tensors, storages))


def varied(tensor: torch.Tensor) -> torch.Tensor:
    """Other values in a tensor that lies as this one; the same where they may be indices."""
    if not tensor.is_floating_point():
        return tensor
    (other,) = _copies([tensor])
    held = torch.empty(0, dtype=other.dtype, device=other.device).set_(other.untyped_storage())
    held.copy_(held.roll(1) * 0.5 + 0.25)
    return other
