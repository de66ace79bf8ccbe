"""What a model takes on its example inputs: memory, arithmetic, traffic, kernels.

Nothing of this runs inside `optimize`. It imports `core`, `facts`, `frontend` and `verify`.
"""

from optimizer.analysis.cost import (  # isort: skip
    Ceilings, Cost, Live, Memory, Roofline, ceilings, measured, memory, roofline,
)  # fmt: skip

__all__ = [
    "Ceilings", "Cost", "Live", "Memory", "Roofline", "ceilings", "measured", "memory", "roofline",
]  # fmt: skip
