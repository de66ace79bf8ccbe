"""The fuzz kit: generated models and the oracles that judge what rewrites them.

The only part of the package that needs Hypothesis (the extra `test`).
"""

from optimizer.testing._assemble import Spec, as_graph, load
from optimizer.testing._check import Subject, check_pass, check_spec
from optimizer.testing._data import LAYOUTS, REGIMES, Regime, inputs_like, randomize
from optimizer.testing._later import LATER_CALLS
from optimizer.testing._oracles import assert_equivalent, untouched
from optimizer.testing._report import Counterexample, smallest
from optimizer.testing._rounding import TOLERANCE
from optimizer.testing._strategies import SHAPES, graphs, models, modules
from optimizer.testing._subject import Optimize
from optimizer.testing._tokens import FAMILIES, TOKENS
from optimizer.testing.motifs import MOTIFS, Motif

__all__ = [
    "FAMILIES", "LATER_CALLS", "LAYOUTS", "MOTIFS", "REGIMES", "SHAPES", "TOKENS", "TOLERANCE",
    "Counterexample", "Motif", "Optimize", "Regime", "Spec", "Subject", "as_graph",
    "assert_equivalent", "check_pass", "check_spec", "graphs", "inputs_like", "load", "models",
    "modules", "randomize", "smallest", "untouched",
]  # fmt: skip
