"""Compilers and runtimes that others keep, for regions on the CPU: one file each.

What enters is a region and example inputs; what leaves is a program that takes such inputs. An
engine says what it is called, what pip installs it by, whether it is here, and compiles. Nothing
else in the package knows one.
"""

from optimizer.lowering.engines.choice import (
    AUTOMATIC,
    Engines,
    engines_here,
    engines_named,
    passed_over,
)
from optimizer.lowering.engines.compiled import Compiled, Engine

__all__ = [
    "AUTOMATIC", "Compiled", "Engine", "Engines", "engines_here", "engines_named", "passed_over",
]  # fmt: skip
