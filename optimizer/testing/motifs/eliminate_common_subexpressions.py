"""What eliminate_common_subexpressions must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=(
        "dup tanh swap tanh add",
        "linear dup shift swap shift mul",
        "dup linear swap again add",
    ),
    near=(
        "dup tanh swap ishift tanh add",
        "dup tanh swap tanh ishift add",
        "dup tanh out swap tanh out",
        "dup tanh dup t01 out swap tanh out",
        "dup relu_F swap relu_F mask add",
        "dup t01 swap t01 idouble_statement add",
        "dup clone swap clone idouble_statement add",
        "dup contiguous swap contiguous idouble_statement add",
        "dup dropout_train swap dropout_train add",
        "dup bn_train swap again add",
        "dup linear hook swap again add",
        "dup double swap halve add",
        "dup softmax_first swap softmax_last add",
        "dup over_zero swap over_minus_zero add",
        "dup slice_twos swap slice_threes add",
        "dup slice_one swap slice_two add",
        "dup slice_two swap slice_second add",
        "dup at_least_half swap at_most_half add",
        "dup sum_first swap sum_last add",
        "dup tanh swap sigmoid add",
        "dup dup add_alpha swap dup add_alpha3 add",
        "arg add_alpha residual add_alpha3",
    ),
)
