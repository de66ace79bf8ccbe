"""What each pass must rewrite, and what comes close to it: programs, with `;` between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from optimizer.core.errors import InputError
from optimizer.testing._tokens import FAMILIES, TOKENS

INTERRUPTIONS = ("dup", "out", "again", "dup swap", "tie", "hook", "relu_method_inplace", "mask")
# Around all of it: what it yields is returned or written, and what it reads lies otherwise.
SURROUNDINGS = ("{}", "{} idouble_statement", "t01 {}")


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
        """`near`, and what is interrupted."""
        yield from dict.fromkeys((*self.near, *self.interrupted()))

    def interrupted(self) -> Iterator[str]:
        """Every motif with every interruption at every edge, and in all surroundings."""
        for motif in self.fires:
            yield from (around.format(motif) for around in SURROUNDINGS)
            words = motif.split()
            for edge in range(1, len(words)):
                before, after = " ".join(words[:edge]), " ".join(words[edge:])
                yield from (f"{before} {each} {after}" for each in INTERRUPTIONS)
                for start in range(edge):  # what was read before is written
                    earlier, read = " ".join(words[:start]), " ".join(words[start:edge])
                    yield f"{earlier} dup {read} swap idouble_statement swap {after}".strip()


def words(program: str) -> tuple[str, ...]:
    """The tokens of a program.

    Raises:
        InputError: a word is no token; the message names the nearest.
    """
    tokens = tuple(program.split())
    for token in tokens:
        if token not in TOKENS:
            near = ", ".join(get_close_matches(token, TOKENS, n=5))
            few = near or ", ".join(next(iter(family)) for family in FAMILIES.values())
            raise InputError(
                f"there is no word {token!r}: try {few}; optimizer.testing.TOKENS holds all"
                f" {len(TOKENS)}."
            )
    return tokens


def _motif(fires: str, near: str = "", **shape: tuple[int, ...]) -> Motif:
    return Motif(_programs(fires), _programs(near), **shape)


def _programs(text: str) -> tuple[str, ...]:
    return tuple(" ".join(each.split()) for each in text.split(";") if each.strip())


MOTIFS: dict[str, Motif] = {
    "compose_transposes": _motif(
        "t01 t01; t01 t01_torch; cycle cycle; t12 reverse; cycle cycle_back",
        """
        t01 t12; t01 t12 t01; t01 dup t01; cycle cycle cycle; movedim moveaxis; swapaxes t01_kw; T
        t t_torch; t_ends t01; mT t_negative; t_same; permute_same; t01 contiguous t01; t01 mask
        t01; t01 idouble_statement t01; dup t01 mask t01 add; linear t01 t01 relu_method_inplace;
        t01 cycle_computed
        """,
    ),
    "eliminate_common_subexpressions": _motif(
        "dup tanh swap tanh add; linear dup shift swap shift mul; dup linear swap again add",
        """
        dup tanh swap ishift tanh add; dup tanh swap tanh ishift add; dup tanh out swap tanh out;
        dup tanh dup t01 out swap tanh out; dup relu_F swap relu_F mask add; dup t01 swap t01
        idouble_statement add; dup clone swap clone idouble_statement add; dup contiguous swap
        contiguous idouble_statement add; dup dropout_train swap dropout_train add; dup bn_train
        swap again add; dup linear hook swap again add; dup double swap halve add; softmax_first
        recompute_otherwise add; dup over_zero swap over_minus_zero add; slice_twos
        recompute_otherwise add; slice_two recompute_otherwise add; dup slice_two swap
        slice_second add; dup at_least_half swap at_most_half add; sum_first recompute_otherwise
        add; dup tanh swap sigmoid add; arg add_alpha recompute_otherwise add
        """,
    ),
    "eliminate_dead_code": _motif(
        "dup linear drop; dup relu_F drop; dup t01 shift drop",
        """
        dup idouble drop; dup mask_fill drop; dup t01 mask drop; dup relu_method_inplace drop; dup
        bn_train drop; dup bn_train by_function drop; dup dropout_train drop; iview_statement;
        idouble_statement; dup linear hook drop; arg drop
        """,
    ),
    "fold_affine": _motif(
        """
        conv bn; conv_k3 bn_small relu; conv_groups bn_plain; conv_nobias bn_eighth; conv_t bn;
        conv_t_groups scale offset; linear scale_last halve; linear rows bn; linear lower
        """,
        """
        linear offset_row; linear_single; linear flatten_rows bn; linear flatten_rows dup bn add;
        linear flatten_rows scale_last; conv flatten_rows bn; conv scale_everywhere; conv
        scale_last; linear1 scale_last; conv dup scale scale; conv scale again; conv
        idouble_statement scale; linear bn; linear_nobias bn_plain; linear dup bn; flatten linear
        bn; flatten linear4 bn_tiny relu; linear_kw bn_kw; linear by_function bn by_function;
        linear_subclass bn; conv by_function bn; conv_kw bn_kw; conv bn_train; conv bn_nostats;
        conv bn bn_eighth; bn conv; dup conv swap again bn add; conv bn again; block; block again;
        conv conv tie bn; linear linear tie bn; conv bn_trained relu; conv_written again bn; conv
        bn_written; linear scale_written; linear reciprocal; linear quarter; linear flatten lower;
        conv flatten_rows halve; linear addmm_scaled halve; conv dup bn swap bn_eighth add; conv
        dup scale swap offset add; conv again bn; dup conv bn swap again again add; dup conv swap
        again bn swap bn_eighth add; dup conv swap again scale swap scale add; dup conv swap conv
        again; linear flatten halve; conv dup bn reshape_as; max_pool avg_pool_ceil conv bn
        adaptive_avg_F; dup conv rsub swap again lower add; linear rows dup bn add
        """,
    ),
    "fold_affine_forward": _motif(
        """
        relu bn conv; scale conv_k3; halve linear; offset conv_valid; halve conv_t; relu bn_plain
        conv_groups
        """,
        """
        flatten bn linear; bn linear; bn conv_k3; scale_last linear; scale_everywhere conv;
        scale_image conv; offset_image conv_valid; offset conv_t; offset conv_stride; relu bn dup
        conv add; relu bn relu_statement conv; scale flatten_rows linear; bn_train conv; scale
        conv again; relu scale idouble_statement conv; offset conv_k3; linear1 widen linear; bn
        conv_written again; lower conv_k3; offset conv_groups; relu bn_tiny linear;
        arg_narrow_scaled linear; first_channel relu t12 bn conv stack; shift out scale_last
        linear; offset out scale conv_t
        """,
    ),
    "fold_constants": _motif(
        "constant relu; constant_buffer; linear constant_expanded",
        """
        constant_view; constant_counter; constant_counter_later; constant_written;
        constant_contiguous_written; constant_inplace; constant_random; constant_double;
        constant_returned; constant constant_returned; constant_large; training constant; autocast
        constant_plain
        """,
    ),
    "fold_padding": _motif(
        "pad_even conv relu; pad_kw conv_many bn; pad_even pad_kw conv_groups_k3",
        """
        pad conv; pad_ones conv; pad_even bn conv; pad_even conv again; pad_even dup conv add; dup
        pad_even swap idouble_statement drop conv; pad_even conv_t; pad_kw linear; pad_kw
        conv_unbatched; pad_even conv_reflect; pad_kw conv_same; offset pad_even conv; pad_crop
        conv_k3
        """,
    ),
    "fuse_linear_relu": _motif(
        "linear relu; linear relu_F; linear_nobias relu_method",
        """
        linear_plain; linear relu_inplace; linear relu_method_inplace; linear relu_statement;
        linear dup relu; linear dup relu_method_inplace; linear relu again; linear bn relu;
        linear by_function relu_kw; linear_matmul relu_torch; linear_subclass relu; linear leaky;
        linear_nobias leaky_module
        """,
    ),
    "lower_masked_assignment": _motif(
        "clone mask; clone mask_half; clone mask_int",
        """
        mask; relu mask; clone dup mask; clone dup relu swap mask; clone dup t01 swap mask; clone
        mask dup t01; clone mask dup t01 swap mask_half; linear mask_half mask_gather_stale; clone
        t01 mask t01; clone mask_named; dup clone mask_below add; clone mask mask_half; clone
        mask_rows; clone mask_gather; clone mask_fill; mask_fill; clone mask_put mask_fill; clone
        mask_row relu; clone mask_view; linear mask; identity mask; dropout mask residual; clone
        mask_accumulate; relu mask_accumulate; clone mask_row; dup t01 shift swap clone
        mask_below; dup t01 tanh swap clone mask_below; dup clone swap idouble_statement swap
        mask_below; dup clone arg idouble_statement drop mask_below; mask_integers; mask_booleans;
        mask_complex; clone mask_integer_tensor; mask_float_tensor; two_devices mask; into mask
        """,
    ),
    "lower_masked_update": _motif(
        "relu mask_add; dup relu mask_gather_same; clone mask_scale",
        """
        mask_add; clone dup mask_add add; clone t01 mask_add; clone dup t01 swap mask_add; clone
        dup t01 mask_add add; clone mask_gather; clone mask_add mask_scale mask; clone mask
        mask_add; linear mask_rows_add; dup clone mask_gather_stale; relu mask_two; clone dup
        mask_gather_same; dup relu mask_gather; mask_two; linear mask_sub; clone
        mask_gather_other; linear dup t01 swap mask_gather_same; clone mask_gather_read; clone
        mask_gather_moved; mask_one_integer; mask_one_product; relu index_add_rows; two_devices
        relu mask_add; relu mask_gather_turned
        """,
    ),
    "recognize_activations": _motif(
        "swish relu; linear hardswish; gelu_tanh; hardsigmoid",
        """
        swish_gate; linear swish mask; gelu_tanh idouble_statement; gelu relu; dup swish add;
        clamp_other; linear clamp_other; gate_other; linear gate_other mask; swish double; dup
        swish out; linear dup sigmoid out mul; linear dup sigmoid swap idouble_statement mul;
        hardswish_minus; gelu_tanh_square; swish_integers; hardswish_expanded
        """,
    ),
    "recognize_attention": _motif(
        "attention relu; dup t01 attention_scaled add; linear attention; attention_scaled_twice",
        """
        attention_maps; attention_masked; attention_columns; attention idouble_statement;
        attention t12 mask; dup attention idouble_statement add; flatten_rows attention; dup dup
        matmul softmax swap idouble_statement t12 matmul
        """,
    ),
    "recognize_linear": _motif(
        "linear_matmul relu; relu linear_matmul",
        """
        linear_matmul bn; linear_matmul again; dup linear_matmul swap linear_matmul tie add;
        linear_matmul linear tie; t12 linear_matmul; flatten linear_matmul hook relu;
        matmul_written; matmul_written again; addmm_scaled; flatten addmm_scaled relu; flatten
        linear_addmm; matmul_vector; flatten addmm_number; flatten addmm_row; matmul_same
        """,
    ),
    "remove_clones": _motif(
        "tanh clone relu; tanh dup clone swap relu add; linear clone shift",
        """
        clone relu; tanh clone; tanh clone t01; tanh clone idouble; tanh dup clone swap
        idouble_statement add; tanh dup clone slice add; tanh dup clone swap idouble_statement drop
        relu; tanh dup clone relu swap idouble_statement add; tanh clone t01 idouble_statement
        relu; tanh clone flatten relu; tanh t01 clone relu; flatten tanh every_other clone center;
        tanh clone clone relu
        """,
    ),
    "remove_identities": _motif(
        "identity relu; dropout relu; dropout_F relu; dropout_alpha relu",
        """
        dropout_train; dropout; dropout_F_by_size mask residual; dropout_inplace; dropout
        idouble_statement; identity mask residual; clone idouble_statement residual; contiguous
        mask residual; times_one; identity hook; dropout pre_hook; conv dropout bn; clone
        idouble_statement; dup clone idouble_statement add; dup contiguous idouble_statement add;
        identity_number
        """,
    ),
    "reuse_activations": _motif(
        "linear leaky; conv relu; bn relu_F; dup conv add relu_method",
        """
        relu; identity leaky; tanh into_new leaky; flatten relu; contiguous leaky; conv t01 leaky;
        conv dup t01 swap leaky; conv relu_inplace leaky; conv relu_statement leaky; bn_train
        leaky; linear_matmul leaky; conv leaky dup mask; linear leaky_negative; conv leaky_module
        again; dup linear leaky_module swap linear again add; linear gelu_module; linear gelu_F;
        conv leaky again; dup conv leaky_module swap again add; dup into silu add; dup
        einsum_turned silu out drop tanh
        """,
    ),
    "reuse_operands": _motif(
        "linear residual; dup conv add; dup bn mul; dup conv swap linear add",
        """
        residual; dup add; dup linear dup out add; conv dup add; conv dup t01 add; identity
        residual; linear1 residual; conv add_alpha; dup conv add_method; dup linear iadd; linear
        t01 residual; dup conv relu_inplace add; dup conv add dup mask; dup linear add_alpha; dup
        linear swap add_alpha; linear dup mul; dup conv swap mul; dup t01 shift add; dup t01
        double swap mul; linear dup widen mul; linear arg linear swap add
        """,
    ),
    "sink_convolutions": _motif(
        """
        conv4 avg_pool; conv_nobias avg_pool_zeros relu; conv4 avg_pool_inside; conv_groups
        avg_pool; conv_kw adaptive_avg relu; conv avg_pool_ceil bn; conv4 avg_pool_F
        """,
        """
        conv4 avg_pool_padded; conv4 avg_pool_divisor; conv avg_pool_zeros; conv_k3 avg_pool;
        conv_valid avg_pool; conv_pointwise_stride avg_pool; conv_pointwise_padded avg_pool;
        conv_pointwise_unbatched avg_pool; conv relu avg_pool; conv max_pool; conv dup avg_pool
        add; conv adaptive_avg_F; conv_t avg_pool; dup conv swap idouble_statement drop avg_pool;
        relu conv_written_later avg_pool; avg_pool conv
        """,
        shape=(2, 2, 4, 4),
    ),
    "sink_transposes": _motif(
        "t01 relu t01; cycle shift tanh cycle; t12 dup add T; mT leaky t12; t_ends tanh t_ends",
        """
        t01 relu_inplace t01; t01 relu_method_inplace t01; dup t01 swap t01 add t01; dup t01 swap
        t12 add t01; dup t01 swap cycle mul t01; dup t_ends swap movedim add t_ends; dup t_ends
        swap movedim mul movedim; t01 relu dup t01 swap idouble_statement add; t01 iadd t01; t01
        tanh t01 idouble_statement residual; dup t01 swap idouble_statement swap double t01 add;
        cycle_computed relu cycle; cycle contiguous relu cycle_back; cycle relu cycle halve
        cycle; unsqueeze t01 relu t01; t01 softmax_first t01; t12 softmax_last t12; cycle
        relu_F_inplace cycle_back; dup t01 relu_F_inplace t01 add; t01 relu_statement t01;
        t01_of_two_ranks; T_of_row_and_column; t01_of_one_row; t12 flip t12; t_ends
        recompute_another add t_ends; dup tanh swap t01 tanh cycle; t01 prelu_channels t01
        """,
    ),
}
