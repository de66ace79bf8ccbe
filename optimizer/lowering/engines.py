"""Compilers and runtimes that others keep, for regions.

What enters is a region and example inputs; what leaves is a program that takes such inputs. An
engine says what it is called, what pip installs it by, and compiles. What OpenVINO lacks, or is
slow at, ends a region (`partition`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

from optimizer.core.copy import read_only
from optimizer.core.errors import InputError
from optimizer.core.inputs import map_tensors, tensors_in
from optimizer.core.node import name_of_call
from optimizer.lowering.partition import ENLARGED, as_function, for_moderate, makes_no_nan
from optimizer.lowering.trace import Recorder, layout_of, without_data

Run: TypeAlias = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Engines: TypeAlias = str | Iterable[str]
_TELEMETRY = "openvino_telemetry"
_LOCK = threading.Lock()
_PRODUCTS = frozenset((
    "linear", "mm", "addmm", "bmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu",
))  # fmt: skip
_MANY_ROWS, _LONG = 64, 384  # of a large product: its rows, and the numbers in each
_TYPES = {"f32": torch.float32, "boolean": torch.bool}  # by OpenVINO's names


class Engine(NamedTuple):
    """A compiler or runtime for float32 on the CPU, or any dtype on a GPU.

    From a graph of functions of ATen, with weights that it may keep, and from inputs, it makes a
    program on so many threads for contiguous inputs of these sizes and dtypes, or raises anything.
    Any thread may call that; it leaves its inputs as they are and returns memory of its own.
    """

    title: str  # what a report calls it
    module: str  # what is imported
    compile: Callable[[fx.GraphModule, Sequence[torch.Tensor], int], Run]
    devices: Set[str] = frozenset({"cpu"})  # the kinds of device that it is for


def compiled(
    engine: Engine, region: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> Callable[..., Sequence[torch.Tensor]]:
    """Return a region that runs by an engine; by torch in a forked process, without its threads.

    Raises:
        ValueError: the engine may not run it.
    """
    inputs, on_cpu = list(map(_plain, inputs)), all(each.is_cpu for each in inputs)
    if on_cpu and not makes_no_nan(region, inputs):
        raise ValueError("it is not in float32, or a constant is not finite, or huge")
    run = engine.compile(in_aten(region, inputs), inputs, torch.get_num_threads())
    run_region, process = as_function(region), os.getpid()

    def run_here(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        if os.getpid() != process:
            return run_region(*inputs)  # type: ignore[no-any-return]
        return run(list(map(_plain, inputs)))

    return for_moderate(region, run_here) if on_cpu else run_here


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_neg().contiguous()


def in_aten(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Return the basic operators that a region runs for such inputs, on weights to be kept."""
    attention = () if inputs[0].is_cpu else ("scaled_dot_product_attention",)  # Inductor's to split
    recorder = _Recorder(inputs, region.buffers(), {*ENLARGED, "linear", *attention})
    with torch.inference_mode(), recorder:
        outputs = region(*inputs)
    module = recorder.finished(outputs)
    for name, weight in module.named_buffers():
        module.register_buffer(name, read_only(weight))
    if not all(node.meta["val"].numel() for node in module.graph.nodes if "val" in node.meta):
        raise ValueError("a tensor is empty")  # OpenVINO ends the process
    return module.eval()


