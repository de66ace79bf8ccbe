"""How well the fuzz kills: the package passes it, and with any one mistake planted it does not."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import optimizer
from optimizer.testing import MOTIFS, _mutants, _score

CATALOGUE = _mutants.catalogue()
A_PASS = CATALOGUE["fuse_linear_relu: the bias lost"]
# The first of each pass, which is what every run of the tests plants.
SAMPLE = {m.file: name for name, m in reversed(CATALOGUE.items()) if m.file.startswith("passes/")}


@pytest.mark.parametrize("name", CATALOGUE)
def test_what_a_mutant_replaces_stands_there_once(name: str) -> None:
    mutant = CATALOGUE[name]
    written = (_mutants.PACKAGE / mutant.file).read_text()

    compile(mutant.source(), mutant.file, "exec")
    assert mutant.source() != written


def test_a_mutant_of_what_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"stands 0 times in passes/fuse_linear_relu\.py"):
        replace(A_PASS, old="what is gone").source()


def test_every_row_of_the_catalogue_is_a_mutant() -> None:
    rows = Path(_mutants.__file__).with_name("mutants.txt").read_text().splitlines()

    assert sum(row.startswith("# ") for row in rows) == len(CATALOGUE)


def test_the_catalogue_is_large_and_much_of_it_has_happened() -> None:
    assert len(CATALOGUE) >= 70
    assert sum(mutant.is_real for mutant in CATALOGUE.values()) >= 30


def test_a_mistake_concerns_its_pass_or_those_that_import_it() -> None:
    def concerned(start: str) -> list[str]:
        return _score.concerned(next(m for n, m in CATALOGUE.items() if n.startswith(start)))

    assert concerned("fuse_linear_relu:") == ["fuse_linear_relu"]
    assert concerned("_spare:") == ["reuse_activations", "reuse_operands"]
    assert concerned("_spelling:") == ["capture"]
    assert concerned("_effects:") == list(MOTIFS)


def test_a_mistake_is_planted_in_a_copy_only() -> None:
    with _mutants.planted(A_PASS, "optimizer.passes.fuse_linear_relu") as planted:
        ours = sys.modules["optimizer"]

        assert ours is not optimizer
        assert "self.bias" not in Path(planted.__file__ or "").read_text().partition("F.linear(")[0]
        assert planted.fuse_linear_relu is not None
    assert sys.modules["optimizer"] is optimizer
    assert sys.modules["optimizer.testing._score"] is _score


def test_the_package_as_it_is_passes() -> None:
    for name in (*MOTIFS, "capture", "lowering"):
        assert _score.first_failure([name], 12)[1] == ""


@pytest.mark.parametrize("name", SAMPLE.values())
def test_a_mutant_of_each_pass_is_killed(name: str) -> None:
    verdict = _score.try_mutant(CATALOGUE[name])

    assert verdict.killed
    assert verdict.evidence
    assert verdict.examples <= _score.BUDGET


@pytest.mark.mutants
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_mutant_is_killed(name: str) -> None:
    assert _score.try_mutant(CATALOGUE[name]).killed


def test_the_table_names_survivors_and_counts_examples() -> None:
    real = replace(A_PASS, name="a real one", origin="project #1")
    verdicts = [
        _score.Verdict(A_PASS, killed=True, examples=3, seconds=0.5, evidence="values differ"),
        _score.Verdict(real, killed=False, examples=9, seconds=1.0, evidence=""),
    ]

    text = "\n".join(_score.table(verdicts))

    assert "| fuse_linear_relu: the bias lost | own | 3 | 0.5 |" in text
    assert "| a real one | project #1 | survives | 1.0 |" in text
    assert "killed 1 of 2 (50.0%); from real issues 0 of 1;" in text
    assert "median 3, 90 % within 3" in text
