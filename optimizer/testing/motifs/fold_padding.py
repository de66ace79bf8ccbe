"""What fold_padding must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("pad_even conv relu", "pad_kw conv_many bn", "pad_even pad_kw conv_groups_k3"),
    near=(
        "pad conv",
        "pad_ones conv",
        "pad_even bn conv",
        "pad_even conv again",
        "pad_even dup conv add",
        "dup pad_even swap idouble_statement drop conv",
        "pad_even conv_t",
        "pad_kw linear",
        "pad_kw conv_unbatched",
        "pad_even conv_reflect",
        "pad_kw conv_same",
    ),
)
