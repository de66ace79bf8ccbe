"""Named workloads: a model with random but reproducible weights, and inputs to call it with.

`names()` lists them, `load(name)` builds one. Nothing is downloaded, and the same name gives
the same bits in every process. torchvision, timm and transformers are imported only when one of
their models is loaded, torchvision by `import_torchvision`, which can do so beside any torch.
"""

from . import hugging_face, seeds, synthetic, vision
from ._registry import UnavailableDeviceError, UnknownWorkloadError, load, names
from ._torchvision_import import import_torchvision as import_torchvision  # of a checkout alone
from ._workload import Workload

__all__ = [
    "UnavailableDeviceError",
    "UnknownWorkloadError",
    "Workload",
    "hugging_face",
    "load",
    "names",
    "seeds",
    "synthetic",
    "vision",
]
