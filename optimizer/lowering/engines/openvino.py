"""OpenVINO: its own decoder for FX graphs, its own kernels for CPUs."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from optimizer.core.node import name_of_call
from optimizer.lowering.engines.compiled import Run

_TELEMETRY, _ABSENT = "openvino_telemetry", object()
_CORES: list[Any] = []
_LOCK = threading.Lock()


class OpenVino:
    """Compiles in a second, and shares memory with torch both ways.

    Source: https://docs.openvino.ai, "Python API", `FrontEndManager` and `compile_model`.
    """

    name, title, module = "openvino", "OpenVINO", "openvino"

    def compile(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor], threads: int) -> Run:
        """A program on so many threads; calls at once take a request each."""
        openvino = _imported()
        model = _converted(graph, inputs)
        # The code that it generates ends the process at a sum behind a GroupNorm and, from 2026 on,
        # at x.relu() + f(g(x)) of two Linear. The library that it calls else is mostly as fast.
        named = {name_of_call(node) for node in graph.graph.nodes}
        generates = openvino.__version__ < "2026" and "native_group_norm" not in named
        settings = {
            "ENABLE_CPU_PINNING": False,  # the threads are the caller's to place
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        settings |= {} if generates else {"SNIPPETS_MODE": "DISABLE"}
        compiled = _core().compile_model(model, "CPU", settings)
        shapes = [tuple(output.get_shape()) for output in compiled.outputs]
        idle: list[Any] = []  # list.append and list.pop need no lock

        def shared(tensor: torch.Tensor) -> Any:
            return openvino.Tensor(tensor.numpy(), shared_memory=True)

        def run(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            try:
                request = idle.pop()
            except IndexError:
                request = compiled.create_infer_request()
            made = [torch.empty(shape, dtype=torch.float32) for shape in shapes]
            for place, tensor in enumerate(given):
                request.set_input_tensor(place, shared(tensor))
            for place, tensor in enumerate(made):
                request.set_output_tensor(place, shared(tensor))
            request.infer()
            idle.append(request)
            return made

        return run


def _core() -> Any:
    """One for the process, and never let go.

    Where a processor has tiles (AMX), OpenVINO's plugin gives the thread a stack for signals, and
    takes the memory back with the last core and model: the next signal then ends the process.
    """
    with _LOCK:
        if not _CORES:
            _CORES.append(_imported().Core())
    return _CORES[0]


def _imported() -> Any:
    """The package without its telemetry, which starts a thread and reports each import."""
    modules: dict[str, Any] = sys.modules
    kept = modules.get(_TELEMETRY, _ABSENT)
    modules[_TELEMETRY] = None  # it cannot be imported
    try:
        return importlib.import_module("openvino")
    finally:
        del modules[_TELEMETRY]
        if kept is not _ABSENT:
            modules[_TELEMETRY] = kept


def _converted(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
    openvino = _imported()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    front_end = FrontEndManager().load_by_framework("pytorch")
    decoder = TorchFXPythonDecoder(graph)  # OpenVINO does not keep it alive
    model = front_end.convert(front_end.load(decoder))
    for parameter, tensor in zip(model.get_parameters(), inputs, strict=True):
        parameter.set_partial_shape(openvino.PartialShape(list(tensor.shape)))
        parameter.set_element_type(openvino.Type.f32)
    model.validate_nodes_and_infer_types()
    return model
