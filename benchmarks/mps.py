"""One forward on an Apple GPU; n/a where there is none."""

from ._forward import _Latency, _Memory, _Paired


class Latency(_Latency):
    device = "mps"


class Memory(_Memory):
    device = "mps"


class Paired(_Paired):
    device = "mps"
