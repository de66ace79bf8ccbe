"""What sink_transposes must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=("t01 relu t01", "cycle shift tanh cycle", "t12 dup add T", "mT leaky double t12"),
    near=(
        "t01 relu_inplace t01",
        "t01 relu_method_inplace t01",
        "dup t01 swap t01 add t01",
        "dup t01 swap t12 add t01",
        "dup t01 swap cycle mul t01",
        "dup t_ends swap movedim add t_ends",
        "dup t_ends swap movedim mul movedim",
        "t01 dup relu t01",
        "t01 relu dup t01",
        "t01 relu dup t01 swap idouble_statement add",
        "t01 iadd t01",
        "t01 tanh t01 idouble_statement residual",
        "dup t01 swap idouble_statement swap double t01 add",
        "cycle dropout relu cycle_back",
        "cycle contiguous relu cycle_back",
        "cycle relu cycle halve cycle",
        "unsqueeze t01 relu t01",
        "t01 softmax_first t01",
        "t12 softmax_last t12",
        "cycle relu_F_inplace cycle_back",
        "dup t01 relu_F_inplace t01 add",
        "t01 relu_statement t01",
        "t01_of_two_ranks",
        "T_of_row_and_column",
        "t01_of_one_row",
        "t12 flip t12",
        "dup t_ends swap movedim add t_ends",
    ),
)
