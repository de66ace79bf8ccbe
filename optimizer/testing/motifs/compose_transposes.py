"""What compose_transposes must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("t01 t01", "t01 t01_torch", "cycle cycle", "t12 reverse", "cycle cycle_back"),
    near=(
        "t01 t12",
        "t01 t12 t01",
        "t01 dup t01",
        "cycle cycle cycle",
        "movedim moveaxis",
        "swapaxes t01_kw",
        "T t t_torch",
        "t_ends t01",
        "mT t_negative",
        "t_same",
        "permute_same",
        "t01 contiguous t01",
        "t01 mask t01",
        "t01 idouble_statement t01",
        "dup t01 mask t01 add",
        "linear t01 t01 relu_method_inplace",
        "t01 cycle_computed",
    ),
)
