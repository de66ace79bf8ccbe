"""The properties of an optimizer that are not any one pass's, each tried on generated models.

PROPERTIES lists all that this package holds itself to, and where.
"""

from __future__ import annotations

import ast
import copy
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import fx, nn

import optimizer
from optimizer._dynamo import backend
from optimizer.core.guards import GUARDS
from optimizer.testing import (
    TOKENS,
    Optimize,
    Spec,
    assert_equivalent,
    check_spec,
)
from tests.test_fuzz import fuzz

ROOT = Path(__file__).parents[1]
PASSES = [each.name for each in optimizer.all_passes()]
# Where eager multiplies an infinity or a NaN, these compute another way: see their docstrings.
NOT_FOR_SPECIALS = {"recognize_attention"}

# What holds, and the test that would fail: a name here, or a file and a name.
PROPERTIES: dict[str, str] = {
    # The answer
    "each pass alone keeps the answer": "test_fuzz.py test_a_pass_alone_keeps_the_answer",
    "the whole pipeline keeps it": "test_fuzz.py test_level_1_keeps_the_answer",
    "level 0 keeps the bits": "test_fuzz.py test_level_0_keeps_the_bits",
    "level 2 keeps the answer": "test_level_2_keeps_the_answer",
    "float32 is as near to the truth": "test_float32_is_as_precise_as_the_model",
    "so are half as many bits": "test_every_pass.py "
    "test_it_fires_and_keeps_its_promise_in_every_precision",
    "NaNs and infinities stay": "test_nans_and_infinities_stay",
    "every prefix of the pipeline keeps the answer": "test_every_prefix_keeps_the_answer",
    "any subset of the passes does": "test_fuzz.py test_any_subset_of_the_passes_keeps_the_answer",
    "any order of the passes does": "test_any_order_keeps_the_answer",
    "every front end does": "test_graphs_of_dynamo_keep_the_answer",
    "one row, more rows, another rank": "test_oracles.py test_each_later_call_is_spoiled_and_seen",
    "empty and single dimensions": "test_testing.py "
    "test_every_token_runs_on_every_rank_in_the_shape_that_is_kept_of_it",
    "expanded inputs": "test_expanded_inputs",
    "other strides than the example's": "test_oracles.py test_each_later_call_is_spoiled_and_seen",
    "keyword arguments": "test_fuzz.py test_the_answer_holds_where_arguments_are_given_by_keyword",
    # The passes
    "optimizing twice changes nothing more": "test_fuzz.py "
    "test_optimizing_twice_changes_nothing_more",
    "the report says whether anything changed": "test_a_report_of_nothing_is_true",
    "no more nodes than before": "test_every_pass.py "
    "test_it_leaves_no_more_nodes_and_finds_nothing_to_do_the_second_time",
    "a planted motif fires": "test_fuzz.py test_every_pass_fires_on_its_motif",
    "a near miss keeps the answer": "test_fuzz.py test_a_near_miss_keeps_the_answer",
    "every refusal has its reason": "test_conventions.py "
    "test_every_reason_to_refuse_has_a_row_in_the_test_of_its_file",
    # The same graph, written otherwise
    "other names": "test_names_do_not_matter",
    "another order of independent nodes": "test_the_order_of_independent_nodes_does_not_matter",
    "identities in between": "test_identities_in_between_change_nothing",
    "another spelling": "passes/test_fold_affine.py test_folds_into_layers_in_every_spelling",
    "a wrapped model": "test_a_wrapped_model_keeps_the_answer",
    "an unused branch goes": "test_an_unused_branch_goes",
    "an interior value as an output": "test_an_interior_value_as_an_output_is_the_same",
    "what is computed twice is computed once": "test_what_is_computed_twice_is_computed_once",
    "both entries agree": "test_a_graph_and_its_module_agree",
    # The same graph, other data
    "rows can be permuted": "test_rows_can_be_permuted",
    "rows can be split": "test_rows_can_be_split",
    # What a caller can see besides the answer
    "the model is untouched": "test_oracles.py test_a_touched_model_is_noticed",
    "the inputs are untouched": "test_testing.py "
    "test_a_subject_that_writes_to_its_inputs_is_caught",
    "aliases, statistics, random state": "test_oracles.py test_a_spoiled_candidate_is_seen",
    "results share no memory with weights": "test_oracles.py "
    "test_each_later_call_is_spoiled_and_seen",
    "a checkpoint can be loaded": "test_its_own_checkpoint_can_be_loaded",
    "copies and pickles": "test_snapshot.py test_a_copy_keeps_the_answer_and_the_report",
    "the same code again": "test_fuzz.py test_optimizing_again_gives_the_same_code",
    "the same code in another process": "test_another_process_gives_the_same_code",
    "the random state": "test_traps.py test_a_trap_is_answered_as_eager_answers",
    "training mode": "test_errors.py test_a_training_mode_model_is_optimized_with_one_warning",
    "hooks": "test_oracles.py test_a_lost_hook_is_seen",
    "gradients": "test_oracles.py test_each_later_call_is_spoiled_and_seen",
    "inference mode": "test_inference_mode",
    "autocast": "test_traps.py test_autocast_around_the_result_gives_the_dtype_of_the_model",
    "two threads": "test_lifecycle.py test_models_can_be_optimized_from_threads_while_others_run",
}


