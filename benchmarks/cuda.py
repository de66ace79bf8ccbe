"""One forward on an NVIDIA GPU; n/a where there is none."""

from ._forward import _Latency, _Memory, _Paired


class Latency(_Latency):
    device = "cuda"


class Memory(_Memory):
    device = "cuda"
    version = "2"  # the first did not count what a CUDA graph holds


class Paired(_Paired):
    device = "cuda"
