"""What eliminate_dead_code must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("dup linear drop", "dup relu_F drop", "dup t01 shift drop"),
    near=(
        "dup idouble drop",
        "dup mask_fill drop",
        "dup t01 mask drop",
        "dup relu_method_inplace drop",
        "dup bn_train drop",
        "dup bn_F_train drop",
        "dup dropout_train drop",
        "iview_statement",
        "idouble_statement",
        "dup linear hook drop",
        "arg drop",
    ),
)
