"""What may run a region, by name; each is held to the region's answer before it is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from optimizer._check import Answer, compare_answers
from optimizer._copy import on_storage
from optimizer._inputs import Call
from optimizer.lowering._attention import as_one_call
from optimizer.lowering._cuda_graph import CudaGraph
from optimizer.lowering._function import as_function
from optimizer.lowering._fused import with_fused_kernels
from optimizer.lowering._onednn import Program, in_channels_last, on_onednn
from optimizer.lowering._packed import with_packed_weights
from optimizer.lowering._policies import AS_IT_IS
from optimizer.lowering._products import as_products
from optimizer.lowering._regions import constant_inputs

Run = Callable[[str, Program, Sequence[Any]], Any]  # of a name, a program and its inputs


_LARGEST = 2.0**32  # norm


class _AsPrepared(nn.Module):
    """A program where inputs lie as those that it was prepared with, and are moderate.

    Else the region itself. oneDNN's ReLU makes 0 of NaN, and so may the maximum of scores that
    torch's attention takes. A norm is beyond the bound where an element is NaN, infinite or huge:
    of others, a product with a float32 weight overflows only where layers amplify 10^28-fold.
    Constants are not looked at: with these, the program was seen to be right.
    """

    def __init__(
        self, program: Program, region: fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self.program, self.region = program, region
        self.run, self.run_region = as_function(program), as_function(region)
        self.strides = [tensor.stride() for tensor in inputs]
        self.computed = [
            place
            for place, constant in enumerate(constant_inputs(region))
            if not constant and (inputs[place].is_floating_point() or inputs[place].is_complex())
        ]

    def forward(self, *inputs: torch.Tensor) -> Any:
        as_prepared = list(map(torch.Tensor.stride, inputs)) == self.strides
        moderate = as_prepared and all(_is_moderate(inputs[place]) for place in self.computed)
        return self.run(*inputs) if moderate else self.run_region(*inputs)


def _is_moderate(tensor: torch.Tensor) -> bool:
    return bool(torch.linalg.vector_norm(tensor).item() <= _LARGEST)


def _where_moderate(make: Callable[..., Program]) -> Callable[..., Program]:
    """What makes a program that may lose NaN. To ask on a GPU would wait for it: there it is tried.

    Raises:
        ValueError: it loses NaN on a GPU.
    """

    def made(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program:
        program = make(region, inputs)
        if all(each.is_cpu for each in inputs):
            return _AsPrepared(program, region, inputs)
        return _keeping_nan(program, region, inputs)

    return made


def _keeping_nan(program: Program, region: Program, inputs: Sequence[torch.Tensor]) -> Program:
    """The program, which was seen to yield NaN where the region does, for one in any input.

    Raises:
        ValueError: it does not.
    """
    for place, given in enumerate(inputs):
        if given.is_floating_point() and given.numel():
            (poisoned,) = _copies([given])
            poisoned[(0,) * given.dim()] = math.nan
            both = [*inputs[:place], poisoned, *inputs[place + 1 :]]
            for expected, actual in zip(region(*both), program(*both), strict=True):
                if not torch.equal(expected.isnan(), actual.isnan()):
                    raise ValueError("it loses NaN")
    return program


def _on_onednn_in_channels_last(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program:
    return on_onednn(in_channels_last(region, inputs, weights=False), inputs)


def _packed_in_channels_last(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program:
    return with_packed_weights(in_channels_last(region, inputs))


def _fused(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program:
    return _keeping_nan(with_fused_kernels(region, inputs), region, inputs)


def _fused_in_channels_last(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Program:
    return _fused(in_channels_last(region, inputs), inputs)


CANDIDATES: dict[str, Callable[[Any, Sequence[torch.Tensor]], Program]] = {
    AS_IT_IS: lambda region, inputs: region,
    "oneDNN Graph, channels_last": _where_moderate(_on_onednn_in_channels_last),
    "channels_last": in_channels_last,
    "packed weights": lambda region, inputs: with_packed_weights(region),
    "packed weights, channels_last": _packed_in_channels_last,
    "fused kernels": _fused,
    "fused kernels, channels_last": _fused_in_channels_last,
    "attention in one call": _where_moderate(as_one_call),
    "attention in products": _where_moderate(as_products),
    "CUDA graph": CudaGraph,
}


def prepared(name: str, region: Program, inputs: Sequence[torch.Tensor]) -> Program | str:
    """A candidate, ready to run; or why it cannot."""
    try:
        return CANDIDATES[name](region, inputs)
    except Exception as error:  # whatever a backend raises
        return _in_words(error)


def tried(name: str, region: Program, inputs: Sequence[torch.Tensor]) -> Program | str:
    """The same, once it has run: an operator may be missing, or a layout not do."""
    program = prepared(name, region, inputs)
    if name == AS_IT_IS or isinstance(program, str):
        return program
    try:
        program(*inputs)
    except Exception as error:
        return _in_words(error)
    return program


def verified(name: str, region: Program, inputs: Sequence[torch.Tensor], run: Run) -> Program | str:
    """The same, once it has given the region's answers; `run` calls either, by its name."""
    program = prepared(name, region, _copies(inputs))
    if name == AS_IT_IS or isinstance(program, str):
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
    kept = all(map(torch.equal, given, inputs))
    return "" if kept else "it overwrites its inputs"


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the very strides, gaps included."""
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
