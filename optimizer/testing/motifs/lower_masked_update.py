"""What lower_masked_update must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("relu mask_add", "dup relu mask_gather_same", "clone mask_scale"),
    near=(
        "mask_add",
        "clone dup mask_add add",
        "clone t01 mask_add",
        "clone dup t01 swap mask_add",
        "clone dup t01 mask_add add",
        "clone mask_gather",
        "clone mask_add mask_scale mask",
        "clone mask mask_add",
        "linear mask_rows_add",
        "dup clone mask_gather_stale",
        "relu mask_two",
        "clone dup mask_gather_same",
        "dup relu mask_gather",
        "mask_two",
        "linear mask_sub",
        "clone mask_gather_other",
        "linear dup t01 swap mask_gather_same",
        "clone mask_gather_read",
        "clone mask_gather_moved",
        "mask_one_integer",
        "mask_one_product",
        "relu index_add_rows",
        "two_devices relu mask_add",
        "relu mask_gather_turned",
    ),
)
