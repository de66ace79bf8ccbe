"""The properties of an optimizer that are not any one pass's, each tried on generated models."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

import optimizer
from optimizer.testing import TOKENS, Optimize, Spec, assert_equivalent, check_spec
from tests.internals import backend
from tests.test_fuzz import fuzz

ROOT = Path(__file__).parents[1]
PASSES = [each.name for each in optimizer.all_passes()]
# Where eager multiplies an infinity or a NaN, these compute another way: see their docstrings.
NOT_FOR_SPECIALS = {"recognize_attention"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_level_2_keeps_the_answer(dtype: torch.dtype) -> None:
    subject = Optimize(level=2)
    lowered = []

    def holds(spec: Spec) -> None:
        fast = check_spec(spec, subject, dtype=dtype)
        lowered.append(bool(getattr(fast, "meta", {}).get("lowered")))

    fuzz(holds)

    assert any(lowered)


def test_float32_is_as_precise_as_the_model() -> None:
    fuzz(lambda spec: check_spec(spec, Optimize(), dtype=torch.float32))


@pytest.mark.parametrize("regime", ["nan", "infinite"])
def test_nans_and_infinities_stay(regime: str) -> None:
    subject = Optimize(only=tuple(name for name in PASSES if name not in NOT_FOR_SPECIALS))

    fuzz(lambda spec: check_spec(spec, subject), regimes=[regime])


def test_any_order_keeps_the_answer() -> None:
    """Of the passes that fire in their own order, and two that do not or not yet."""

    @torch.no_grad()
    def holds(spec: Spec) -> None:
        fired = Optimize()(spec.build(), spec.inputs()).report.counts()
        order = Random(spec.seed).sample(PASSES, len(PASSES))
        candidate = spec.build()
        for name in [each for each in order if each in fired or each in order[:2]]:
            candidate = Optimize(only=(name,))(candidate, spec.inputs())
        assert_equivalent(spec.build(), candidate, spec.inputs())

    fuzz(holds, count=30, max_size=8)


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
        spec = Spec(("dup", token, token, "relu", token), (2, 4, 4, 4), layout="expanded")
        with suppress(RuntimeError, UserWarning):
            spec.build()(*spec.inputs())
            return True
        return False

    with torch.no_grad():
        alphabet = [token for token in TOKENS if writes_nothing(token)]

    assert len(alphabet) > len(TOKENS) / 2
    fuzz(lambda spec: check_spec(spec, Optimize()), alphabet=alphabet, layouts=["expanded"])


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
