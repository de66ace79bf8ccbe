"""What reuse_operands must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("linear residual", "dup conv add", "dup bn mul", "dup conv swap linear add"),
    near=(
        "residual",
        "dup add",
        "dup linear dup out add",
        "conv dup add",
        "conv dup t01 add",
        "identity residual",
        "linear1 residual",
        "conv add_alpha",
        "dup conv add_method",
        "dup linear iadd",
        "linear t01 residual",
        "dup conv relu_inplace add",
        "dup conv add dup mask",
        "dup linear add_alpha",
        "dup linear swap add_alpha3",
        "linear dup mul",
        "dup conv swap mul",
        "dup t01 shift add",
        "dup t01 double swap mul",
        "linear dup widen mul",
        "linear arg linear swap add",
    ),
)
