"""What reuse_activations must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("linear leaky", "conv relu", "bn relu_F", "dup conv add relu_method"),
    near=(
        "relu",
        "identity leaky",
        "flatten relu",
        "contiguous leaky",
        "conv t01 leaky",
        "conv dup t01 swap leaky",
        "conv relu_inplace leaky",
        "conv relu_statement leaky",
        "bn_train leaky",
        "linear_matmul leaky",
        "conv leaky dup mask",
        "linear leaky_negative",
        "conv leaky_module again",
        "dup linear leaky_module swap linear again add",
        "linear gelu_module",
        "linear gelu_F",
        "conv leaky again",
        "dup conv leaky_module swap again add",
    ),
)
