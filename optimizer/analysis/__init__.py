"""What a model takes on its example inputs: none of this runs inside `optimize`."""

from optimizer.analysis.cost import Ceilings, Cost, Roofline, ceilings, measured, roofline

__all__ = ["Ceilings", "Cost", "Roofline", "ceilings", "measured", "roofline"]
