"""What lower_masked_assignment must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("clone mask", "clone mask_half", "clone mask_int"),
    near=(
        "mask",
        "relu mask",
        "clone dup mask",
        "clone dup relu swap mask",
        "clone dup t01 swap mask",
        "clone mask dup t01",
        "clone mask dup t01 swap mask_half",
        "linear mask_half mask_gather_stale",
        "clone t01 mask t01",
        "clone mask_named",
        "dup clone mask_below add",
        "clone mask mask_half",
        "clone mask_rows",
        "clone mask_gather",
        "clone mask_fill",
        "mask_fill",
        "clone mask_put mask_fill",
        "clone mask_row relu",
        "clone mask_view",
        "linear mask",
        "identity mask",
        "dropout mask residual",
        "clone mask_accumulate",
        "relu mask_accumulate",
        "clone mask_row",
        "dup t01 shift swap clone mask_below",
        "dup t01 tanh swap clone mask_below",
        "dup clone swap idouble_statement swap mask_below",
        "dup clone arg idouble_statement drop mask_below",
        "mask_integers",
        "mask_booleans",
        "mask_complex",
        "clone mask_integer_tensor",
        "mask_float_tensor",
        "two_devices mask",
    ),
)