class _Recorder(Recorder):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.split.Tensor:  # OpenVINO wants a last part as large as the others
            sizes = [part.shape[(*args, 0)[2]] for part in func(*args)]
            func, args = torch.ops.aten.split_with_sizes.default, (args[0], sizes, *args[2:])
        if func._opname in ENLARGED:  # OpenVINO wants the size alone
            corners = [each for each in args[2:3] if isinstance(each, bool)]
            args = (args[0], [*func(*args).shape[2:]], *corners, None)
            func = func.overloadpacket.vec
        if func is torch.ops.aten.scaled_dot_product_attention.default and kwargs.get("enable_gqa"):
            query, key, value, *rest = args
            heads = query.shape[-3] // key.shape[-3]
            with self:  # OpenVINO wants a key and a value for each
                repeated = [each.repeat_interleave(heads, -3) for each in (key, value)]
            args, kwargs = (query, *repeated, *rest), {**kwargs, "enable_gqa": False}
        if func is torch.ops.aten.as_strided_.default:  # as averages do
            moved = torch.as_strided(*args)
            same = moved.storage_offset() == args[0].storage_offset()
            if same and layout_of(moved) == layout_of(args[0]):
                return func(*args)
        if func._opname in _PRODUCTS and any(each in self.nodes for each in tensors_in(args)):
            on_meta = func(*map_tensors(without_data, args), **map_tensors(without_data, kwargs))
            room = map_tensors(lambda each: torch.empty_like(each, device=args[0].device), on_meta)
            self._note(self._call(func, args, kwargs), room)
            return room  # no number is of use
        return super().__torch_dispatch__(func, types, args, kwargs)


def _by_onnx_runtime(graph: fx.GraphModule, inputs: Sequence[torch.Tensor], threads: int) -> Run:
    """Compile by ONNX Runtime, in 3 to 15 seconds, nearly all of them in the exporter.

    Its threads do not spin between calls.
    Source: https://onnxruntime.ai/docs/api/python, `InferenceSession`.
    """
    import onnxruntime

    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        exported = torch.onnx.export(graph, tuple(inputs), dynamo=True, verbose=False)
    assert exported is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        exported.model_proto.SerializeToString(), options, ["CPUExecutionProvider"]
    )
    names = [each.name for each in session.get_inputs()]

    def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        arrays = {name: each.numpy() for name, each in zip(names, tensors, strict=True)}
        return list(map(torch.from_numpy, session.run(None, arrays)))

    return run


def _by_openvino(graph: fx.GraphModule, inputs: Sequence[torch.Tensor], threads: int) -> Run:
    """Compile by OpenVINO, in a second; it shares memory with torch both ways.

    Concurrent calls take a request each.
    Source: https://docs.openvino.ai, "Python API", `FrontEndManager` and `compile_model`.
    """
    openvino = _imported()
    results: Any = graph.graph.output_node().args[0]
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        _keep_apart(graph.graph)
    model = _converted(graph, inputs)
    # The code that it generates ends the process at a sum behind a GroupNorm and, from 2026 on,
    # at x.relu() + f(g(x)) of two Linear. The library that it calls else is mostly as fast.
    operators = {name_of_call(node) for node in graph.graph.nodes}
    generates = openvino.__version__ < "2026" and "native_group_norm" not in operators
    settings = {
        "ENABLE_CPU_PINNING": False,  # the threads are the caller's to place
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "SNIPPETS_MODE": "ENABLE" if generates else "DISABLE",
    }
    compiled = _core().compile_model(model, "CPU", settings)
    made = compiled.outputs[: len(results)]
    types = [(tuple(each.shape), _TYPES[each.element_type.get_type_name()]) for each in made]
    idle: list[Any] = []  # list.append and list.pop need no lock

    def shared(tensor: torch.Tensor) -> Any:
        return openvino.Tensor(tensor.numpy(), shared_memory=True)

    def run(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        try:
            request = idle.pop()
        except IndexError:
            request = compiled.create_infer_request()
        outputs = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in types]
        for place, tensor in enumerate(tensors):
            request.set_input_tensor(place, shared(tensor))
        for place, tensor in enumerate(outputs):
            request.set_output_tensor(place, shared(tensor))
        request.infer(share_outputs=True)  # or it copies them once more
        idle.append(request)
        return outputs

    return run


