"""What a model takes on its example inputs: memory, arithmetic, traffic, kernels.

Nothing of this runs inside `optimize`. It imports `core`, `facts`, `frontend` and `verify`.
"""

from optimizer.analysis.cost import Ceilings, Cost, Roofline, ceilings, measured, roofline

__all__ = ["Ceilings", "Cost", "Roofline", "ceilings", "measured", "roofline"]
