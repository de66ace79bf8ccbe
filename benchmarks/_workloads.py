"""What is benchmarked: models by name, and variants of them as the subjects make them.

Names are static strings, because asv files each result under the text of its parameters. Only
append to these tuples. Nothing here imports torch before it is needed: asv reads this module to
list the benchmarks, and skips devices that are absent without paying for the import.
"""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .subjects import EAGER, OURS, VARIANT, Task, named, names

TORCHVISION = [
    "resnet18",
    "resnet50",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
    "swin_t",
    "swin_v2_t",
    "densenet121",
    "shufflenet_v2_x1_0",
    "regnet_y_400mf",
    "vgg11_bn",
    "deeplabv3_mobilenet_v3_large",
    "r3d_18",
]
MODELS = [
    "toy_model",
    "transpose_toy",
    "simple_mlp",
    "simple_cnn",
    "tiny_convnet",
    "resnet_block",
    "masked_assign",
    "masked_assign_where",
    "linear_bn_relu_100",
    "transpose_chain_100",
    "masked_postprocess_4096",
    *TORCHVISION,
]
# Of packages that need not be installed. Their graphs are Dynamo's, for the most part: not counted.
LIBRARIES = {
    "timm": [
        "mobilenetv4_conv_small",
        "ghostnetv2_100",
        "repvgg_a0",
        "convnextv2_atto",
        "edgenext_small",
        "levit_128s",
        "poolformerv2_s12",
        "hrnet_w18_small",
        "mobilevitv2_100",
        "eva02_tiny_patch14_224",
    ],
    "transformers": [
        "bert_base_128",
        "bert_base_512",
        "distilbert",
        "gpt2_prefill",
        "gpt2_decode",
        "llama_100m_prefill",
        "llama_100m_decode",
        "t5_small_encoder",
        "vit_base",
        "clip_text",
        "whisper_tiny_encoder",
        "wav2vec2_base",
    ],
}
EVERY_MODEL = [*MODELS, *LIBRARIES["timm"], *LIBRARIES["transformers"]]
# Measured first, and alone where time is short: eight kinds of network, none slow to prepare.
HEADLINE = (
    "resnet18",
    "resnet50",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "convnext_tiny",
    "swin_t",
    "densenet121",
    "shufflenet_v2_x1_0",
)
VARIANTS = names(VARIANT)
REWRITTEN = [name for name in VARIANTS if name != EAGER]
PORTABLE = ["optimized-1", "fx_fuse"]  # whose graphs are counted
LEVEL_2 = ["optimized-2", "optimized-2-openvino"]  # of which it is counted what runs them
_WARM_UP_CALLS = 2

Subject = tuple[Any, tuple[Any, ...]]


def imported(name: str) -> Any:
    """A package of the commit under test, which an old commit may lack.

    Raises NotImplementedError, for which asv reports n/a.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise NotImplementedError(f"this commit has no {name}") from error


def offered(package: str, name: str) -> Any:
    """What `package` of the commit under test calls `name`, likewise."""
    try:
        return getattr(imported(package), name)
    except AttributeError as error:
        raise NotImplementedError(f"this commit has no {package}.{name}") from error


def built(model: str, device: str) -> Subject:
    """A registered model on `device`, ready for one thread and no gradients, and its inputs."""
    _require_hardware(device)
    _prepare_torch(device)
    try:
        workload = offered("models", "load")(model, device=device)
    except LookupError as error:
        raise NotImplementedError(f"this commit has no model {model}") from error
    except ImportError as error:  # the advice stands in it
        raise NotImplementedError(str(error)) from error
    return workload.module, workload.example_inputs


@functools.cache
def chain(layers: int) -> Subject:
    """So many layers of Linear, BatchNorm and ReLU in a row, and an input; built once a process."""
    _prepare_torch("cpu")
    workload = offered("models", "synthetic").linear_bn_relu(layers)
    return workload.module, workload.example_inputs


load = functools.cache(built)


@functools.cache
def subject(model: str, variant: str, device: str) -> Subject:
    """A variant of a model on `device`, and its inputs; prepared once a process."""
    module, inputs = load(model, device)
    return rewriter(variant)(module, inputs), inputs


@functools.cache
def forward(model: str, variant: str, device: str) -> Callable[[], None]:
    """One forward as a function that returns when the device is done, already called twice."""
    module, inputs = subject(model, variant, device)
    synchronize = _synchronize(device)

    def run() -> None:
        module(*inputs)
        synchronize()

    for _ in range(_WARM_UP_CALLS):
        run()
    return run


@functools.cache
def rewriting(build: Callable[..., Subject], arguments: tuple[Any, ...], tool: str) -> Callable:
    """The work of `tool` on what `build` builds, as a function that has been called once."""
    module, inputs = build(*arguments)
    rewrite = rewriter(tool)
    rewrite(module, inputs)
    return functools.partial(rewrite, module, inputs)


def rewriter(variant: str, *, timed: bool = True) -> Callable[[Any, Any], Any]:
    """What makes a variant of (module, inputs); ours without the check of its answer.

    Without `timed`, what ours chooses is the same every time.
    """
    subject, folder = named(variant), Path(tempfile.gettempdir())

    def rewrite(module: Any, inputs: Any) -> Any:
        if variant.startswith(OURS):
            offered("optimizer", "optimize")
        try:
            return subject.prepare(Task(module, inputs, 1, folder, check=False, timed=timed))
        except NotImplementedError:
            raise
        except Exception as error:  # others have many ways to fail on a model they do not know
            if variant.startswith(OURS):
                raise
            raise NotImplementedError(f"{variant}: {error}") from error

    return rewrite


def _require_hardware(device: str) -> None:
    """A cheap look before torch is imported."""
    if device == "cuda" and not (shutil.which("nvidia-smi") or Path("/dev/kfd").exists()):
        raise NotImplementedError("no NVIDIA or AMD GPU")
    if device == "mps" and sys.platform != "darwin":
        raise NotImplementedError("no Apple GPU")


def _prepare_torch(device: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    present = {"cpu": lambda: True, "cuda": torch.cuda.is_available, "mps": torch.mps.is_available}
    if not present[device]():
        raise NotImplementedError(f"this torch cannot use {device}")


def _synchronize(device: str) -> Callable[[], None]:
    import torch

    return {"cpu": lambda: None, "cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}[
        device
    ]