def on_models(**choices: Any) -> Callable[[Callable[[Spec], object]], Callable[[], None]]:
    """Make a property a test that tries it on each of such models."""

    def test_of(holds: Callable[[Spec], object]) -> Callable[[], None]:
        def test() -> None:
            fuzz(torch.no_grad()(holds), **choices)

        return test

    return test_of


def optimized(spec: Spec) -> nn.Module:
    return Optimize()(spec.build(), spec.inputs())


def size(module: nn.Module) -> int:
    return len(module.graph.nodes) if isinstance(module, fx.GraphModule) else 0


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_table_names_tests_that_exist(name: str) -> None:
    *file, test = PROPERTIES[name].split()
    path = Path(__file__).parent / file[0] if file else Path(__file__)
    tree = ast.parse(path.read_text())

    assert test in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_level_2_keeps_the_answer(dtype: torch.dtype) -> None:
    subject = Optimize(level=2)
    lowered = []

    def holds(spec: Spec) -> None:
        fast = check_spec(spec, subject, dtype=dtype)
        lowered.append(bool(getattr(fast, "meta", {}).get("lowered")))

    fuzz(holds)

    assert any(lowered)


@on_models()
def test_float32_is_as_precise_as_the_model(spec: Spec) -> None:
    check_spec(spec, Optimize(), dtype=torch.float32)


@pytest.mark.parametrize("regime", ["nan", "infinite"])
def test_nans_and_infinities_stay(regime: str) -> None:
    subject = Optimize(only=tuple(name for name in PASSES if name not in NOT_FOR_SPECIALS))

    fuzz(lambda spec: check_spec(spec, subject), regimes=[regime])


@on_models(count=80, max_size=8)
def test_every_prefix_keeps_the_answer(spec: Spec) -> None:
    count = 1 + len(spec.source()) % (len(PASSES) - 1)
    check_spec(spec, Optimize(only=tuple(PASSES[:count])))


@on_models(count=30, max_size=8)
def test_any_order_keeps_the_answer(spec: Spec) -> None:
    """Of the passes that fire in their own order, and two that do not or not yet."""
    fired = Optimize()(spec.build(), spec.inputs()).report.counts()
    order = Random(spec.seed).sample(PASSES, len(PASSES))
    candidate = spec.build()
    for name in [each for each in order if each in fired or each in order[:2]]:
        candidate = Optimize(only=(name,))(candidate, spec.inputs())
    assert_equivalent(spec.build(), candidate, spec.inputs())


