"""What fold_affine must rewrite, and what comes close to it."""

from __future__ import annotations

from optimizer.testing._motif import Motif

MOTIF = Motif(
    fires=(
        "conv bn",
        "conv_k3 bn_small relu",
        "conv_groups bn_plain",
        "conv_nobias bn_eighth",
        "conv_t bn",
        "conv_t_groups scale offset",
        "linear scale_last halve",
    ),
    near=(
        "linear flatten_rows bn",
        "linear flatten_rows dup bn add",
        "linear flatten_rows scale_last",
        "conv flatten_rows bn",
        "conv scale_everywhere",
        "conv scale_last",
        "linear1 scale_last",
        "conv dup scale scale",
        "conv scale again",
        "conv idouble_statement scale",
        "linear bn",
        "linear_nobias bn_plain",
        "linear dup bn",
        "flatten linear bn",
        "flatten linear4 bn_tiny relu",
        "linear_kw bn_kw",
        "linear_F bn_F",
        "linear_subclass bn",
        "conv_F bn",
        "conv_kw bn_kw",
        "conv bn_train",
        "conv bn_nostats",
        "conv bn bn_eighth",
        "bn conv",
        "dup conv swap again bn add",
        "conv bn again",
        "block",
        "block again",
        "conv conv tie bn",
        "linear linear tie bn",
    ),
)
