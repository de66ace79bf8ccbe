"""Motifs: for each pass the token programs it must rewrite, and the near misses around them.

A near miss is a motif with something at one of its edges that makes the rewrite wrong or partly
wrong: a second reader, an extra output, a second call, a tied weight, a hook. Planting them makes
a bug with several readers show after some 100 examples instead of some 1,400.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from optimizer.testing._tokens import TOKENS

INTERRUPTIONS = ("dup", "out", "again", "dup swap", "tie", "hook", "relu_method_inplace", "mask")


@dataclass(frozen=True)
class Motif:
    """What to plant for one pass.

    Attributes:
        fires: programs, as words, on which the pass must change something.
        near: further programs that are close to its pattern.
        shape: of the input for `fires`.
    """

    fires: tuple[str, ...]
    near: tuple[str, ...] = ()
    shape: tuple[int, ...] = (2, 4, 4, 4)

    def near_misses(self) -> Iterator[str]:
        """`near`, and every motif with every interruption at every edge."""
        yield from self.near
        for motif in self.fires:
            words = motif.split()
            for edge in range(1, len(words)):
                for interruption in INTERRUPTIONS:
                    yield " ".join([*words[:edge], interruption, *words[edge:]])


MOTIFS: dict[str, Motif] = {
    "fold_affine": Motif(
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
    ),
    "fold_affine_forward": Motif(
        fires=(
            "relu bn conv",
            "scale conv_k3",
            "halve linear",
            "offset conv_valid",
            "halve conv_t",
        ),
        near=(
            "flatten bn linear",
            "bn linear",
            "bn conv_k3",
            "scale_last linear",
            "scale_everywhere conv",
            "offset conv_t",
            "offset conv_stride",
            "relu bn_plain conv_groups",
            "relu bn dup conv add",
            "relu bn relu_statement conv",
            "scale flatten_rows linear",
            "bn_train conv",
            "scale conv again",
            "relu scale idouble_statement conv",
        ),
    ),
    "fuse_linear_relu": Motif(
        fires=("linear relu", "linear relu_F", "linear_nobias relu_method"),
        near=(
            "linear relu_inplace",
            "linear relu_method_inplace",
            "linear relu_statement",
            "linear dup relu",
            "linear dup relu_method_inplace",
            "linear relu again",
            "linear bn relu",
            "linear_F relu_kw",
            "linear_matmul relu_torch",
            "linear_subclass relu",
        ),
    ),
    "reuse_activations": Motif(
        fires=("linear leaky", "conv relu", "bn relu_F", "dup conv add relu_method"),
        near=(
            "relu",
            "identity leaky",
            "flatten relu",
            "contiguous leaky",
            "conv t01 leaky",
            "conv dup t01 swap leaky",
            "conv relu_inplace leaky",
            "conv relu_statement leaky",
            "bn_train leaky",
            "linear_matmul leaky",
            "conv leaky dup mask",
        ),
    ),
    "reuse_operands": Motif(
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
        ),
    ),
    "compose_transposes": Motif(
        fires=("t01 t01", "t01 t01_torch", "cycle cycle", "t12 reverse", "cycle cycle_back"),
        near=(
            "t01 t12",
            "t01 t12 t01",
            "t01 dup t01",
            "cycle cycle cycle",
            "movedim moveaxis",
            "swapaxes t01_kw",
            "T t t_torch",
            "mT t_negative",
            "t_same",
            "permute_same",
            "t01 contiguous t01",
            "t01 mask t01",
            "t01 idouble_statement t01",
            "dup t01 mask t01 add",
            "linear t01 t01 relu_method_inplace",
        ),
    ),
    "recognize_linear": Motif(
        fires=("linear_matmul relu", "relu linear_matmul"),
        near=(
            "linear_matmul bn",
            "linear_matmul again",
            "dup linear_matmul swap linear_matmul tie add",
            "linear_matmul linear tie",
            "t12 linear_matmul",
            "flatten linear_matmul hook relu",
        ),
    ),
    "sink_transposes": Motif(
        fires=("t01 relu t01", "cycle shift tanh cycle", "t12 dup add T", "mT leaky double t12"),
        near=(
            "t01 relu_inplace t01",
            "t01 relu_method_inplace t01",
            "dup t01 swap t01 add t01",
            "dup t01 swap t12 add t01",
            "dup t01 swap cycle mul t01",
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
        ),
    ),
    "lower_masked_assignment": Motif(
        fires=("clone mask", "clone mask_half", "clone mask_int"),
        near=(
            "mask",
            "relu mask",
            "clone dup mask",
            "clone dup relu swap mask",
            "clone dup t01 swap mask",
            "clone mask dup t01",
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
        ),
    ),
    "lower_masked_update": Motif(
        fires=("relu mask_add", "dup relu mask_gather_same", "clone mask_scale"),
        near=(
            "mask_add",
            "clone dup mask_add add",
            "clone t01 mask_add",
            "clone dup t01 swap mask_add",
            "clone dup t01 mask_add add",
            "clone mask_gather",
            "clone mask_add mask_scale mask",
            "clone mask mask_add",
            "linear mask_rows_add",
            "dup clone mask_gather_stale",
        ),
    ),
    "recognize_activations": Motif(
        fires=("swish relu", "linear hardswish", "gelu_tanh", "hardsigmoid"),
        near=(
            "swish_gate",
            "linear swish mask",
            "gelu_tanh idouble_statement",
            "gelu relu",
            "dup swish add",
        ),
    ),
    "remove_identities": Motif(
        fires=("identity relu", "dropout relu", "dropout_F relu", "dropout_alpha relu"),
        near=(
            "dropout_train",
            "dropout",
            "dropout_inplace",
            "dropout idouble_statement",
            "identity mask residual",
            "clone idouble_statement residual",
            "contiguous mask residual",
            "times_one",
            "identity hook",
            "dropout pre_hook",
            "conv dropout bn",
        ),
    ),
    "specialize_shapes": Motif(
        fires=("merge relu", "add_size relu", "t01 merge"),
        near=("merge mask", "dup merge drop", "add_size add_size", "merge linear bn"),
    ),
    "fold_constants": Motif(
        fires=("constant relu", "constant_buffer", "linear constant_expanded"),
        near=(
            "constant_view",
            "constant_counter",
            "constant_counter_later",
            "constant_written",
            "constant_contiguous_written",
            "constant_inplace",
            "constant_random",
            "constant_returned",
            "constant constant_returned",
        ),
    ),
    "eliminate_common_subexpressions": Motif(
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
        ),
    ),
    "eliminate_dead_code": Motif(
        fires=("dup linear drop", "dup relu_F drop", "dup t01 shift drop"),
        near=(
            "dup idouble drop",
            "dup mask_fill drop",
            "dup t01 mask drop",
            "dup relu_method_inplace drop",
            "dup bn_train drop",
            "dup dropout_train drop",
            "iview_statement",
            "idouble_statement",
            "dup linear hook drop",
            "arg drop",
        ),
    ),
}


def words(program: str) -> tuple[str, ...]:
    """The tokens of a program.

    Raises:
        KeyError: a word is no token.
    """
    tokens = tuple(program.split())
    for token in tokens:
        TOKENS[token]
    return tokens
