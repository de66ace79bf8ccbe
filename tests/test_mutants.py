"""How well the fuzz kills: the package passes it, and with any one mistake planted it does not."""

from __future__ import annotations

import ast
import shlex
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import optimizer
from optimizer.testing import MOTIFS, Spec
from tests.quality import examples as _examples
from tests.quality import generic as _generic
from tests.quality import mutants as _mutants
from tests.quality import score as _score
from tests.quality.__main__ import main

CATALOGUE = _mutants.catalogue()
A_PASS = CATALOGUE["fuse_linear_relu: the bias lost"]
IDLE = CATALOGUE["fuse_linear_relu: does nothing"]
FILE = "passes/fuse.py"
# The first of each pass, which is what every run of the tests plants.
OF_PASSES = {name: m for name, m in CATALOGUE.items() if m.file.startswith("passes/")}
SAMPLE = {each.concerns: name for name, each in reversed(OF_PASSES.items())}


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in CATALOGUE.values()}))
def test_what_a_mutant_replaces_stands_there_once(file):
    written = (_mutants.PACKAGE / file).read_text()
    for mutant in (each for each in CATALOGUE.values() if each.file == file):
        compile(mutant.source(), file, "exec")
        assert mutant.source() != written, mutant.name


def test_every_row_of_the_catalogue_is_a_mutant_or_an_error():
    rows = Path(_mutants.__file__).with_name("mutants.txt").read_text().splitlines()

    assert sum(row.startswith("# ") for row in rows) == len(CATALOGUE)
    with pytest.raises(ValueError, match=r"stands 0 times in passes/fuse\.py"):
        replace(A_PASS, old="what is gone").source()


AFFINE = """fold_affine fold_affine_forward fold_padding fuse_linear_relu reuse_activations
    reuse_operands sink_convolutions"""


@pytest.mark.parametrize(
    ("file", "concerns", "concerned"),
    [
        (A_PASS.file, A_PASS.concerns, ["fuse_linear_relu"]),
        (A_PASS.file, (), ["fuse_linear_relu", "reuse_activations", "reuse_operands"]),
        ("rewrite/affine.py", (), AFFINE.split()),
        ("frontend/canonicalize.py", (), ["capture"]),
        ("frontend/tracer.py", (), ["capture"]),
        ("facts/facts.py", (), list(MOTIFS)),
    ],
)
def test_a_mistake_concerns_its_pass_or_those_that_import_it(file, concerns, concerned):
    assert _mutants.concerned(replace(A_PASS, file=file, concerns=concerns)) == concerned


def test_a_mistake_is_planted_in_a_copy_only():
    with _mutants.planted(A_PASS, "optimizer.passes.fuse") as planted:
        assert sys.modules["optimizer"] is not optimizer
        assert "self.bias" not in Path(planted.__file__).read_text().partition("F.linear(")[0]
    assert sys.modules["optimizer"] is optimizer
    assert sys.modules["tests.quality.score"] is _score


@pytest.mark.integration
@pytest.mark.parametrize("name", [*MOTIFS, "capture", "lowering"])
def test_the_package_as_it_is_passes(name):
    tried = _examples.first_failing_model([name], 5)

    assert (len(tried.done), tried.failure) == (5, "")


def test_a_model_that_is_left_as_it_is_though_no_word_asks_for_it_is_a_failure(monkeypatch):
    monkeypatch.setattr(_examples, "check_spec", lambda *_, **__: nn.Identity())
    _examples.examine(Spec(("relu", "t_inplace")), "capture")
    with pytest.raises(AssertionError, match="the model is not recorded"):
        _examples.examine(Spec(("relu",)), "capture")


@pytest.mark.integration
@pytest.mark.parametrize("name", SAMPLE.values())
def test_a_mutant_of_each_pass_is_killed(name):
    verdict = _score.try_mutant(CATALOGUE[name], ["motifs", "models"])

    assert verdict.killed
    assert verdict.evidence


