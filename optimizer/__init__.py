"""A compact torch.fx graph optimizer for inference."""

from optimizer._optimize import optimize
from optimizer.analysis.measure import Comparison, Measurement, compare, measure
from optimizer.core.errors import (
    CaptureError,
    DeviceError,
    EquivalenceError,
    InputError,
    OptimizerError,
    OptimizerWarning,
    PassError,
    Refused,
)
from optimizer.core.report import Report
from optimizer.frontend.dynamo import GuardedModule
from optimizer.frontend.module import OptimizedModule
from optimizer.frontend.symbolic import capture
from optimizer.passes import all_passes, explain
from optimizer.rewrite.contract import Pass
from optimizer.verify.check import Culprit, bisect, check

__version__ = "0.1.0"
__all__ = [
    "CaptureError", "Comparison", "Culprit", "DeviceError", "EquivalenceError", "GuardedModule",
    "InputError", "Measurement", "OptimizedModule", "OptimizerError", "OptimizerWarning", "Pass",
    "PassError", "Refused", "Report", "all_passes", "bisect", "capture", "check", "compare",
    "explain", "measure", "optimize",
]  # fmt: skip
