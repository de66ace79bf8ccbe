"""What remove_identities must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("identity relu", "dropout relu", "dropout_F relu", "dropout_alpha relu"),
    near=(
        "dropout_train",
        "dropout",
        "dropout_inplace",
        "dropout idouble_statement",
        "identity mask residual",
        "clone idouble_statement residual",
        "contiguous mask residual",
        "times_one",
        "identity hook",
        "dropout pre_hook",
        "conv dropout bn",
        "clone idouble_statement",
        "dup clone idouble_statement add",
        "dup contiguous idouble_statement add",
        "identity_number",
    ),
)
