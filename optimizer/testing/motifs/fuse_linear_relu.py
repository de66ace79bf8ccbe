"""What fuse_linear_relu must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("linear relu", "linear relu_F", "linear_nobias relu_method"),
    near=(
        "linear_plain",
        "linear relu_inplace",
        "linear relu_method_inplace",
        "linear relu_statement",
        "linear dup relu",
        "linear dup relu_method_inplace",
        "linear relu again",
        "linear bn relu",
        "linear_F relu_kw",
        "linear_matmul relu_torch",
        "linear_subclass relu",
        "linear leaky",
        "linear_nobias leaky_module",
    ),
)
