"""One forward on the CPU."""

from ._forward import _Latency, _Memory, _Paired


class Latency(_Latency):
    device = "cpu"


class Memory(_Memory):
    device = "cpu"


class Paired(_Paired):
    device = "cpu"
