"""How well the fuzz kills: the package passes it, and with any one mistake planted it does not."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
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
OF_PASSES = {name: m for name, m in CATALOGUE.items() if m.file.startswith("passes/")}
SAMPLE = {each.concerns: name for name, each in reversed(OF_PASSES.items())}


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in CATALOGUE.values()}))
def test_what_a_mutant_replaces_stands_there_once(file: str) -> None:
    written = (_mutants.PACKAGE / file).read_text()
    for mutant in (each for each in CATALOGUE.values() if each.file == file):
        compile(mutant.source(), file, "exec")
        assert mutant.source() != written, mutant.name


def test_a_mutant_of_what_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"stands 0 times in passes/fuse\.py"):
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
    assert concerned("affine:") == [
        "fold_affine", "fold_affine_forward", "fold_padding", "fuse_linear_relu",
        "reuse_activations", "reuse_operands", "sink_convolutions",
    ]  # fmt: skip
    assert concerned("canonicalize:") == ["capture"]
    assert concerned("facts:") == list(MOTIFS)
    assert _mutants.concerned(replace(A_PASS, file="frontend/tracer.py", concerns=())) == [
        "capture"
    ]


def test_a_mistake_is_planted_in_a_copy_only() -> None:
    with _mutants.planted(A_PASS, "optimizer.passes.fuse") as planted:
        ours = sys.modules["optimizer"]

        assert ours is not optimizer
        assert "self.bias" not in Path(planted.__file__ or "").read_text().partition("F.linear(")[0]
        assert planted.fuse_linear_relu is not None
        _mutants.homes.cache_clear()
        assert _mutants.concerned(replace(A_PASS, concerns=())) == [
            "fuse_linear_relu", "reuse_activations", "reuse_operands",
        ]  # fmt: skip
    assert sys.modules["optimizer"] is optimizer
    assert sys.modules["tests.quality.score"] is _score


@pytest.mark.integration
@pytest.mark.parametrize("name", [*MOTIFS, "capture", "lowering"])
def test_the_package_as_it_is_passes(name: str) -> None:
    tried = _examples.first_failing_model([name], 5)

    assert (len(tried.done), tried.failure) == (5, "")


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


@pytest.mark.integration
@pytest.mark.parametrize("name", SAMPLE.values())
def test_a_mutant_of_each_pass_is_killed(name: str) -> None:
    verdict = _score.try_mutant(CATALOGUE[name], ["motifs", "models"])

    assert verdict.killed
    assert verdict.evidence


@pytest.mark.integration
def test_generated_models_alone_find_a_mistake() -> None:
    verdict = _score.try_mutant(CATALOGUE["fuse_linear_relu: the bias lost"])

    assert (verdict.killed, verdict.by) == (True, "models")
    assert 0 < verdict.examples <= _score.BUDGET


@pytest.mark.integration
def test_a_pass_that_many_models_leave_idle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_examples, "MANY", 9)
    idle = CATALOGUE["fuse_linear_relu: does nothing"]

    with _mutants.planted(idle, _examples.__name__) as fresh:
        monkeypatch.setattr(fresh, "MANY", 9)
        own, both = ["fuse_linear_relu"], ["fuse_linear_relu", "remove_clones"]
        assert fresh.first_failing_model(own, 8).failure == ""
        assert fresh.first_failing_model(own, 9).failure == "fuse_linear_relu never fires"
        # Of two passes, each needs so many models.
        assert fresh.first_failing_model(both, 9).failure == ""


@pytest.mark.integration
def test_a_rewrite_that_refuses_what_it_used_to_accept_is_found() -> None:
    by, idle = ["models"], CATALOGUE["fuse_linear_relu: does nothing"]
    sound = _score.try_sound(idle, by, 9)
    fired = next(place for place, done in enumerate(sound["models"].done, 1) if done)

    verdict = _score.try_mutant(idle, by, 9, sound)

    assert (verdict.killed, verdict.examples) == (True, fired)
    assert verdict.evidence == "AssertionError: fuse_linear_relu fires less often than it did"
    assert not _score.try_mutant(idle, by, 9).killed


@pytest.mark.integration
def test_some_models_at_level_2_run_on_a_real_engine() -> None:
    pytest.importorskip("openvino")
    program = ("conv_k3", "relu", "conv_k3")
    real, own = (
        {*_examples.did(_examples.examine(Spec(program, (2, 4, 8, 8), seed=seed), "lowering"))}
        for seed in (_examples.ENGINES_IN, 1)
    )

    assert any("OpenVINO" in name for name in real)
    assert own == {"new"}


def test_an_engine_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = nn.Sequential(nn.ReLU(), nn.ReLU())
    monkeypatch.setattr(_examples, "Optimize", lambda *_, **__: lambda *_: wrong)

    with pytest.raises(AssertionError, match="output 0: values differ"):
        _examples.examine(Spec(("linear",), seed=_examples.ENGINES_IN), "lowering")


def passes_or_fails(*failures: str) -> Any:
    """A finder that finds what it is told, first of all in the package as it is."""
    rest = iter(failures)
    return lambda *_: _examples.Tried(done=[Counter()], failure=next(rest))


def test_where_the_package_itself_fails_no_figure_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for pool in ("ThreadPoolExecutor", "ProcessPoolExecutor"):
        monkeypatch.setattr(_score, pool, in_this_process)
    monkeypatch.setitem(_score.FINDERS, "motifs", passes_or_fails("values differ", "found"))

    assert main(["score", A_PASS.name, "--by", "motifs"]) == 1
    told = capsys.readouterr().out
    assert "The package without a mistake fails" in told
    assert "by motifs about fuse_linear_relu, at example 1: values differ" in told
    assert "killed" not in told


def test_the_package_as_it_is_runs_once_for_all_that_is_looked_for_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int]] = []

    def finder(mutant: Any, budget: int, sound: Any) -> Any:
        seen.append((mutant.name, budget))
        return _examples.Tried(failure="found" * (mutant.new != mutant.old))

    for pool in ("ThreadPoolExecutor", "ProcessPoolExecutor"):
        monkeypatch.setattr(_score, pool, in_this_process)
    monkeypatch.setitem(_score.FINDERS, "motifs", finder)
    alike = [mutant for mutant in CATALOGUE.values() if mutant.file == A_PASS.file][:3]

    verdicts = list(_score.score(alike, ["motifs"], 7))

    assert all(each.killed for each in verdicts)
    assert seen == [("the package as it is", 7), *((each.name, 7) for each in alike)]

    seen.clear()
    assert len(list(_score.score(alike, ["motifs"], 7, trusted=["motifs"]))) == 3
    assert seen == [(each.name, 7) for each in alike]


@contextmanager
def in_this_process(*_: Any, **__: Any) -> Iterator[Any]:
    def submit(work: Any, *arguments: Any) -> Any:
        return SimpleNamespace(result=lambda: work(*arguments))

    yield SimpleNamespace(map=map, submit=submit)


@pytest.mark.integration
def test_a_mistake_that_ends_its_process_is_found() -> None:
    """Some arguments that are wrong end in a kernel that divides by 0."""
    line = "import torch\n"
    fatal = replace(A_PASS, name="fatal", old=line, new=f"import os\n\nos.abort()\n{line}")

    (verdict,) = _score.score([fatal], ["motifs"], 1)

    assert verdict.killed
    assert verdict.evidence == _score.ENDED


def test_time_of_the_processor_is_limited_and_its_end_finds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def busy(*_: Any) -> Any:
        while True:
            sum(range(1000))

    def waiting(*_: Any) -> Any:
        time.sleep(0.5)
        return _examples.Tried(failure="found")

    monkeypatch.setattr(_score, "_SECONDS", 0.2)
    monkeypatch.setitem(_score.FINDERS, "models", busy)
    monkeypatch.setitem(_score.FINDERS, "motifs", waiting)

    endless = _score.try_mutant(A_PASS, ["models"])

    assert (endless.killed, endless.evidence) == (False, _score.OUT_OF_TIME)
    assert _score.try_mutant(A_PASS, ["models", "motifs"]).killed


def test_the_tests_of_a_mistake_are_those_that_import_its_file() -> None:
    def near(file: str) -> set[str]:
        return {Path(each).stem for each in _mutants.tests_of(replace(A_PASS, file=file))}

    assert near("lowering/packed.py") >= {"test_packed", "test_lowering"}
    assert "test_convolutions" in near("rewrite/affine.py")  # it is named after what imports it
    assert "test_recognize" in near("core/guards.py")  # by a helper
    assert "test_materialize" in near("frontend/materialize.py")  # it is named after it
    assert "test_fold_affine" not in near("lowering/packed.py")
    assert not near("rewrite/affine.py") & {"test_fuzz", "test_mutants"}


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
    assert len(planted[0] | planted[1]) > len(planted[0]) == 4


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
