"""Import torchvision, also where its C++ operators do not load.

PyPI's Linux wheel of torchvision is linked against the CUDA build of torch. Beside a CPU-only
torch its operators are missing, and `import torchvision` fails all the same, because it attaches
meta kernels to some of them unasked. To declare those is enough: no classification, segmentation
or video model calls them. Only what torch says is missing is declared, after torchvision tried to
load it: an operator that is registered twice ends the process.
"""

from __future__ import annotations

import importlib
import re
import sys
from types import ModuleType

import torch

_MISSING = re.compile(r"operator (torchvision::\w+) does not exist")


def import_torchvision() -> ModuleType:
    """The torchvision package.

    Raises:
        ImportError: it is not installed, or cannot be imported beside this torch.
    """
    declared = set[str]()
    while True:
        try:
            return importlib.import_module("torchvision")
        except Exception as error:  # whatever it raises where it meets another torch than its own
            missing = _MISSING.search(str(error))
            if missing is None or missing[1] in declared:
                raise ImportError(_reason(error)) from error
        torch.library.define(missing[1], "(...) -> ...")
        declared.add(missing[1])
        _forget_what_was_imported()


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torchvision":
        return "torchvision is not installed: run pip install '.[models]' in the clone."
    return f"torchvision cannot be imported beside torch {torch.__version__}: {error}"


def _forget_what_was_imported() -> None:
    """Python keeps the submodules of a package that failed, and would not attach them again."""
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]
