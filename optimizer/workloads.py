"""Named workloads: a model with random but reproducible weights, and inputs to call it with.

They are the package `models` of a checkout, and are found by their place: `import models` may
find another package, for many a project has one of that name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

_HERE = Path(__file__).parent
__path__ = [str(_HERE / "_models"), str(_HERE.parent / "models")]  # installed, and in a checkout

if TYPE_CHECKING:
    from models import *  # noqa: F403 - the names below
else:
    from optimizer.workloads import hugging_face, seeds, synthetic, vision
    from optimizer.workloads._registry import (
        UnavailableDeviceError,
        UnknownWorkloadError,
        load,
        names,
    )
    from optimizer.workloads._workload import Workload

__all__ = [
    "UnavailableDeviceError", "UnknownWorkloadError", "Workload",
    "hugging_face", "load", "names", "seeds", "synthetic", "vision",
]  # fmt: skip
