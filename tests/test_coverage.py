"""What generated models are made of is counted, and nearly all that can be is met."""

from __future__ import annotations

import pytest
import torch

from optimizer.testing import Spec
from tests.quality import coverage as _coverage
from tests.quality.__main__ import main


def covered(*tokens: str, dtype: torch.dtype = torch.float64) -> _coverage.Coverage:
    coverage = _coverage.Coverage()
    coverage.add(Spec(tokens, (2, 3)), dtype)
    return coverage


def test_an_operation_is_met_with_rank_dtype_and_reader() -> None:
    seen = covered("unsqueeze", "relu", "linear", dtype=torch.float32)

    assert seen.operations() == {".unsqueeze", "F.relu", "Linear"}
    assert seen.ranks == {(".unsqueeze", "2"), ("F.relu", "3"), ("Linear", "3")}
    assert {dtype for _, dtype in seen.dtypes} == {"float32"}
    assert seen.readers == {(".unsqueeze", "F.relu"), ("F.relu", "Linear")}


def test_what_was_not_met_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_coverage, "feasible", lambda: covered("relu", "unsqueeze", "linear"))
    monkeypatch.setattr(_coverage, "met", lambda examples: covered("relu", "linear"))

    assert main(["coverage"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "operations: 2 of 3 (66.7%)",
        "ranks: 1 of 3 (33.3%)",
        "dtypes: 2 of 3 (66.7%)",
        "readers: 1 of 9 (11.1%)",
        "never, operations: .unsqueeze",
        "never, ranks: .unsqueeze of rank 2, Linear of rank 3",
        "never, dtypes: .unsqueeze of float64",
        "never, read by none: Linear",
    ]


def test_few_models_meet_most_words() -> None:
    """Were examples copies of one another, 100 models would meet half of it."""
    seen = _coverage.met(100)

    assert len(seen.operations()) > 130


def test_each_word_alone_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_coverage, "TOKENS", ["relu"])
    ranks = {("F.relu", str(rank)) for rank in range(1, 6)}

    assert _coverage.feasible() == _coverage.Coverage(
        ranks, {("F.relu", "float64"), ("F.relu", "float32")}
    )
