"""What recognize_attention must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("attention relu", "dup t01 attention_scaled add", "linear attention"),
    near=(
        "attention_maps",
        "attention_masked",
        "attention_columns",
        "attention idouble_statement",
        "attention t12 mask",
        "dup attention idouble_statement add",
        "flatten_rows attention",
        "dup dup matmul softmax swap idouble_statement t12 matmul",
    ),
)
