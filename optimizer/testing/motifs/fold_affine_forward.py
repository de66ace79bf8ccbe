"""What fold_affine_forward must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=(
        "relu bn conv",
        "scale conv_k3",
        "halve linear",
        "offset conv_valid",
        "halve conv_t",
        "relu bn_plain conv_groups",
    ),
    near=(
        "flatten bn linear",
        "bn linear",
        "bn conv_k3",
        "scale_last linear",
        "scale_everywhere conv",
        "offset conv_t",
        "offset conv_stride",
        "relu bn_plain conv_groups",
        "relu bn dup conv add",
        "relu bn relu_statement conv",
        "scale flatten_rows linear",
        "bn_train conv",
        "scale conv again",
        "relu scale idouble_statement conv",
        "offset conv_k3",
        "linear1 widen linear",
        "bn conv_written again",
        "lower conv_k3",
        "offset conv_groups",
        "relu bn_tiny linear",
        "arg_narrow_scaled linear",
        "first_channel relu t12 bn conv stack",
    ),
)
