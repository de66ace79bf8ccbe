"""What sink_convolutions must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=(
        "conv4 avg_pool",
        "conv_nobias avg_pool_zeros relu",
        "conv4 avg_pool_inside",
        "conv_groups avg_pool",
        "conv_kw adaptive_avg relu",
        "conv avg_pool_ceil bn",
        "conv4 avg_pool_F",
    ),
    near=(
        "conv4 avg_pool_padded",
        "conv avg_pool_zeros",
        "conv_k3 avg_pool",
        "conv_valid avg_pool",
        "conv_pointwise_stride avg_pool",
        "conv_pointwise_padded avg_pool",
        "conv_pointwise_unbatched avg_pool",
        "conv relu avg_pool",
        "conv max_pool",
        "conv dup avg_pool add",
        "conv adaptive_avg_F",
        "conv_t avg_pool",
        "dup conv swap idouble_statement drop avg_pool",
        "relu conv_written_later avg_pool",
        "avg_pool conv",
    ),
    shape=(2, 2, 4, 4),
)