@pytest.mark.integration
def test_generated_models_alone_find_a_mistake():
    verdict = _score.try_mutant(A_PASS)

    assert (verdict.killed, verdict.by) == (True, "models")
    assert 0 < verdict.examples <= _score.BUDGET


@pytest.mark.integration
def test_a_pass_that_many_models_leave_idle_is_found(monkeypatch):
    with _mutants.planted(IDLE, _examples.__name__) as fresh:
        monkeypatch.setattr(fresh, "MANY", 9)
        own, both = ["fuse_linear_relu"], ["fuse_linear_relu", "remove_clones"]
        assert fresh.first_failing_model(own, 8).failure == ""
        assert fresh.first_failing_model(own, 9).failure == "fuse_linear_relu never fires"
        # Of two passes, each needs so many models.
        assert fresh.first_failing_model(both, 9).failure == ""


@pytest.mark.integration
def test_a_rewrite_that_refuses_what_it_used_to_accept_is_found():
    sound = _score.try_sound(IDLE, ["models"], 9)
    fired = next(place for place, done in enumerate(sound["models"].done, 1) if done)

    verdict = _score.try_mutant(IDLE, ["models"], 9, sound)

    assert (verdict.killed, verdict.examples) == (True, fired)
    assert verdict.evidence == "AssertionError: fuse_linear_relu fires less often than it did"
    assert not _score.try_mutant(IDLE, ["models"], 9).killed


@pytest.mark.integration
def test_some_models_at_level_2_run_on_a_real_engine():
    pytest.importorskip("openvino")
    program = ("conv_k3", "relu", "conv_k3")
    real, own = (
        {*_examples.did(_examples.examine(Spec(program, (2, 4, 8, 8), seed=seed), "lowering"))}
        for seed in (_examples.ENGINES_IN, 1)
    )

    assert any("OpenVINO" in name for name in real)
    assert own == {"new"}


def test_an_engine_that_is_wrong_is_found(monkeypatch):
    wrong = nn.Sequential(nn.ReLU(), nn.ReLU())
    monkeypatch.setattr(_examples, "Optimize", lambda *_, **__: lambda *_: wrong)

    with pytest.raises(AssertionError, match="output 0: values differ"):
        _examples.examine(Spec(("linear",), seed=_examples.ENGINES_IN), "lowering")


@pytest.fixture
def in_threads(monkeypatch):
    """Mistakes are tried in threads of this process."""
    monkeypatch.setattr(_score, "ProcessPoolExecutor", lambda n, *_: ThreadPoolExecutor(n))
    monkeypatch.setattr(_score, "_limited", nullcontext)


@pytest.mark.usefixtures("in_threads")
def test_where_the_package_itself_fails_no_figure_is_told(monkeypatch, capsys):
    failures = iter(["values differ", "found"])
    finder = lambda *_: _examples.Tried(done=[Counter()], failure=next(failures))  # noqa: E731
    monkeypatch.setitem(_score.FINDERS, "motifs", finder)

    assert main(["score", A_PASS.name, "--by", "motifs"]) == 1
    told = capsys.readouterr().out
    assert "The package without a mistake fails" in told
    assert "by motifs about fuse_linear_relu, at example 1: values differ" in told
    assert "killed" not in told


@pytest.mark.usefixtures("in_threads")
def test_the_package_as_it_is_runs_once_for_all_that_is_looked_for_alike(monkeypatch):
    seen = []

    def finder(mutant, budget, sound):
        seen.append((mutant.name, budget))
        return _examples.Tried(failure="found" * (mutant.new != mutant.old))

    monkeypatch.setitem(_score.FINDERS, "motifs", finder)
    alike = [mutant for mutant in CATALOGUE.values() if mutant.file == A_PASS.file][:3]
    for trusted, first in (([], [("the package as it is", 7)]), (["motifs"], [])):
        verdicts = list(_score.score(alike, ["motifs"], 7, 1, trusted))

        assert [each.killed for each in verdicts] == [True] * 3
        assert seen == [*first, *((each.name, 7) for each in alike)]
        seen.clear()


