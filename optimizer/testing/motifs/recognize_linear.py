"""What recognize_linear must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("linear_matmul relu", "relu linear_matmul"),
    near=(
        "linear_matmul bn",
        "linear_matmul again",
        "dup linear_matmul swap linear_matmul tie add",
        "linear_matmul linear tie",
        "t12 linear_matmul",
        "flatten linear_matmul hook relu",
        "matmul_written",
        "matmul_written again",
        "addmm_scaled",
        "flatten addmm_scaled relu",
        "flatten linear_addmm",
        "matmul_vector",
        "flatten addmm_number",
        "flatten addmm_row",
    ),
)
