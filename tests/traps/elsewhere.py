"""Traps that are no model: the test that springs each, or why it cannot be sprung here."""

from __future__ import annotations

# number: what the trap is, and the test that holds it
TESTED: dict[int, tuple[str, str]] = {
    25: (
        "a fold in half precision loses what eager keeps",
        "passes/test_fold_affine.py::test_a_fold_in_low_precision_is_as_near_to_the_truth_as_the_model",
    ),
    28: (
        "autocast around a folded model",
        "test_trap_claims.py::test_autocast_around_the_result_gives_the_dtype_of_the_model",
    ),
    46: (
        "a result that is held while the next call runs",
        "test_trap_claims.py::test_a_result_is_not_overwritten_by_the_next_call",
    ),
    51: (
        "a buffer of the original that changes later",
        "test_trap_claims.py::test_the_result_has_the_state_that_the_model_had",
    ),
    52: (
        "a checkpoint of the original that half fits the result",
        "test_snapshot.py::test_load_state_dict_refuses_a_checkpoint_of_the_original",
    ),
    55: (
        "optimizing in inference mode",
        "test_trap_claims.py::test_what_is_made_in_inference_mode_is_no_inference_tensor",
    ),
    85: (
        "a copy or a pickle that loses the report",
        "test_snapshot.py::test_a_copy_keeps_the_answer_and_the_report",
    ),
    87: (
        "code that is older than its graph",
        "test_trap_claims.py::test_the_code_is_that_of_the_graph",
    ),
    91: (
        "an exception that leaves half a rewrite behind",
        "test_lifecycle.py::test_a_faulty_pass_is_rolled_back_and_named",
    ),
    93: (
        "an order that varies from run to run",
        "test_lifecycle.py::test_the_same_model_gives_the_same_code",
    ),
    94: (
        "parameters without data, or on two devices",
        "test_errors.py::test_bad_input_is_a_typed_error_in_one_sentence",
    ),
}

# number: what the trap is, and why it does not apply
NOT_HERE: dict[int, tuple[str, str]] = {
    30: ("a tolerance that calls rounding a bug", "a matter of tests: docs/fuzzing.md says how"),
    37: (
        "an unbatched image before BatchNorm2d",
        "eager rejects it; the folded convolution may answer it",
    ),
    54: ("a fold on a GPU that takes its memory twice", "one layer's weights are held twice"),
    63: ("a GELU that one device approximates", "no kernel of a device is chosen at level 1"),
    86: ("isinstance(result, ResNet)", "the result is a graph module and says so"),
    89: ("a wildcard of replace_pattern", "patterns name what they match; literals are not wild"),
    92: ("a private kernel that does not export", "no private kernel is used at level 1"),
}
