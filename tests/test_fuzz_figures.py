"""The table of how good the fuzz is says what its commands measured."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from torch import nn

import optimizer
from optimizer.testing import MOTIFS
from tests.quality import __main__ as _quality
from tests.quality import figures as _figures
from tests.quality import firing as _firing
from tests.quality import generic as _generic
from tests.quality import hunt as _hunt
from tests.quality import mutants as _mutants
from tests.quality import record as _record
from tests.quality import score as _score
from tests.quality import soak as _soak
from tests.quality.__main__ import main
from tests.repository import committed, table

ROOT = Path(__file__).parent.parent
STAMP = {"commit": "abc1234", "machine": "abacus, 2 cores", "command": "count"}
REAL, OWN = (
    next(name for name, mutant in _mutants.catalogue().items() if mutant.is_real is real)
    for real in (True, False)
)
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


@pytest.mark.parametrize(("named", "given"), [("none", ()), ("auto", "auto")])
def test_a_soak_goes_without_engines_where_it_is_asked_to(monkeypatch, named, given):
    seen = []
    monkeypatch.setattr(_soak, "soak", lambda subject, *rest, **more: seen.append(subject) or [])
    main(["soak", "--level", "2", "--engines", named])
    monkeypatch.setattr(optimizer, "optimize", lambda *rest, **options: options["engines"])
    assert seen[0](nn.ReLU(), ()) == given


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
