"""What the commands of tests/quality measure, and the table of how good the fuzz is."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from optimizer.lowering import partition as _partition
from optimizer.lowering.engines import engines_here
from optimizer.testing import MOTIFS, Optimize, Spec
from tests.quality import __main__ as _quality
from tests.quality import coverage as _coverage
from tests.quality import figures as _figures
from tests.quality import firing as _firing
from tests.quality import generic as _generic
from tests.quality import hunt as _hunt
from tests.quality import mutants as _mutants
from tests.quality import record as _record
from tests.quality import score as _score
from tests.quality import shrink as _shrink
from tests.quality import soak as _soak
from tests.quality.__main__ import main
from tests.repository import committed, table

ROOT = Path(__file__).parent.parent
STAMP = {"commit": "abc1234", "machine": "abacus, 2 cores", "command": "count"}
REAL, OWN = (
    next(name for name, mutant in _mutants.catalogue().items() if mutant.is_real is real)
    for real in (True, False)
)
A_PASS = _mutants.catalogue()["fuse_linear_relu: the bias lost"]
SAME = next(iter(_generic.equivalent()))


def record(folder, figure, **entries):
    text = json.dumps({name: entry | STAMP for name, entry in entries.items()})
    (folder / f"{figure}.json").write_text(text)


def row(folder, told):
    """The row of the table that begins so."""
    (found,) = (line for line in _figures.table(folder) if line.startswith(f"| {told}"))
    return found


def test_the_table_of_the_page_is_what_was_recorded():
    table = "\n".join(_figures.table(ROOT / "docs" / "fuzzing"))
    assert f"{_figures.START}\n{table}\n\n{_figures.END}" in (ROOT / _figures.PAGE).read_text(), (
        "run `python -m tests.quality figures`"
    )


def test_a_row_that_nobody_recorded_says_so(tmp_path):
    rows = list(_figures.table(tmp_path))[2:]
    assert len(rows) == len(_figures.FIGURES)
    assert all(" | not measured | " in each for each in rows)


def test_mutants_are_counted_and_survivors_named(tmp_path):
    killed, survives = ({"killed": each, "examples": 7, "seconds": 1.0} for each in (True, False))
    gone = {"a mutant that is gone": survives}
    record(tmp_path, "catalogue_by_models", **{REAL: killed, OWN: survives}, **gone)
    record(tmp_path, "catalogue_by_tests", **{OWN: killed})
    alone, together = (
        row(tmp_path, f"mistakes of the catalogue, found by {by}") for by in ("gen", "any")
    )

    assert f"| 80 % | 1 of 2 (50.0%); survive: {OWN} | `count`; abc1234; abacus, 2 cores" in alone
    assert "| 97 % | 2 of 2 (100.0%) |" in together
    assert "| 1 of 1 (100.0%) |" in row(tmp_path, "those of them")


def test_a_row_is_marked_where_its_code_has_changed_since(tmp_path, monkeypatch):
    found = {"killed": True, "examples": 7, "code": _record.code_of("catalogue_by_models")}
    for older, ending in (({}, ""), ({"b": found | {"code": "of before"}}, f"; {_figures.OLDER}")):
        record(tmp_path, "catalogue_by_models", a=found, **older)
        marked = row(tmp_path, "models to find a mistake")
        assert marked.endswith(f"abacus, 2 cores{ending} |")

    package = tmp_path / "optimizer"
    monkeypatch.setattr(_record, "__file__", str(package / "testing" / "_record.py"))
    (package / "testing").mkdir(parents=True)

    def digests(name, text):
        (package / name).write_text(text)
        _record.code_of.cache_clear()
        return _record.code_of("firing"), _record.code_of("hunt")

    written = [("notes.md", ""), ("notes.md", "no code"), ("a.py", "1"), ("a.py", "2")]
    firing, hunt = zip(*(digests(*each) for each in written), strict=True)
    _record.code_of.cache_clear()
    assert firing[0] == firing[1]
    assert len({*firing}) == 3
    assert len({*hunt}) == 1  # it speaks of other tools and of the kit


FOUND, MISSED = {"killed": True}, {"killed": False}
A = {"wrong": 1, "lowered": 30, "regions": {"one": 20, "two": 30}}
B = {"wrong": 0, "lowered": 20, "regions": {"one": 15}}
RECORDED = {
    "generic_by_models": {"a.py: b": FOUND, "a.py: c": MISSED, SAME: MISSED},
    "hunt": {"fuse": {"defects": 4, "seconds": 3.0}, "cse": {"defects": 3, "seconds": 2.0}},
    "shrink": {"a": {"minimal": True, "seconds": 1.0}, "b": {"minimal": False, "seconds": 3.0}},
    "soak": {
        "a": A | {"examples": 90, "asked": 91, "seconds": 3.0},
        "b": B | {"examples": 10, "asked": 11, "seconds": 1.0},
        "level 1": {"wrong": 7, "examples": 2050, "asked": 2050, "seconds": 41.0},
    },
    "coverage": {"operations": {"met": 3, "of": 4}, "ranks": {"met": 1, "of": 2}},
    "quick": {"2 processes": {"seconds": 90.0}},
}


@table(
    "told expected",
    ("generic mistakes, which no person chose, found by gen", "1 of 2 (50.0%); survive: a.py: c"),
    ("defects found", "7 (fuse 4 in 3 s, cse 3 in 2 s)"),
    ("counterexamples", "1 of 2 (50.0%); median 2.0 s, at most 3.0 s of the processor"),
    ("models that the optimizer", "8 in 2,150 (a: 1 in 90; b: 0 in 10; level 1: 7 in 2,050)"),
    ("models lowered", "50 of 100 (50.0%), 1 wrong; regions: 35 one, 30 two"),
    ("models a second", "a: 30; b: 10; level 1: 50"),
    ("models that are rejected", "2 of 2,152"),
    ("operations met", "operations 3 of 4 (75.0%); ranks 1 of 2 (50.0%)"),
    ("all tests", "2 processes: 1.5 min"),
)
def test_a_row_tells_what_was_recorded(told, expected, tmp_path):
    for figure, entries in RECORDED.items():
        record(tmp_path, figure, **entries)
    assert f" | {expected} | `count`" in row(tmp_path, told)


def test_a_row_names_the_pass_that_fires_least_and_counts_reasons(tmp_path):
    seldom, *others = MOTIFS
    entry, met = {"examples": 10, "met": 1, "never": [], "fired": 5}, len(MOTIFS)
    firing = dict.fromkeys(others, entry) | {seldom: entry | {"fired": 1, "never": ["of Tuesday"]}}
    record(tmp_path, "firing", **firing)
    shares, reasons = (row(tmp_path, told) for told in ("share of its own fuzz", "reasons to refu"))
    assert f"| 10% ({seldom}) to 50%; {met} of {met} passes |" in shares
    assert f"| {met} of {met + 1} ({met / (met + 1):.1%}) |" in reasons


def test_a_page_without_marks_is_refused(tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(ValueError, match="has no <!-- figures -->"):
        _figures.renew(tmp_path / "page.md", tmp_path)


def test_an_entry_replaces_its_own_name_only(tmp_path):
    for name, killed in (("a", False), ("b", False), ("a", True)):
        _record.Recorder.of(tmp_path, "score", name)(name, killed=killed)
    entries = [(name, each["killed"]) for name, each in _record.read(tmp_path, "score").items()]
    assert entries == [("b", False), ("a", True)]
    assert [each.name for each in tmp_path.iterdir()] == ["score.json"]


def test_the_commit_has_a_mark_where_files_differ(tmp_path, monkeypatch):
    file = tmp_path / "tests" / "quality" / "record.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    monkeypatch.setattr(_record, "__file__", str(file))
    assert _record.commit() == ""
    commit = committed(tmp_path, "first")
    (tmp_path / "elsewhere").write_text("")
    assert _record.commit() == commit[:7]
    file.write_text("changed")
    assert _record.commit() == f"{commit[:7]}+"


COMMANDS = ("hunt", "firing", "soak --examples 3", "score", "quick")


def test_each_command_records_what_the_table_tells(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tally = _soak.Tally(examples=3, seconds=1.0)
    done = subprocess.CompletedProcess([], 0)
    verdict = _score.Verdict(_mutants.catalogue()[REAL], "models", True, 3, 0.5, "values differ")
    monkeypatch.setattr(_hunt, "hunt", lambda name, examples: [])
    monkeypatch.setattr(_firing, "firing", lambda name, examples: _firing.Firing(name, 4, 1))
    monkeypatch.setattr(_soak, "soak", lambda *given, **options: iter([tally]))
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: done)
    monkeypatch.setattr(_record.Recorder, "of", lambda *given: _record.Recorder(*given[:2], STAMP))
    monkeypatch.setattr(_score, "score", lambda *given: iter([verdict]))

    for command in COMMANDS:
        main(command.split())
    assert not (tmp_path / "docs").exists()
    for command in COMMANDS:
        main([*command.split(), "--record"])
    page = tmp_path / "docs" / "fuzzing.md"
    page.write_text(f"before\n{_figures.START}{_figures.END}after\n")
    main(["figures"])

    text = page.read_text()
    assert text.startswith("before\n<!-- figures -->\n\n| | goal")
    assert text.endswith("|\n\n<!-- end of figures -->\nafter\n")
    assert text.count("not measured") == 8  # by motifs, by tests, generic, shrink, coverage


def test_all_figures_are_measured_anew_by_one_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_quality, "RENEWED", ("firing remove_clones --examples 3",))
    page = tmp_path / "page.md"
    page.write_text(_figures.START + _figures.END)
    _record.FOLDER.mkdir(parents=True)
    before = {"fired": 1, "examples": 1, "met": 1, "never": []}
    record(_record.FOLDER, "firing", **{next(iter(MOTIFS)): before})

    assert main(["figures", "--page", str(page)]) == 0
    assert page.read_text().count(_figures.OLDER) == 2  # firing has two rows
    assert main(["figures", "--page", str(page), "--renew"]) == 0
    assert list(_record.read(_record.FOLDER, "firing")) == ["remove_clones"]
    assert _figures.OLDER not in page.read_text()


def test_what_is_measured_anew_is_every_figure_but_generic_mistakes():
    options = [_quality._parser().parse_args(shlex.split(each)) for each in _quality.RENEWED]
    named = {name for figure in _figures.FIGURES for name in figure.recorded.split()}
    assert {_quality._figure(each) for each in options} == {
        name for name in named if not name.startswith("generic")
    }


def test_a_pass_fires_in_a_fifth_of_its_own_fuzz_and_reasons_that_no_model_met_are_named():
    read_elsewhere, name = "the layer's output is read elsewhere", "fuse_linear_relu"
    seen, unseen = _firing.firing(name, 40), _firing.Firing(name)

    assert seen.examples >= 40
    assert 0.2 * seen.examples <= seen.fired < seen.examples
    assert seen.refused[read_elsewhere] > 0
    assert read_elsewhere in unseen.never()
    assert set(unseen.never()) == _firing.reasons(name)


def test_the_table_of_firing_has_a_row_for_each_pass(monkeypatch, capsys):
    monkeypatch.setattr(_firing, "firing", lambda name, examples: _firing.Firing(name, 4, 1))

    assert main(["firing"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {name}", "25%"] for name in MOTIFS]


def covered(*tokens, dtype=torch.float64):
    coverage = _coverage.Coverage()
    coverage.add(Spec(tokens, (2, 3)), dtype)
    return coverage


def test_an_operation_is_met_with_rank_dtype_and_reader():
    seen = covered("unsqueeze", "relu", "linear", dtype=torch.float32)

    assert seen.operations() == {".unsqueeze", "F.relu", "Linear"}
    assert seen.ranks == {(".unsqueeze", "2"), ("F.relu", "3"), ("Linear", "3")}
    assert {dtype for _, dtype in seen.dtypes} == {"float32"}
    assert seen.readers == {(".unsqueeze", "F.relu"), ("F.relu", "Linear")}


def test_operations_that_were_not_met_are_named(monkeypatch, capsys):
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


def test_few_models_meet_most_words():
    """Were examples copies of one another, 100 models would meet half of it."""
    assert len(_coverage.met(100).operations()) > 130


def test_each_word_alone_is_possible(monkeypatch):
    monkeypatch.setattr(_coverage, "TOKENS", ["relu"])
    ranks = {("F.relu", str(rank)) for rank in range(1, 6)}
    dtypes = {("F.relu", "float64"), ("F.relu", "float32")}

    assert _coverage.feasible() == _coverage.Coverage(ranks, dtypes)


@table(
    "tokens fails",
    (("relu", "bn"), lambda tokens: "bn" in tokens),
    (("bn", "relu", "bn", "relu", "bn"), lambda t: t.count("bn") == t.count("relu") + 1),
    (("conv",), lambda tokens: tokens in (("conv",), ("linear",))),
    (("linear",) * 11, lambda tokens: len(tokens) == 11),
)
def test_a_program_that_is_not_minimal_is_told(tokens, fails):
    assert not _shrink.is_minimal(Spec(tokens), lambda spec: fails(spec.tokens))


@pytest.mark.integration
def test_a_planted_mistake_shrinks_to_what_shows_it():
    found = _shrink.shrink(A_PASS, 100)

    assert (found.program, found.minimal) == ("linear relu", True)
    assert found.words_before >= 2
    assert _shrink.shrink(A_PASS, 1) is None


def test_the_table_of_shrinking_has_a_row_for_each_mistake_that_was_found(monkeypatch, capsys):
    found = _shrink.Shrunk("linear leaky", minimal=False, words_before=9, seconds=1.25)
    monkeypatch.setattr(_shrink, "shrink", lambda m, budget: found if m == A_PASS else None)

    assert len({mutant.concerns for mutant in _shrink.sample(30)}) >= 15
    assert main(["shrink", "--sample", "9999"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == [f"| {A_PASS.name} | 9 | linear leaky | no | 1.2 |"]


@dataclasses.dataclass(frozen=True)
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


def test_a_soak_at_level_2_counts_regions_and_sees_a_nan_that_is_lost(monkeypatch):
    monkeypatch.setattr(_partition, "is_moderate", lambda tensor: True)
    relu = Spec(("conv", "relu", "conv"), (2, 4, 4, 4), "random", 0, "contiguous", "module")
    monkeypatch.setattr(_soak, "models", lambda: st.just(relu))
    tally = _soak.tried(Optimize(2), 1, torch.float32, 0)

    [engine] = engines_here(["openvino"])
    assert (tally.examples, tally.lowered, tally.regions) == (1, 1, {engine: 1})
    assert f"(regions: 1 {engine})" in str(tally)
    assert [told.splitlines()[0] for told in tally.wrong] == ["nan in input 0 is lost"]


@table("named given", ("none", ()), ("auto", "auto"))
def test_a_soak_goes_without_engines_where_it_is_asked_to(monkeypatch, named, given):
    seen = []
    monkeypatch.setattr(_soak, "soak", lambda subject, *rest, **more: seen.append(subject) or [])
    main(["soak", "--level", "2", "--engines", named])

    assert seen == [Optimize(2, engines=given)]
