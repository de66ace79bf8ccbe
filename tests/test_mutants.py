"""How well the fuzz kills: the package passes it, and with any one mistake planted it does not."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from optimizer.testing import MOTIFS, Optimize
from tests.quality import examples as _examples
from tests.quality import mutants as _mutants
from tests.quality import score as _score
from tests.quality import soak as _soak
from tests.quality.__main__ import main

CATALOGUE = _mutants.catalogue()
A_PASS = CATALOGUE["fuse_linear_relu: the bias lost"]
IDLE = CATALOGUE["fuse_linear_relu: does nothing"]
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


@pytest.mark.integration
@pytest.mark.parametrize("name", [*MOTIFS, "capture", "lowering"])
def test_the_package_as_it_is_passes(name):
    tried = _examples.first_failing_model([name], 5)

    assert (len(tried.done), tried.failure) == (5, "")


@pytest.mark.integration
@pytest.mark.parametrize("name", SAMPLE.values())
def test_a_mutant_of_each_pass_is_killed(name):
    verdict = _score.try_mutant(CATALOGUE[name], ["motifs", "models"])

    assert verdict.killed
    assert verdict.evidence


@pytest.mark.mutants
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_mutant_is_killed(name):
    assert _score.try_mutant(CATALOGUE[name], list(_score.FINDERS)).killed


@pytest.mark.integration
def test_a_pass_that_fires_less_often_is_found():
    sound = _score.try_sound(IDLE, ["models"], 9)
    fired = next(place for place, done in enumerate(sound["models"].done, 1) if done)

    verdict = _score.try_mutant(IDLE, ["models"], 9, sound)

    assert (verdict.killed, verdict.examples) == (True, fired)
    assert verdict.evidence == "AssertionError: fuse_linear_relu fires less often than it did"
    assert not _score.try_mutant(IDLE, ["models"], 9).killed


def test_where_the_package_itself_fails_no_figure_is_told(monkeypatch, capsys):
    finder = lambda *_: _examples.Tried(failure="values differ")  # noqa: E731
    monkeypatch.setattr(_score, "ProcessPoolExecutor", lambda n, *_: ThreadPoolExecutor(n))
    monkeypatch.setattr(_score, "_limited", nullcontext)
    monkeypatch.setitem(_score.FINDERS, "motifs", finder)

    assert main(["score", A_PASS.name, "--by", "motifs"]) == 1
    told = capsys.readouterr().out
    assert "The package without a mistake fails" in told
    assert "by motifs about fuse_linear_relu, at example 0: values differ" in told
    assert "killed" not in told


@pytest.mark.integration
def test_a_mistake_that_ends_its_process_is_found():
    """Some arguments that are wrong end in a kernel that divides by 0."""
    line = "import torch\n"
    fatal = replace(A_PASS, name="fatal", old=line, new=f"import os\n\nos.abort()\n{line}")

    (verdict,) = _score.score([fatal], ["motifs"], 1)

    assert (verdict.killed, verdict.evidence) == (True, _score.ENDED)


def test_every_change_plants_some_others_and_survivors_are_named(monkeypatch, capsys):
    lines = (Path(__file__).parent.parent / ".ci" / "run").read_text().replace("\\\n", "")
    (command,) = (line for line in lines.splitlines() if "tests.quality score" in line)
    *given, count = shlex.split(command.partition("tests.quality ")[2])
    planted = []

    def survive(mutants, *_):
        planted.append({mutant.name for mutant in mutants})
        return [_score.Verdict(each, "tests", False, 1, 1.0, "") for each in mutants]

    monkeypatch.setattr(_score, "score", survive)

    assert [main([*given, number]) for number in ("41", "42", "41")] == [1, 1, 1]
    assert count == "$(git rev-list --count HEAD)"
    assert len(planted[0] | planted[1]) > len(planted[0]) == 4
    assert planted[0] == planted[2]
    told = capsys.readouterr().out
    assert "killed 0 of 4 (0.0%); from real issues 0 of" in told


@dataclass(frozen=True)
class Deadly(Optimize):
    """Ends the process, as a kernel may; at level 0 its answer is what cannot be called."""

    def __call__(self, model, inputs):
        if self.level:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.Module()


def test_a_soak_counts_what_it_tries_and_what_is_wrong_or_ends_its_process(monkeypatch):
    forked = partial(ProcessPoolExecutor, 1, multiprocessing.get_context("fork"))
    monkeypatch.setattr(_soak, "_pool", forked)
    monkeypatch.setattr(_soak, "BATCH", 2)
    (right, _), (wrong, _), (ended, _) = (
        list(_soak.soak(subject, 3, dtype=torch.float64, first_seed=5))
        for subject in (Optimize(1), Deadly(0), Deadly(1))
    )

    assert (right.examples, right.wrong, right.lowered, right.seconds > 0) == (3, [], 0, True)
    assert (wrong.examples, len(wrong.wrong)) == (3, 3)
    assert ended.wrong == [f"a model of seed {seed} ended the process" for seed in (5, 6)]
