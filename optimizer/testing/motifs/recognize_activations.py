"""What recognize_activations must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("swish relu", "linear hardswish", "gelu_tanh", "hardsigmoid"),
    near=(
        "swish_gate",
        "linear swish mask",
        "gelu_tanh idouble_statement",
        "gelu relu",
        "dup swish add",
        "clamp_other",
        "linear clamp_other",
        "gate_other",
        "linear gate_other mask",
        "swish double",
        "dup swish out",
        "linear dup sigmoid out mul",
        "linear dup sigmoid swap idouble_statement mul",
        "hardswish_minus",
        "gelu_tanh_square",
        "swish_integers",
        "hardswish_expanded",
    ),
)
