"""The properties of an optimizer that are not any one pass's, each tried on generated models."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
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
from optimizer.testing import TOKENS, Optimize, Spec, assert_equivalent, check_spec
from tests.test_fuzz import fuzz

ROOT = Path(__file__).parents[1]
PASSES = [each.name for each in optimizer.all_passes()]
# Where eager multiplies an infinity or a NaN, these compute another way: see their docstrings.
NOT_FOR_SPECIALS = {"recognize_attention"}


def on_models(**choices: Any) -> Callable[[Callable[[Spec], object]], Callable[[], None]]:
    """Make a property a test that tries it on each of such models."""

    def test_of(holds: Callable[[Spec], object]) -> Callable[[], None]:
        def test() -> None:
            fuzz(torch.no_grad()(holds), **choices)

        return test

    return test_of


def optimized(spec: Spec) -> nn.Module:
    return Optimize()(spec.build(), spec.inputs())


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
    candidate: Any = optimized(spec)
    if not candidate.report.fired and isinstance(candidate, fx.GraphModule):
        captured = optimizer.capture(spec.build(), spec.inputs())
        # A spelling may rest on a rank.
        added = [node for node in candidate.graph.nodes if node.target not in GUARDS]
        assert len(added) <= len(captured.graph.nodes)
        graphs = (candidate.graph, captured.graph)
        called, layers = ([n.target for n in g.nodes if n.op == "call_module"] for g in graphs)
        assert called == layers


# What has no effect but its value, so that nodes can be put in any order.
PURE = ["linear", "bn", "conv_k3", "relu", "dup", "swap", "add", "mul", "t01", "gelu", "out", "cat"]


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


# What treats each row by itself, of rows whose sums are exact.
ROWWISE = ["linear", "bn", "conv_k3", "relu", "dup", "add", "mul", "mask", "max_pool", "head"]


@on_models(alphabet=ROWWISE, regimes=["dyadic"], shapes=[(2, 3), (4, 4, 4), (2, 4, 4, 4)])
def test_rows_can_be_permuted_and_split(spec: Spec) -> None:
    x, candidate = spec.inputs()[0], optimized(spec)
    for whole, turned, one, other in zip(
        *(answers(candidate, each) for each in (x, x.flip(0), x[:1], x[1:])), strict=True
    ):
        assert torch.equal(turned, whole.flip(0))
        assert torch.equal(torch.cat([one, other]), whole)


def answers(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    result = module(x.clone())
    return [result] if isinstance(result, torch.Tensor) else list(result)


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