def compiled(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_graphs_of_dynamo_keep_the_answer() -> None:
    # Dynamo imports the module of a global by its name, which generated code has not.
    layers = ("kept_", "py_", "unknown_py_")
    words = [each for each in TOKENS if not each.startswith(layers)]

    fuzz(lambda spec: check_spec(spec, compiled), count=20, alphabet=words)


def test_expanded_inputs() -> None:
    def writes_nothing(token: str) -> bool:
        try:
            for tokens in ((token, "dup", token, "add"), ("relu", token)):
                spec = Spec(tokens, (2, 4, 4, 4), layout="expanded")
                spec.build()(*spec.inputs())
        except (RuntimeError, UserWarning):
            return False
        return True

    with torch.no_grad():
        alphabet = [token for token in TOKENS if writes_nothing(token)]

    assert len(alphabet) > len(TOKENS) / 2
    fuzz(lambda spec: check_spec(spec, Optimize()), alphabet=alphabet, layouts=["expanded"])


@on_models()
def test_a_report_of_nothing_is_true(spec: Spec) -> None:
    candidate = optimized(spec)
    if not candidate.report.fired and isinstance(candidate, fx.GraphModule):
        captured = optimizer.capture(spec.build(), spec.inputs())
        guards = sum(node.target in GUARDS for node in candidate.graph.nodes)
        assert size(candidate) - guards <= size(captured)  # a spelling may rest on a rank
        assert layers(candidate) == layers(captured)


def layers(module: fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op == "call_module"]


# What has no effect but its value, so that nodes can be put in any order.
PURE = ["linear", "bn", "conv_k3", "relu", "dup", "swap", "add", "mul", "t01", "gelu", "out", "cat"]


@on_models(entries=["graph"])
def test_names_do_not_matter(spec: Spec) -> None:
    graph = spec.build()
    assert isinstance(graph, fx.GraphModule)
    for index, node in enumerate(graph.graph.nodes):
        if node.op not in ("placeholder", "output"):
            node._rename(f"node_{-index % 7}")
    graph.recompile()
    renamed = Optimize()(graph, spec.inputs())
    assert renamed.report.counts() == optimized(spec).report.counts()
    assert_equivalent(spec.build(), renamed, spec.inputs())


@on_models(entries=["graph"], alphabet=PURE)
def test_the_order_of_independent_nodes_does_not_matter(spec: Spec) -> None:
    graph = spec.build()
    assert isinstance(graph, fx.GraphModule)
    assert_equivalent(spec.build(), Optimize()(last_first(graph), spec.inputs()), spec.inputs())


def last_first(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, in which of several nodes that could be next the last one is."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    pending = list(module.graph.nodes)
    while pending:
        ready = [n for n in pending if all(used in copies for used in n.all_input_nodes)]
        ready = [n for n in ready if n.op != "output"] or ready
        node = ready[0] if ready[0].op == "placeholder" else ready[-1]
        copies[node] = graph.node_copy(node, copies.__getitem__)
        pending.remove(node)
    return fx.GraphModule(module, graph)


# The words of what came last would be of what stands between.
@on_models(
    max_size=6, alphabet=[word for word in TOKENS if word not in ("recompute", "write_read")]
)
def test_identities_in_between_change_nothing(spec: Spec) -> None:
    tokens = [word for token in spec.tokens for word in (token, "t01", "t01")]
    between = replace(spec, tokens=tuple(tokens))
    assert_equivalent(spec.build(), optimized(between), spec.inputs())


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"only": inner})