def _keep_apart(graph: fx.Graph) -> None:
    """Give each large product a second reader, so that OpenVINO fuses nothing into it.

    What it fuses runs by oneDNN; what is alone by MLAS, which takes three quarters of the time
    where there is no AVX-512.
    """
    output: Any = graph.output_node()
    for node in graph.nodes:
        if name_of_call(node) not in ("linear", "mm") or output in node.users:
            continue
        *rows, inner = node.args[0].meta["val"].shape
        if math.prod(rows) >= _MANY_ROWS and inner >= _LONG:
            with graph.inserting_after(node):
                part = graph.call_function(torch.ops.aten.slice.Tensor, (node, -1, 0, 1))
            output.args = ((*output.args[0], part),)


@functools.cache
def _core() -> Any:
    """Return the one core of the process, which is never freed.

    Where a processor has tiles (AMX), OpenVINO's plugin gives the thread a stack for signals, and
    takes the memory back with the last core and model: the next signal then ends the process.
    """
    return _imported().Core()


def _imported() -> Any:
    """Import the package without its telemetry, which starts a thread and reports each import."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault(_TELEMETRY, None)  # it cannot be imported
    try:
        return importlib.import_module("openvino")
    finally:
        if modules[_TELEMETRY] is None:
            del modules[_TELEMETRY]


def _converted(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
    openvino = _imported()
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    front_end = FrontEndManager().load_by_framework("pytorch")
    decoder = TorchFXPythonDecoder(graph)  # OpenVINO does not keep it alive
    model = front_end.convert(front_end.load(decoder))
    for parameter, tensor in zip(model.get_parameters(), inputs, strict=True):
        parameter.set_partial_shape(openvino.PartialShape(list(tensor.shape)))
        parameter.set_element_type(openvino.Type(tensor.numpy().dtype))
    model.validate_nodes_and_infer_types()
    return model


def _by_inductor(graph: fx.GraphModule, inputs: Sequence[torch.Tensor], threads: int) -> Run:
    """Compile by what `torch.compile` runs, in 5 to 60 seconds, with weights as constants.

    It writes kernels: by Triton on a GPU, and by a C++ compiler on the CPU, which must be there.
    Source: `torch._inductor.compile`, and its setting `freezing`.
    """
    with _LOCK, warnings.catch_warnings(action="ignore"):  # of imports, of precision on a GPU
        from torch import _inductor

        with tracing(TracingContext(FakeTensorMode())):
            run = _inductor.compile(graph, list(inputs), {"freezing": True})
    return lambda tensors: run(*tensors)


ENGINES = {
    "openvino": Engine("OpenVINO", "openvino", _by_openvino),
    "onnxruntime": Engine("ONNX Runtime", "onnxruntime", _by_onnx_runtime),
    "inductor": Engine("Inductor", "torch", _by_inductor, frozenset({"cpu", "cuda"})),
}
AUTOMATIC = ("openvino",)  # the others take too long to prepare


def engines_named(names: Engines) -> tuple[str, ...]:
    """Return the names that a caller passes; "auto" is what is installed and quickly prepared.

    Raises:
        InputError: there is no such engine, or it cannot be used.
    """
    if names == "auto":
        return tuple(name for name in AUTOMATIC if _is_installed(ENGINES[name]))
    items = [names] if isinstance(names, str) else names
    listed = list(items) if isinstance(items, Iterable) else [None]
    for name in listed:
        if not isinstance(name, str) or name not in ENGINES:
            choices = ", ".join(map(repr, ENGINES))
            raise InputError(f"engines: there is no {name!r}, but there are {choices}, and 'auto'.")
        if not _is_installed(ENGINES[name]):
            advice = f"run python -m pip install '.[{name}]' in the clone"
            raise InputError(f"engine {name!r} is not installed: {advice}.")
    return tuple(map(str, listed))


def _is_installed(engine: Engine) -> bool:
    return importlib.util.find_spec(engine.module) is not None


def engines_here(names: Iterable[str]) -> dict[str, Engine]:
    """Return the engines of these names that can be used, by title and version."""
    usable = [each for name, each in ENGINES.items() if name in names and _is_installed(each)]
    return {f"{each.title} {importlib.metadata.version(each.module)}": each for each in usable}
