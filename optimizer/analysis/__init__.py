"""What a model takes on its example inputs: memory, arithmetic, traffic, kernels.

Nothing of this runs inside `optimize`.
"""

from optimizer.analysis._ceilings import Ceilings, ceilings
from optimizer.analysis.cost import Cost, Roofline, roofline
from optimizer.analysis.liveness import Live, Memory, memory

__all__ = ["Ceilings", "Cost", "Live", "Memory", "Roofline", "ceilings", "memory", "roofline"]