@pytest.mark.integration
def test_a_mistake_that_ends_its_process_is_found():
    """Some arguments that are wrong end in a kernel that divides by 0."""
    line = "import torch\n"
    fatal = replace(A_PASS, name="fatal", old=line, new=f"import os\n\nos.abort()\n{line}")

    (verdict,) = _score.score([fatal], ["motifs"], 1)

    assert verdict.killed
    assert verdict.evidence == _score.ENDED


def test_what_does_not_run_is_found_and_where_no_test_runs_there_is_an_error(monkeypatch):
    found = _score.try_mutant(replace(A_PASS, new="there is no such name"))
    assert found.killed
    assert found.evidence.startswith("SyntaxError: ")

    monkeypatch.setattr(pytest, "main", lambda arguments: 4)
    with pytest.raises(RuntimeError, match="pytest could not run"):
        _score.try_mutant(A_PASS, ["tests"])


def test_time_of_the_processor_is_limited_and_its_end_finds_nothing(monkeypatch):
    def busy(*_):
        while True:
            sum(range(1000))

    def waiting(*_):
        time.sleep(0.3)
        return _examples.Tried(failure="found")

    monkeypatch.setattr(_score, "_SECONDS", 0.2)
    monkeypatch.setitem(_score.FINDERS, "models", busy)
    monkeypatch.setitem(_score.FINDERS, "motifs", waiting)

    endless = _score.try_mutant(A_PASS, ["models"])

    assert (endless.killed, endless.evidence) == (False, _score.OUT_OF_TIME)
    assert _score.try_mutant(A_PASS, ["models", "motifs"]).killed


def test_the_tests_of_a_mistake_are_those_that_import_its_file():
    def near(file):
        return {Path(each).stem for each in _mutants.tests_of(replace(A_PASS, file=file))}

    assert near("lowering/packed.py") >= {"test_packed", "test_lowering"}
    assert "test_convolutions" in near("rewrite/affine.py")  # it is named after what imports it
    assert "test_recognize" in near("core/guards.py")  # by a helper
    assert "test_materialize" in near("frontend/materialize.py")  # it is named after it
    assert "test_fold_affine" not in near("lowering/packed.py")
    assert not near("rewrite/affine.py") & {"test_fuzz", "test_mutants"}


def test_every_change_plants_some_others(monkeypatch):
    lines = (Path(__file__).parent.parent / ".ci" / "run").read_text().replace("\\\n", "")
    (command,) = (line for line in lines.splitlines() if "tests.quality score" in line)
    *given, count = shlex.split(command.partition("tests.quality ")[2])
    planted = []

    def tried(mutants, by, *_):
        planted.append({mutant.name for mutant in mutants})
        assert set(by) == set(_score.FINDERS)
        return iter(())

    monkeypatch.setattr(_score, "score", tried)
    for number in ("41", "42"):
        main([*given, number])

    assert count == "$(git rev-list --count HEAD)"
    assert len(planted[0] | planted[1]) > len(planted[0]) == 4


def test_what_nothing_can_find_may_survive(monkeypatch):
    survive = lambda mutants, *_: [_score.Verdict(m, "tests", False, 1, 1.0, "") for m in mutants]  # noqa: E731
    monkeypatch.setattr(_score, "score", survive)

    assert main(["score", "--of", "generic", *_generic.equivalent()]) == 0
    assert main(["score", A_PASS.name]) == 1


@pytest.mark.mutants
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_mutant_is_killed(name):
    assert _score.try_mutant(CATALOGUE[name], list(_score.FINDERS)).killed


