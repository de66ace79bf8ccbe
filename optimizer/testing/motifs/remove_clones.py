"""What remove_clones must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("tanh clone relu", "tanh dup clone swap relu add", "linear clone shift"),
    near=(
        "clone relu",
        "tanh clone",
        "tanh clone t01",
        "tanh clone idouble",
        "tanh dup clone swap idouble_statement add",
        "tanh dup clone swap idouble_statement drop relu",
        "tanh dup clone relu swap idouble_statement add",
        "tanh clone t01 idouble_statement relu",
        "tanh clone flatten relu",
        "tanh t01 clone relu",
        "flatten tanh every_other clone center",
        "tanh clone clone relu",
    ),
)
