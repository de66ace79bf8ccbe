"""A compact torch.fx graph optimizer for inference."""

from optimizer._bisect import Culprit, bisect
from optimizer._capture import capture
from optimizer._check import check
from optimizer._draw import draw
from optimizer._errors import (
    CaptureError,
    DeviceError,
    EquivalenceError,
    InputError,
    OptimizerError,
    OptimizerWarning,
    PassError,
)
from optimizer._facts import Refused
from optimizer._measure import Comparison, Measurement, compare, measure
from optimizer._module import OptimizedModule
from optimizer._optimize import optimize
from optimizer._pass import Pass
from optimizer._registry import all_passes, explain
from optimizer._report import Report

__all__ = [
    "CaptureError",
    "Comparison",
    "Culprit",
    "DeviceError",
    "EquivalenceError",
    "InputError",
    "Measurement",
    "OptimizedModule",
    "OptimizerError",
    "OptimizerWarning",
    "Pass",
    "PassError",
    "Refused",
    "Report",
    "all_passes",
    "bisect",
    "capture",
    "check",
    "compare",
    "draw",
    "explain",
    "measure",
    "optimize",
]