def test_the_table_names_survivors_and_counts_examples():
    real, same = replace(A_PASS, name="a real one", origin="project #1"), "no mistake"
    verdicts = [
        _score.Verdict(A_PASS, "models", killed=True, examples=3, seconds=0.5, evidence="differ"),
        _score.Verdict(real, "tests", killed=False, examples=9, seconds=1.0, evidence=""),
    ]
    verdicts.append(replace(verdicts[1], mutant=replace(A_PASS, name=same)))

    text = "\n".join(_score.table(verdicts, {same: "it is the same"}))

    assert "| fuse_linear_relu: the bias lost | own | 3 models | 0.5 | differ |" in text
    assert "| a real one | project #1 | survives | 1.0 |  |" in text
    assert "| no mistake | own | survives | 1.0 | it is the same |" in text
    assert "killed 1 of 2 (50.0%); from real issues 0 of 1;" in text
    assert "median and ninth decile: 3, 3" in text


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("a < b", {"a <= b"}),
        ("a and b", {"a or b"}),
        ("not a", {"not not a"}),
        ("a - b", {"a + b"}),
        ("a if b else c", {"a if not b else c"}),
        ("[a for a in b if a]", {"[a for a in b]"}),
        ("a = all(b)", {"a = any(b)"}),
        ("a if b and c else d", {"a if b or c else d", "a if not (b and c) else d"}),
        ("a[0]", {"a[1]"}),
        ("a = True", {"a = False"}),
        ("require(a)", {"None"}),
        ("def f(a: int | None) -> int | None: ...", set()),
        ("A: TypeAlias = int | None", set()),
    ],
)
def test_every_kind_of_change_is_made_but_of_types(text, changed):
    tree = ast.parse(text)
    assert changed == {
        _generic.with_changed(tree, node, field, value)
        for node in _generic.code_of(tree)
        for field, value in _generic.changes(node)
    }


def test_each_generic_mutant_is_another_program_and_has_a_name_of_its_own():
    files = [FILE, "facts/facts.py", "passes/fold_affine.py", "passes/transposes.py"]
    mutants = [mutant for file in files for mutant in _generic.mutants_of(file)]

    assert len({(mutant.file, mutant.new) for mutant in mutants}) == len(mutants) > 2
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    assert any(mutant.name.endswith(" (2)") for mutant in mutants)
    assert any(f"{FILE}: - require(len(linear.users) == 1" in each.name for each in mutants)
    for mutant in _generic.mutants_of(FILE):
        compile(mutant.source(), FILE, "exec")
    assert {"frontend/tracer.py", "frontend/symbolic.py", *files} <= {*_generic.files()}


def test_a_sample_is_the_same_for_a_seed_and_outlives_code():
    every = _generic.mutants_of(FILE) + _generic.mutants_of("core/ops.py")
    before = _mutants.sample(every, 5, 1)
    assert before == _mutants.sample(every, 5, 1) != _mutants.sample(every, 5, 2)
    assert len(_mutants.sample(every, None, 1)) == len(every)

    kept = [each for each in every if each != before[2]]
    assert _mutants.sample(kept, 4, 1) == [*before[:2], *before[3:]]


@pytest.mark.integration
def test_what_changes_nothing_survives_and_what_only_a_test_sees_does_not():
    file, before = "passes/masks.py", "it is filled in place and saves no copy"
    text = (_mutants.PACKAGE / file).read_text()
    as_it_is = _mutants.Mutant("as it is", file, text, text + "\n", "generic")
    reworded = replace(as_it_is, new=text.replace(before, "reworded"))
    assert reworded.new != text

    survivor, seen = _score.score([as_it_is, reworded], ["tests"], trusted=["tests"])

    assert not survivor.killed
    assert (seen.by, seen.evidence) == ("tests", "its tests fail")


def test_what_is_called_equivalent_is_a_mutant_still():
    for name, why in _generic.equivalent().items():
        assert name in {mutant.name for mutant in _generic.mutants_of(name.partition(":")[0])}
        assert len(why.split()) > 5