def wrapped(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> nn.Module:
    """The model inside another that takes as many arguments, by name."""
    names, space = ", ".join(f"x{i}" for i in range(len(inputs))), dict[str, Any]()
    exec(f"def forward(self, {names}): return self.inner['only']({names})", space)
    return type("Outer", (Wrapped,), {"forward": space["forward"]})(model).eval()


def test_a_wrapped_model_keeps_the_answer() -> None:
    left: list[bool] = []

    def holds(spec: Spec) -> None:
        inputs = spec.inputs()
        model = wrapped(spec.build(), inputs)
        candidate = Optimize()(model, inputs)
        left.append(not isinstance(candidate, fx.GraphModule))
        assert_equivalent(model, candidate, inputs)

    fuzz(holds, entries=["module"])
    assert sum(left) < len(left) / 4


@on_models(alphabet=PURE)
def test_an_unused_branch_goes(spec: Spec) -> None:
    branched = replace(spec, tokens=(*spec.tokens, "dup", "gelu", "linear", "drop"))
    candidate = optimized(branched)
    assert size(candidate) == size(optimized(spec))
    assert_equivalent(spec.build(), candidate, spec.inputs())


@on_models()
def test_an_interior_value_as_an_output_is_the_same(spec: Spec) -> None:
    middle = len(spec.tokens) // 2
    exposed = replace(spec, tokens=(*spec.tokens[:middle], "out", *spec.tokens[middle:]))
    check_spec(exposed, Optimize())


@on_models(alphabet=PURE)
def test_what_is_computed_twice_is_computed_once(spec: Spec) -> None:
    twice = replace(spec, tokens=(*spec.tokens, "dup", "gelu", "swap", "gelu", "add"))
    once = replace(spec, tokens=(*spec.tokens, "gelu", "dup", "add"))
    assert size(optimized(twice)) == size(optimized(once))
    assert_equivalent(once.build(), optimized(twice), spec.inputs())


@on_models(entries=["module"])
def test_a_graph_and_its_module_agree(spec: Spec) -> None:
    graph = replace(spec, entry="graph").build()
    assert_equivalent(spec.build(), graph, spec.inputs(), exact=True)


# What treats each row by itself, of rows whose sums are exact.
ROWWISE = ["linear", "bn", "conv_k3", "relu", "dup", "add", "mul", "mask", "max_pool", "head"]
SHAPES = [(2, 3), (4, 4, 4), (2, 4, 4, 4)]
BY_ROW = {"alphabet": ROWWISE, "regimes": ["dyadic"], "shapes": SHAPES}


@on_models(**BY_ROW)
def test_rows_can_be_permuted(spec: Spec) -> None:
    x, candidate = spec.inputs()[0], optimized(spec)
    turned = answers(candidate, x.flip(0))
    for actual, expected in zip(turned, answers(candidate, x), strict=True):
        assert torch.equal(actual, expected.flip(0))


@on_models(**BY_ROW)
def test_rows_can_be_split(spec: Spec) -> None:
    x, candidate = spec.inputs()[0], optimized(spec)
    parts = [answers(candidate, x[:1]), answers(candidate, x[1:])]
    for one, other, whole in zip(*parts, answers(candidate, x), strict=True):
        assert torch.equal(torch.cat([one, other]), whole)


def answers(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    result = module(x.clone())
    return [result] if isinstance(result, torch.Tensor) else list(result)


@on_models()
def test_its_own_checkpoint_can_be_loaded(spec: Spec) -> None:
    candidate = optimized(spec)
    saved = copy.deepcopy(candidate.state_dict())
    for tensor in candidate.state_dict().values():
        tensor.zero_()
    candidate.load_state_dict(saved)
    assert_equivalent(spec.build(), candidate, spec.inputs())


CODES = """
from optimizer.testing import MOTIFS, Optimize, Spec
for name, motif in MOTIFS.items():
    spec = Spec(tuple(motif.fires[0].split()), motif.shape)
    print(getattr(Optimize()(spec.build(), spec.inputs()), "code", name))
"""


def test_another_process_gives_the_same_code() -> None:
    other_hashes = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = os.environ | {"PYTHONHASHSEED": other_hashes, "PYTHONPATH": str(ROOT)}
    with redirect_stdout(StringIO()) as here:
        exec(CODES, {})
    command = [sys.executable, "-c", CODES]
    elsewhere = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)

    assert elsewhere.stdout.count("def forward") > len(PASSES) / 2
    assert here.getvalue() == elsewhere.stdout


@on_models()
def test_inference_mode(spec: Spec) -> None:
    model, inputs = spec.build(), spec.inputs()
    with torch.inference_mode():
        candidate = Optimize()(model, inputs)
        copy.deepcopy(candidate)(*spec.inputs())
    assert not any(tensor.is_inference() for tensor in candidate.state_dict().values())
    assert_equivalent(model, candidate, inputs)
