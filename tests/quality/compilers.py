"""Two compilers as subjects of the hunt: Inductor with freezing, and ONNX Runtime."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

Inputs = tuple[torch.Tensor, ...]


def inductor(model: nn.Module, inputs: Inputs) -> nn.Module:
    """`torch.compile` with freezing, on a copy, up to the graph that Inductor makes kernels of.

    The graph is run as it is, since the compiler of the kernels takes a second for each model; it
    shows the same defects.
    """
    return _Compiled(torch.compile(copy.deepcopy(model), backend=_frozen))


class _Compiled(nn.Module):
    """Calls without gradients, for which alone Inductor freezes."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *inputs: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.compiled(*inputs)


def _frozen(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    patches = {"freezing": True}
    return compile_fx(graph, inputs, _as_it_is, patches)  # type: ignore[arg-type, return-value]


def _as_it_is(graph: fx.GraphModule, inputs: list[torch.Tensor], **_: Any) -> Callable[..., Any]:
    def run(values: list[torch.Tensor]) -> Any:
        return graph(*values)

    run._boxed_call = True  # type: ignore[attr-defined]  # it takes its arguments in one list
    return run


def onnx_runtime(model: nn.Module, inputs: Inputs) -> nn.Module:
    """ONNX Runtime with all its optimizations, on an export of the model that has none."""
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            copy.deepcopy(model), inputs, dynamo=True, optimize=False, verbose=False
        )
    assert program is not None
    return _Session(model, program.model_proto.SerializeToString())


class _Session(nn.Module):
    """ONNX Runtime's values, in the memory of the model's own answer.

    A session knows neither strides nor aliases, and writes no input.
    """

    def __init__(self, model: nn.Module, exported: bytes) -> None:
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self.model = copy.deepcopy(model)
        self.session = onnxruntime.InferenceSession(exported, options, ["CPUExecutionProvider"])

    def forward(self, *inputs: torch.Tensor) -> Any:
        names = [each.name for each in self.session.get_inputs()]
        given = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        values = self.session.run(None, given)
        answer = self.model(*inputs)
        leaves, structure = pytree.tree_flatten(answer)
        for leaf, value in zip(leaves, values, strict=True):
            assert leaf.shape == value.shape, f"expected {leaf.shape}, got {value.shape}"
            leaf.copy_(torch.from_numpy(value))
        return pytree.tree_unflatten(leaves, structure)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
