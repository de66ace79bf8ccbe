"""How well the fuzz kills: the package passes it, and with any one mistake planted it does not."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import optimizer
from optimizer.testing import MOTIFS, Spec
from tests.quality import examples as _examples
from tests.quality import mutants as _mutants
from tests.quality import score as _score
from tests.quality.__main__ import main

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
        return _mutants.concerned(next(m for n, m in CATALOGUE.items() if n.startswith(start)))

    assert concerned("fuse_linear_relu:") == ["fuse_linear_relu"]
    assert concerned("expression:") == ["recognize_activations", "recognize_attention"]
    assert concerned("canonicalize:") == ["capture"]
    assert concerned("effects:") == list(MOTIFS)
    assert _mutants.concerned(replace(A_PASS, file="frontend/tracer.py")) == ["capture"]


def test_a_mistake_is_planted_in_a_copy_only() -> None:
    with _mutants.planted(A_PASS, "optimizer.passes.fuse_linear_relu") as planted:
        ours = sys.modules["optimizer"]

        assert ours is not optimizer
        assert "self.bias" not in Path(planted.__file__ or "").read_text().partition("F.linear(")[0]
        assert planted.fuse_linear_relu is not None
    assert sys.modules["optimizer"] is optimizer
    assert sys.modules["tests.quality.score"] is _score


@pytest.mark.parametrize("name", [*MOTIFS, "capture", "lowering"])
def test_the_package_as_it_is_passes(name: str) -> None:
    assert _examples.first_failing_model([name], 5) == (5, "")


def test_a_model_that_is_left_as_it_is_though_no_word_asks_for_it_is_a_failure() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_examples, "check_spec", lambda *_, **__: nn.Identity())
        _examples.examine(Spec(("relu", "t_inplace")), "capture")
        with pytest.raises(AssertionError, match="the model is not recorded"):
            _examples.examine(Spec(("relu",)), "capture")


def test_passes_are_fuzzed_alone_and_together() -> None:
    tried: list[tuple[str, ...] | None] = []

    class Seen(_examples.Optimize):
        def __call__(self, *given: Any) -> Any:
            tried.append(self.only)
            return super().__call__(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_examples, "Optimize", Seen)
        _examples.examine(Spec(("relu",)), "remove_clones", among=["remove_clones", "fold_padding"])

    assert tried == [("remove_clones",), ("remove_clones", "fold_padding")]


@pytest.mark.parametrize("name", SAMPLE.values())
def test_a_mutant_of_each_pass_is_killed(name: str) -> None:
    verdict = _score.try_mutant(CATALOGUE[name], ["motifs", "models"])

    assert verdict.killed
    assert verdict.evidence


def test_generated_models_alone_find_a_mistake() -> None:
    verdict = _score.try_mutant(CATALOGUE["fuse_linear_relu: another reader of the layer"])

    assert (verdict.killed, verdict.by) == (True, "models")
    assert 0 < verdict.examples <= _score.BUDGET


def test_a_pass_that_many_models_leave_idle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_examples, "MANY", 9)
    idle = CATALOGUE["fuse_linear_relu: does nothing"]

    with _mutants.planted(idle, _examples.__name__) as fresh:
        monkeypatch.setattr(fresh, "MANY", 9)
        assert fresh.first_failing_model(["fuse_linear_relu"], 8) == (8, "")
        assert fresh.first_failing_model(["fuse_linear_relu"], 9) == (
            9,
            "fuse_linear_relu never fires",
        )
        # Of two passes, each needs so many models.
        assert fresh.first_failing_model(["fuse_linear_relu", "remove_clones"], 9) == (9, "")


def test_every_change_plants_some_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (Path(__file__).parent.parent / ".ci" / "run").read_text().replace("\\\n", "")
    (command,) = (line for line in lines.splitlines() if "tests.quality score" in line)
    *given, count = shlex.split(command.partition("tests.quality ")[2])
    planted: list[set[str]] = []

    def tried(mutants: Any, by: list[str], *_: int) -> Any:
        planted.append({mutant.name for mutant in mutants})
        assert set(by) == set(_score.FINDERS)
        return iter(())

    monkeypatch.setattr(_score, "score", tried)
    for number in ("41", "42"):
        main([*given, number])

    assert count == "$(git rev-list --count HEAD)"
    assert len(planted[0] | planted[1]) > len(planted[0]) == 10


@pytest.mark.mutants
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_mutant_is_killed(name: str) -> None:
    assert _score.try_mutant(CATALOGUE[name], list(_score.FINDERS)).killed


def test_the_table_names_survivors_and_counts_examples() -> None:
    real = replace(A_PASS, name="a real one", origin="project #1")
    same = replace(A_PASS, name="no mistake")
    verdicts = [
        _score.Verdict(A_PASS, "models", killed=True, examples=3, seconds=0.5, evidence="differ"),
        _score.Verdict(real, "tests", killed=False, examples=9, seconds=1.0, evidence=""),
        _score.Verdict(same, "tests", killed=False, examples=9, seconds=1.0, evidence=""),
    ]

    text = "\n".join(_score.table(verdicts, {"no mistake": "it is the same"}))

    assert "| fuse_linear_relu: the bias lost | own | 3 models | 0.5 | differ |" in text
    assert "| a real one | project #1 | survives | 1.0 |  |" in text
    assert "| no mistake | own | survives | 1.0 | it is the same |" in text
    assert "killed 1 of 2 (50.0%); from real issues 0 of 1;" in text
    assert "median and ninth decile: 3, 3" in text
