"""What a user can do to run a model faster: one function for each peer, named as in the tables.

Each takes a task and gives back what is called with the inputs, or raises. Torch and the peers
are imported when they are asked for: the parent only lists their names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._subjects import EAGER


class Task(NamedTuple):
    """A module in eval mode and its positional inputs, for so many threads."""

    module: Any
    inputs: tuple[Any, ...]
    threads: int
    folder: Path  # for files; gone with the process


def eager(task: Task) -> Callable[..., Any]:
    return task.module


def fx_fuse(task: Task) -> Callable[..., Any]:
    from torch.fx.experimental.optimization import fuse

    return fuse(task.module)


def torchscript(task: Task) -> Callable[..., Any]:
    """Traced, frozen, and with the convolutions of oneDNN."""
    import torch

    return torch.jit.optimize_for_inference(_traced(task.module, task.inputs))


def onednn_graph(task: Task) -> Callable[..., Any]:
    """Traced and frozen with oneDNN Graph; a model of images is laid out channels last."""
    import torch

    torch.jit.enable_onednn_fusion(True)
    of_images = any(each.dim() == 4 for each in task.inputs)
    module = _channels_last(task.module) if of_images else task.module
    frozen = torch.jit.freeze(_traced(module, _laid_out(task.inputs)))
    return lambda *inputs: frozen(*_laid_out(inputs))


def compiled(task: Task, **options: Any) -> Callable[..., Any]:
    import torch

    return torch.compile(task.module, **options)


def frozen(task: Task) -> Callable[..., Any]:
    """Compiled with weights as constants, which `torch.compile(options=...)` does not do."""
    from torch._inductor import config

    config.freezing = True
    return compiled(task)


def onnxruntime(task: Task) -> Callable[..., Any]:
    import onnxruntime as runtime
    import torch

    file = task.folder / "model.onnx"
    torch.onnx.export(task.module, task.inputs, file, dynamo=True, verbose=False)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = task.threads
    session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def call(*inputs: Any) -> list[Any]:
        arrays = session.run(None, dict(zip(names, map(_array, inputs), strict=True)))
        return [torch.from_numpy(array) for array in arrays]

    return call


def openvino(task: Task) -> Callable[..., Any]:
    """In float32: by itself it would choose bfloat16 where that is faster."""
    import openvino as runtime
    import torch

    converted = runtime.convert_model(task.module, example_input=task.inputs)
    settings = {
        "INFERENCE_NUM_THREADS": task.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = runtime.compile_model(converted, "CPU", settings).create_infer_request()

    def call(*inputs: Any) -> list[Any]:
        found = request.infer(list(map(_array, inputs)), share_inputs=True, share_outputs=True)
        return [torch.from_numpy(found[index]) for index in range(len(found))]

    return call


def optimized(task: Task, level: int, engines: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Ours, as a user gets it: with the check of its answer."""
    import optimizer

    return optimizer.optimize(task.module, task.inputs, level=level, engines=engines)


PREPARATIONS: dict[str, Callable[[Task], Callable[..., Any]]] = {
    EAGER: eager,
    "fx_fuse": fx_fuse,
    "torchscript": torchscript,
    "onednn_graph": onednn_graph,
    "compile": compiled,
    "compile-freezing": frozen,
    "compile-reduce-overhead": functools.partial(compiled, mode="reduce-overhead"),
    "compile-max-autotune": functools.partial(compiled, mode="max-autotune"),
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "optimized-1": functools.partial(optimized, level=1),
    "optimized-2": functools.partial(optimized, level=2),
    "optimized-2-openvino": functools.partial(optimized, level=2, engines=("openvino",)),
}
_FOR_GPUS = {"compile-reduce-overhead", "compile-max-autotune"}
_FOR_CPUS = {"onednn_graph", "onnxruntime", "openvino"}


def usual(device: str) -> list[str]:
    """The peers that are measured on a device unless others are named."""
    left_out = _FOR_GPUS if device == "cpu" else _FOR_CPUS
    return [peer for peer in PREPARATIONS if peer not in left_out]


def _traced(module: Any, inputs: tuple[Any, ...]) -> Any:
    import torch

    return torch.jit.trace(module, inputs, strict=False, check_trace=False)


def _channels_last(thing: Any) -> Any:
    import torch

    return thing.to(memory_format=torch.channels_last)


def _laid_out(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(_channels_last(each) if each.dim() == 4 else each for each in inputs)


def _array(tensor: Any) -> Any:
    return tensor.numpy()
