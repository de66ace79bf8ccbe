"""What specialize_shapes must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("merge relu", "add_size relu", "t01 merge"),
    near=(
        "merge mask",
        "dup merge drop",
        "add_size add_size",
        "merge linear bn",
        "assert_finite",
        "assert_finite merge",
        "count_chosen",
        "add_size count_chosen",
    ),
)
