"""The table of how good the fuzz is says what its commands measured."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import optimizer
from optimizer.testing import (
    MOTIFS,
)
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

ROOT = Path(__file__).parent.parent
STAMP = {"commit": "abc1234", "machine": "abacus, 2 cores", "command": "count"}
REAL, OWN = (
    next(name for name, mutant in _mutants.catalogue().items() if mutant.is_real is real)
    for real in (True, False)
)

SAME = next(iter(_generic.equivalent()))


def row(folder: Path, figure: str, told: str, **entries: dict[str, Any]) -> str:
    """The row `told` of the table, where these entries of a figure were recorded."""
    text = json.dumps({name: entry | STAMP for name, entry in entries.items()})
    (folder / f"{figure}.json").write_text(text)
    (found,) = (line for line in _figures.table(folder) if line.startswith(f"| {told}"))
    return found


def test_the_table_of_the_page_is_what_was_recorded() -> None:
    table = "\n".join(_figures.table(ROOT / "docs" / "fuzzing"))

    assert f"{_figures.START}\n{table}\n\n{_figures.END}" in (ROOT / _figures.PAGE).read_text(), (
        "run `python -m tests.quality figures`"
    )


def test_a_row_that_nobody_recorded_says_so(tmp_path: Path) -> None:
    rows = list(_figures.table(tmp_path))[2:]

    assert len(rows) == len(_figures.FIGURES)
    assert all(" | not measured | " in each for each in rows)


def test_mutants_are_counted_and_survivors_named(tmp_path: Path) -> None:
    killed = {"killed": True, "examples": 7, "seconds": 1.0}
    survives = {"killed": False, "examples": 400, "seconds": 9.0}
    entries = {REAL: killed, OWN: survives, "a mutant that is gone": survives}
    mistakes = "mistakes of the catalogue, found by"
    alone = row(tmp_path, "catalogue_by_models", f"{mistakes} gen", **entries)
    row(tmp_path, "catalogue_by_tests", f"{mistakes} unit", **{OWN: killed})
    together, real = (
        next(line for line in _figures.table(tmp_path) if line.startswith(f"| {told}"))
        for told in (f"{mistakes} any", "those of them")
    )

    assert f"| 80 % | 1 of 2 (50.0%); survive: {OWN} | `count`; abc1234; abacus, 2 cores" in alone
    assert "| 97 % | 2 of 2 (100.0%) |" in together
    assert "| 1 of 1 (100.0%) |" in real


def test_a_row_is_marked_where_its_code_has_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"killed": True, "examples": 7, "code": _record.code_of("catalogue_by_models")}
    told = "models to find a mistake"
    assert row(tmp_path, "catalogue_by_models", told, a=found).endswith("abacus, 2 cores |")
    before = found | {"code": "of before"}
    marked = row(tmp_path, "catalogue_by_models", told, a=found, b=before)
    assert marked.endswith(f"abacus, 2 cores; {_figures.OLDER} |")

    package = tmp_path / "optimizer"
    monkeypatch.setattr(_record, "__file__", str(package / "testing" / "_record.py"))
    (package / "testing").mkdir(parents=True)

    def of(figure: str) -> str:
        _record.code_of.cache_clear()
        return _record.code_of(figure)

    old = of("firing"), of("hunt")
    (package / "notes.md").write_text("what is no code")
    assert (of("firing"), of("hunt")) == old
    (package / "a.py").write_text("1")
    first, hunt = of("firing"), of("hunt")
    assert first != old[0]
    assert hunt == old[1]  # it speaks of other tools and of the kit
    (package / "a.py").write_text("2")
    assert of("firing") != first
    _record.code_of.cache_clear()


TOLD: dict[str, tuple[str, dict[str, dict[str, Any]], str]] = {
    "generic mistakes, which no person chose, found by gen": (
        "generic_by_models",
        {"a.py: b": {"killed": True}, "a.py: c": {"killed": False}, SAME: {"killed": False}},
        "1 of 2 (50.0%); survive: a.py: c",
    ),
    "defects found": (
        "hunt",
        {"fuse": {"defects": 4, "seconds": 3.0}, "cse": {"defects": 3, "seconds": 2.0}},
        "7 (fuse 4 in 3 s, cse 3 in 2 s)",
    ),
    "counterexamples": (
        "shrink",
        {"a": {"minimal": True, "seconds": 1.0}, "b": {"minimal": False, "seconds": 3.0}},
        "1 of 2 (50.0%); median 2.0 s, at most 3.0 s of the processor",
    ),
    "models that the optimizer": (
        "soak",
        {"a": {"wrong": 0, "examples": 2000}, "b": {"wrong": 1, "examples": 500}},
        "1 in 2,500 (a: 0 in 2,000; b: 1 in 500)",
    ),
    "models lowered": (
        "soak",
        {
            "a": {"examples": 90, "lowered": 30, "wrong": 1, "regions": {"one": 20, "two": 30}},
            "b": {"examples": 10, "lowered": 20, "wrong": 0, "regions": {"one": 15}},
            "level 1": {"examples": 50, "wrong": 7},
        },
        "50 of 100 (50.0%), 1 wrong; regions: 35 one, 30 two",
    ),
    "models a second": ("soak", {"a": {"examples": 90, "seconds": 3.0}}, "a: 30"),
    "models that are rejected": ("soak", {"a": {"asked": 50, "examples": 48}}, "2 of 50"),
    "operations met": (
        "coverage",
        {"operations": {"met": 3, "of": 4}, "ranks": {"met": 1, "of": 2}},
        "operations 3 of 4 (75.0%); ranks 1 of 2 (50.0%)",
    ),
    "all tests": ("quick", {"2 processes": {"seconds": 90.0}}, "2 processes: 1.5 min"),
}


@pytest.mark.parametrize("told", TOLD)
def test_a_row_tells_what_was_recorded(told: str, tmp_path: Path) -> None:
    figure, entries, expected = TOLD[told]
    complete = {"wrong": 0, "examples": 1, "asked": 1, "seconds": 1.0}
    full = {name: complete | entry for name, entry in entries.items()}

    assert f" | {expected} | `count`" in row(tmp_path, figure, told, **full)


def test_a_row_names_the_pass_that_fires_least_and_counts_reasons(tmp_path: Path) -> None:
    seldom, *others = MOTIFS
    entry = {"examples": 10, "met": 1, "never": []}
    firing = {name: entry | {"fired": 5} for name in others}
    firing[seldom] = entry | {"fired": 1, "never": ["it is Tuesday"]}

    shares = row(tmp_path, "firing", "share of its own fuzz", **firing)
    reasons = row(tmp_path, "firing", "reasons to refuse", **firing)

    assert f"| 10% ({seldom}) to 50%; {len(MOTIFS)} of {len(MOTIFS)} passes |" in shares
    met = len(MOTIFS)
    assert f"| {met} of {met + 1} ({met / (met + 1):.1%}) |" in reasons


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("nothing")

    with pytest.raises(ValueError, match="has no <!-- figures -->"):
        _figures.renew(tmp_path / "page.md", tmp_path)


def test_an_entry_replaces_its_own_name_only(tmp_path: Path) -> None:
    for name, killed in (("a", False), ("b", False), ("a", True)):
        _record.Recorder.of(tmp_path, "score", name)(name, killed=killed)

    entries = _record.read(tmp_path, "score")
    assert [(name, each["killed"]) for name, each in entries.items()] == [("b", False), ("a", True)]
    assert [each.name for each in tmp_path.iterdir()] == ["score.json"]


def test_the_commit_has_a_mark_where_files_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tests" / "quality" / "record.py"
    file.parent.mkdir(parents=True)
    file.write_text("")
    monkeypatch.setattr(_record, "__file__", str(file))
    assert _record.commit() == ""
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for git in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *git], cwd=tmp_path, check=True)

    (tmp_path / "elsewhere").write_text("")
    clean = _record.commit()
    file.write_text("changed")

    assert len(clean) == 7
    assert _record.commit() == f"{clean}+"


@pytest.mark.parametrize(("named", "given"), [("none", ()), ("auto", "auto")])
def test_a_soak_goes_without_engines_where_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, named: str, given: Any
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(_soak, "soak", lambda subject, *rest, **more: seen.append(subject) or [])
    main(["soak", "--level", "2", "--engines", named])

    monkeypatch.setattr(optimizer, "optimize", lambda *rest, **options: options["engines"])
    assert seen[0](nn.ReLU(), ()) == given


def test_each_command_records_what_the_table_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_hunt, "hunt", lambda name, examples: [])
    monkeypatch.setattr(_firing, "firing", lambda name, examples: _firing.Firing(name, 4, 1))
    tally = _soak.Tally(examples=3, seconds=1.0)
    monkeypatch.setattr(_soak, "soak", lambda *given, **options: iter([tally]))
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: done)
    monkeypatch.setattr(_record.Recorder, "of", lambda *given: _record.Recorder(*given[:2], STAMP))
    verdict = _score.Verdict(_mutants.catalogue()[REAL], "models", True, 3, 0.5, "values differ")
    monkeypatch.setattr(_score, "score", lambda *given: iter([verdict]))

    for command in (["hunt"], ["firing"], ["soak", "--examples", "3"], ["score"], ["quick"]):
        main(command)
        assert not (tmp_path / "docs").exists()
    for command in (["hunt"], ["firing"], ["soak", "--examples", "3"], ["score"], ["quick"]):
        main([*command, "--record"])
    page = tmp_path / "docs" / "fuzzing.md"
    page.write_text(f"before\n{_figures.START}{_figures.END}after\n")
    main(["figures"])

    text = page.read_text()
    assert text.startswith("before\n<!-- figures -->\n\n| | goal")
    assert text.endswith("|\n\n<!-- end of figures -->\nafter\n")
    assert text.count("not measured") == 8  # by motifs, by tests, generic, shrink, coverage


def test_all_figures_are_measured_anew_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_quality, "RENEWED", ("firing remove_clones --examples 3",))
    page, before = tmp_path / "page.md", STAMP | {"fired": 1, "examples": 1, "met": 1, "never": []}
    page.write_text(_figures.START + _figures.END)
    row(tmp_path, "firing", "share of its own fuzz", **{next(iter(MOTIFS)): before})
    _record.FOLDER.mkdir(parents=True)
    (tmp_path / "firing.json").rename(_record.FOLDER / "firing.json")

    assert main(["figures", "--page", str(page)]) == 0
    assert page.read_text().count(_figures.OLDER) == 2  # firing has two rows
    assert main(["figures", "--page", str(page), "--renew"]) == 0

    assert list(_record.read(_record.FOLDER, "firing")) == ["remove_clones"]
    assert _figures.OLDER not in page.read_text()


def test_what_is_measured_anew_is_every_figure_but_generic_mistakes() -> None:
    options = [_quality._parser().parse_args(shlex.split(each)) for each in _quality.RENEWED]
    named = {name for figure in _figures.FIGURES for name in figure.recorded.split()}

    assert {_quality._figure(each) for each in options} == {
        name for name in named if not name.startswith("generic")
    }
