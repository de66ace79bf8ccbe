"""Import torchvision, also where its C++ operators do not load.

PyPI's Linux wheel of torchvision is linked against the CUDA build of torch. Beside a CPU-only
torch its operators are missing, and `import torchvision` fails all the same, because it attaches
meta kernels to two of them unasked. Declaring the two is enough: no classification, segmentation
or video model calls them. Where the real operators load, nothing is declared.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_torchvision() -> ModuleType:
    """The torchvision package.

    Raises:
        ImportError: it is not installed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        raise ImportError(
            'torchvision is not installed: pip install "optimizer[models]" to load its models.'
        )
    _load_operators(spec.submodule_search_locations or ())
    _declare_missing_operators()
    return importlib.import_module("torchvision")


def _load_operators(folders: Iterable[str]) -> None:
    for folder in folders:
        for library in Path(folder).glob("_C.*"):
            with contextlib.suppress(OSError):
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]


def _declare_missing_operators() -> None:
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", _SIGNATURE)
