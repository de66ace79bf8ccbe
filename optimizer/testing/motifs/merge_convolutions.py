"""What merge_convolutions must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=(
        "dup conv_k3 swap conv add",
        "dup conv_k3 swap bn add",
        "relu dup bn swap conv add",
        "dup conv_groups_k3 swap conv_groups add",
        "dup bn swap conv_nobias add",
    ),
    near=(
        "dup conv swap conv4 add",
        "dup conv_k3 swap conv_groups add",
        "dup conv_k3 swap conv_reflect add",
        "dup conv_stride swap conv_stride add",
        "dup conv_k3 swap conv_k3_stride add",
        "dup conv_valid swap conv_dilated add",
        "dup conv_k3 swap bn_train add",
        "dup scale swap conv_nobias add",
        "relu dup conv_k3 swap relu_statement conv add",
        "relu dup conv_k3 swap idouble_statement conv add",
        "dup conv swap again add",
        "autocast dup conv_k3 swap bn add",
        "dup conv_k3 swap conv_dilated add",
        "dup conv_written swap conv add",
        "dup conv_written swap conv_k3 add",
        "dup conv_k3 swap conv_written add",
        "first_channel dup conv4 swap bn add_stretched",
    ),
)
