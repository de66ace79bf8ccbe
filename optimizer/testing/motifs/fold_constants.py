"""What fold_constants must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("constant relu", "constant_buffer", "linear constant_expanded"),
    near=(
        "constant_view",
        "constant_counter",
        "constant_counter_later",
        "constant_written",
        "constant_contiguous_written",
        "constant_inplace",
        "constant_random",
        "constant_double",
        "constant_returned",
        "constant constant_returned",
        "constant_large",
        "training constant",
        "autocast constant_plain",
    ),
)
