"""`python -m benchmarks compare`: what is measured when, what is kept, and what is told.

The suite of the small repository has samples that are drawn and not timed, so that no verdict
depends on the machine.
"""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from contextlib import contextmanager
from statistics import median
from subprocess import PIPE, STDOUT
from types import SimpleNamespace

import pytest

from benchmarks.compare import cells as _cells
from benchmarks.compare import command
from benchmarks.compare import rounds as _rounds
from benchmarks.compare.cells import Cell, NotObservedError, Observed
from benchmarks.compare.journal import Journal
from benchmarks.compare.rounds import AGAIN, BASE, NEW, Series, Sides, run_round
from benchmarks.compare.schedule import Schedule
from benchmarks.compare.tables import markdown, text
from benchmarks.compare.trees import ComparisonError
from benchmarks.compare.verdicts import Change, Looks, flagged, verdict
from tests.quality.verdicts import Setting, simulate
from tests.quality.verdicts import rounds as drawn
from tests.repository import committed, git, processes, project, table, wait_for

SUITE = '''
import os, random, time

def measured(name):
    from optimizer import MEASURED
    return MEASURED[name]

class Toy:
    """Ten samples a process; processes differ by 0.4 %."""
    params = [["steady", "cold", "other"]]
    param_names = ["kind"]
    unit = "seconds"

    def track_latency(self, kind):
        centre = measured(kind) * (1 + 0.004 * random.Random(os.urandom(8)).gauss(0, 1))
        samples = [centre * (1 + 0.001 * place) for place in range(10)]
        if kind == "cold":
            samples[0] *= 30
        return {"samples": samples, "number": 1}

def track_memory():
    return measured("memory")

def track_fired():
    return measured("fired")

track_fired.less_is_better = False

def track_asleep():
    time.sleep(600 if measured("sleeps") else 0)
    return 1

class Elsewhere:
    def setup(self):
        raise NotImplementedError("no such device")

    def track_speed(self):
        return 1
'''
CACHED = """
def setup_cache():
    from optimizer import MEASURED
    return MEASURED

def track_nodes(cache):
    return cache["nodes"]
"""
KINDS = ("steady", "cold", "other")
BEFORE = dict.fromkeys(KINDS, 0.01) | {"memory": 4096, "fired": 3, "nodes": 7, "sleeps": 0}
STEADY, COLD, _ = (f"toy.Toy.track_latency({kind})" for kind in KINDS)
DECLARED = "HEAD HEAD --declared declared.toml"
COMMAND = [sys.executable, "-m", "benchmarks.compare.command"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A project with the suite above, without the pages, which need more than asv."""
    folder = project(tmp_path_factory.mktemp("project"), toy=SUITE, toy_graph=CACHED)
    settings = folder / "asv.conf.json"
    settings.write_text(settings.read_text().replace(', ".benchmarks.plugins.dashboard"', ""))
    commit(folder, "before")
    return folder


def commit(folder, name, code="", whole=True, **changes):
    """Write a version of the project in which some numbers are others, and commit it."""
    module = folder / "optimizer" / "__init__.py"
    module.write_text(f"MEASURED = {BEFORE | changes}\n{code}")
    return whole and committed(folder, name)


def compared(folder, *arguments):
    """The exit code, the verdicts by cell, and all that was printed."""
    file = folder / ".asv" / "verdicts.json"
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    asked = [*COMMAND, *arguments, "--rounds", "5", "--json", str(file)]
    done = subprocess.run(asked, cwd=folder, stdout=PIPE, stderr=STDOUT, text=True)
    found = json.loads(file.read_text())["verdicts"] if file.exists() else []
    return done.returncode, {each["name"]: each for each in found}, done.stdout


BETTER, WORSE = {"steady": 0.0095, "fired": 4, "nodes": 8}, {"steady": 0.0105, "cold": 0.0147}
IMPROVED = {STEADY: "improved", "toy.track_fired": "improved", "toy_graph.track_nodes": "intended"}
REGRESSED = dict.fromkeys([STEADY, COLD, "toy.track_memory"], "regressed")
FAILS = "from . import more; del MEASURED['fired']"


@pytest.mark.integration
@table(
    "new changes code expected",
    ("HEAD", {}, "# a comment", {}),
    ("HEAD", BETTER, "from . import more", IMPROVED),
    (".", WORSE | {"memory": 8192}, FAILS, REGRESSED | {"toy.track_fired": "failed"}),
)
def test_planted_changes_are_told_and_nothing_else(repository, new, changes, code, expected):
    file, more = repository / "declared.toml", repository / "optimizer" / "more.py"
    told = "[[change]]\ncells='{}'\nreason='worth it'\n"
    file.write_text(told.format("memory"))  # of an earlier change
    more.unlink(missing_ok=True)
    before = commit(repository, "before")
    file.write_text(told.format("memory") + told.format("nodes"))
    more.touch()
    commit(repository, "after", code, new == "HEAD", **changes)
    status_before = git(repository, "status", "--short")
    arguments = (before, new, "-b", "toy", "--declared", file.name)
    status, found, output = compared(repository, *arguments)
    usual = dict.fromkeys(found, "same") | {"toy.Elsewhere.track_speed": "not compared"}

    assert {name: each["verdict"] for name, each in found.items()} == usual | expected, output
    assert len(found) == 8
    assert f"{found[STEADY]['metric']}({found[STEADY]['kind']})" == STEADY
    assert status == bool({"regressed", "failed"} & set(expected.values()))
    assert found["toy.Elsewhere.track_speed"]["reason"].endswith("no such device')")
    assert ("worth it" in output) is ("intended" in expected.values())
    assert git(repository, "status", "--short") == status_before


@pytest.mark.integration
@table(
    "code bench status expected said",
    ("import nowhere", "^toy.*(memory|latency)", 1, "failed", "No module named 'nowhere'"),
    ("", "Elsewhere", 2, "not compared", "nothing could be compared"),
)
def test_where_no_cell_can_be_compared_it_says_why(repository, code, bench, status, expected, said):
    before, after = commit(repository, "before"), commit(repository, "after", code)
    found, verdicts, output = compared(repository, before, after, "-b", bench)
    assert found == status
    assert {each["verdict"] for each in verdicts.values()} == {expected}
    assert said in output


@pytest.mark.integration
def test_a_run_that_is_ended_leaves_no_process_and_is_resumed(repository):
    base = commit(repository, "before", sleeps=1)
    arguments = ["HEAD", "HEAD", "-b", "memory", "-b", "asleep"]
    asked = [*COMMAND, *arguments]
    running = subprocess.Popen(asked, cwd=repository, stdout=PIPE, stderr=STDOUT, text=True)
    journal = repository / ".asv" / "compare" / f"{base[:12]}-{base[:12]}.jsonl"
    wait_for(lambda: journal.exists() and "track_memory" in journal.read_text())
    servers = ("-A", "run_server", str(repository))
    asleep = processes(*servers)
    running.terminate()
    output, _ = running.communicate(timeout=20)
    left = processes(*servers)
    again = compared(repository, *arguments, "--resume", "--minutes", "0.001")[1]

    assert running.returncode == 2
    assert "1 not compared, 1 same" in output
    assert asleep
    assert not left
    assert json.loads(journal.read_text().splitlines()[1])["cell"] == "toy.track_memory"
    assert again["toy.track_memory"]["verdict"] == "same"
    assert again["toy.track_asleep"]["verdict"] == "not compared"


@table(
    "arguments declared said",
    ("HEAD no-such-branch", None, "there is no commit 'no-such-branch' here"),
    ("HEAD HEAD -b nothing", None, "no benchmark matches 'nothing'"),
    ("HEAD HEAD -b toy --resume", None, "there is nothing to resume"),
    ("HEAD HEAD --rounds 3", None, "fewer than 4 tell nothing"),
    ("HEAD HEAD --minutes 0", None, "--minutes is 0.0: name a time above 0."),
    ("HEAD HEAD --minutes nan", None, "--minutes is nan: name a time above 0."),
    ("HEAD HEAD --json no/such/folder.json", None, "there is no folder"),
    (DECLARED, None, "has no file declared.toml"),
    (DECLARED, "[[change", "declared.toml cannot be read"),
    (DECLARED, "[[change]]\ncells = 'a'", "cannot be read ('reason')"),
    (DECLARED, "[[change]]\ncells = 'a'\nreason = ' '", "no reason for a"),
    (DECLARED, "[[change]]\ncells = '('\nreason = 'b'", "declared.toml cannot be read"),
    (DECLARED, "change = 3", "declared.toml cannot be read"),
)
def test_what_cannot_be_compared_is_told_in_a_sentence(
    repository, monkeypatch, capfd, arguments, declared, said
):
    file = repository / "declared.toml"
    file.unlink(missing_ok=True) if declared is None else file.write_text(declared)
    commit(repository, "after")
    monkeypatch.chdir(repository)
    monkeypatch.setattr(_cells, "_less_is_better", lambda name: True)
    with pytest.raises(SystemExit, match="2"):
        sys.exit(command.main(arguments.split()))

    assert said in "".join(capfd.readouterr())


def cell(name, kind="time", less_is_better=True):
    about = {"type": kind}
    return Cell(name, less_is_better=less_is_better, unit="seconds", index=None, benchmark=about)


def rounds(draw, change=0.0, spread=0.01, count=8):
    """Numbers of one cell: processes differ by `spread`, and the machine drifts by 3 %."""
    return drawn(draw, Setting(change, noise=spread), count)


def series(found, **options):
    return Series(cell("toy"), found, **options)


def timed(seed, *change, **options):
    return series(rounds(random.Random(seed), *change, **options))


def exact(*found, **less_is_better):
    return Series(cell("toy", **less_is_better), [*found], exact=True)


def same(value):
    return dict.fromkeys((BASE, AGAIN, NEW), value)


STILL, MORE = same(4), same(4) | {NEW: 5}
FAILING = {"missing": same("it broke"), "failed": {NEW}}
NEITHER = {"less_is_better": None}
LARGE_AT_ONCE = [same(1.0) | {NEW: 1.6 if place % 2 else 0.8} for place in range(8)]
UNSTABLE = "it differs from process to process"
SHAKY = [same(1.0) | {BASE: math.exp(way), AGAIN: math.exp(-way), NEW: 1.05}
         for way in (0.2, -0.2) * 4]  # fmt: skip
NO_NOISE = series([same(1.0) | {NEW: 1.1}] * 4)
VERDICTS = {
    "confirmed": (timed(6, 0.3), timed(60, 0.1), "regressed", ""),
    "faster": (timed(10, -0.2), timed(11, -0.2), "improved", ""),
    "without any noise": (NO_NOISE, NO_NOISE, "regressed", ""),
    "not again": (timed(5, 0.2), timed(50), "inconclusive", ""),
    "the other way": (timed(10, 0.2, 0.001), timed(11, -0.2, 0.001), "inconclusive", ""),
    "too small again": (timed(10, 0.2, 0.001), timed(11, 0.01, 0.001), "inconclusive", ""),
    "one large round": (timed(11, 0.2), series(LARGE_AT_ONCE), "inconclusive", ""),
    "too small": (timed(13, 0.01, 0.002), None, "same", ""),
    "not measured again": (timed(13, 0.03, 0.002), series([]), "inconclusive", ""),
    "too noisy": (timed(2, 0.0, 0.3), None, "inconclusive", ""),
    "the base against itself": (series(SHAKY), None, "inconclusive", ""),
    "unstable": (exact(MORE, same(4) | {AGAIN: 6, NEW: 5}), None, "inconclusive", UNSTABLE),
    "unstable now": (exact(MORE, same(4) | {NEW: 6}), None, "inconclusive", UNSTABLE),
    "failing as before": (series([], **FAILING), None, "not compared", "it broke"),
    "no logarithm": (series([same(0.0)] * 4), None, "not compared", "a number is not positive"),
    "too few": (timed(0, count=3), None, "not compared", "3 of 4 rounds were reached"),
    "none": (series([]), None, "not compared", "it was not reached"),
    "neither better": (exact(MORE, MORE, **NEITHER), None, "changed", ""),
    "neither changed": (exact({BASE: 4, NEW: 4}, **NEITHER), None, "same", ""),
}


@pytest.mark.parametrize("kind", VERDICTS)
def test_what_is_said_of_rounds_and_of_which_the_change_is(kind):
    """The first rounds were chosen for being large: what the second confirm is of these alone."""
    first, again, expected, reason = VERDICTS[kind]
    found = verdict(first, again)
    assert (found.verdict, found.reason) == (expected, reason)
    assert bool(flagged([first])) is (again is not None)
    if again is not None:
        before = first.rounds * (expected == "inconclusive")
        assert found.change == Change.of([*before, *again.rounds])


def test_the_interval_holds_the_truth_as_often_as_it_says():
    draw = random.Random(3)
    found = [Change.of(rounds(draw, 0.04)) for _ in range(400)]
    assert 367 <= sum(change.low <= 1.04 <= change.high for change in found) <= 391


@pytest.mark.parametrize("cells", [1, 50])
def test_the_smallest_visible_change_is_told_in_four_of_five(cells):
    draw, looks = random.Random(4), Looks(cells, 1)
    visible = median(Change.of(rounds(draw)).visible(looks) for _ in range(100))
    assert 0.02 < visible < 0.04
    assert 12 <= simulate(Setting(visible, cells=cells), runs=20).said["regressed"] <= 19


@table(
    "setting least",
    (Setting(0.03), 15),
    (Setting(0.05, spiked=0.1), 14),
    (Setting(), 0),
    (Setting(noise=0.03), 0),
    (Setting(spiked=0.1), 0),
    (Setting(noise=0.005, noisier=3), 0),
)
def test_one_change_among_many_cells_is_told_and_hardly_any_that_is_none(setting, least):
    found = simulate(setting, runs=17)
    assert found.said["regressed"] >= least
    assert not found.false


def test_second_rounds_confirm_the_more_strictly_the_more_cells_they_have():
    draw = random.Random(14)
    first, again = series(rounds(draw, 0.2)), series(rounds(draw, 0.03))
    chance = Change.of(again.rounds).chance
    said = [verdict(first, again, Looks(1, many)).verdict for many in (1, int(0.06 / chance))]
    assert said == ["regressed", "inconclusive"]


def test_of_many_cells_few_are_measured_again_for_nothing():
    """At one in a hundred for each, ten of these thousand would be."""
    draw = random.Random(9)
    assert len(flagged([series(rounds(draw, spread=0.05)) for _ in range(1000)])) <= 2


def test_one_exact_round_is_enough_where_nothing_changed_and_four_where_something_did():
    assert exact(STILL).is_done
    assert not exact(*[MORE] * 3).is_done
    assert exact(*[MORE] * 4).is_done
    assert not series([STILL]).is_done


@pytest.mark.parametrize("write", [text, lambda verdicts: markdown(verdicts, "title")])
def test_the_tables_begin_with_what_matters_and_the_text_leaves_out_exact_ones(write):
    slow = verdict(timed(7, 0.2), timed(8, 0.2))
    _, _, table = write([verdict(timed(9)), slow]).partition("verdict")
    assert 0 < table.index("regressed") < table.index("same")
    told = write([verdict(exact(STILL)), verdict(exact(MORE))])
    assert "regressed" in told
    assert ("same" in told) is (write is not text)


@table(
    "error said",
    (KeyboardInterrupt(), "interrupted; what is whole follows, --resume goes on"),
    (OSError(28, "No space left on device"), "interrupted: [Errno 28] No space left on device"),
)
def test_an_interruption_keeps_the_rounds_that_are_whole(
    error, said, repository, tmp_path, monkeypatch, capsys
):
    draw, params = random.Random(8), {"model": "resnet18"}

    def run_round(several, *_):
        if len(several[0].rounds) == 5:
            raise error
        for each in several:
            each.rounds += rounds(draw, count=1, spread=0.3)

    monkeypatch.chdir(repository)
    monkeypatch.setattr(command, "run_round", run_round)
    toy = Cell("toy.time(resnet18)", True, "seconds", 0, {"type": "time"}, params)
    monkeypatch.setattr(command, "cells", lambda *_: [toy])
    file = tmp_path / "verdicts.json"
    status = command.main(["HEAD", "HEAD", "--json", str(file)])
    (found,) = json.loads(file.read_text())["verdicts"]

    assert (status, found["metric"], found["verdict"]) == (2, "toy.time", "inconclusive")
    assert found == found | params
    assert found["change"]["low"] < found["change"]["ratio"] < found["change"]["high"]
    out, err = capsys.readouterr()
    assert "a quieter machine tell what is inconclusive" in out
    assert said in err


NOISY, CHANGING = Setting(noise=0.2), Setting(0.1, noise=0.002)
EARLIER = drawn(random.Random(1), CHANGING, 8)
ORDERS = {
    # settings of cells by name, the cells' kind, earlier rounds, minutes; how often each is
    # measured first and again
    "short of time": ({}, "time", [[]] * 20, 0.7, [4] * 8 + [2] + [1] * 7 + [0] * 4, {}),
    "what is not settled goes on": ({"1": NOISY}, "time", [[]] * 3, 10, [4, 8, 4], {}),
    "what may have changed": ({"2": CHANGING}, "time", [[]] * 3, 10, [4, 4, 8], {"2": 8}),
    "undecided": (dict.fromkeys("01234", NOISY), "time", [[]] * 5, 0.6, [8, 7, 7, 7, 6], {}),
    "numbers share one round": ({}, "track", [[]] * 20, 0.5, [3] + [2] * 8 + [1] * 11, {}),
    "rounds of an earlier run": ({"0": CHANGING}, "time", [EARLIER], 10, [8], {"0": 8}),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_what_is_measured_how_often_where_each_round_takes_a_second(kind, monkeypatch):
    settings, of_kind, earlier, minutes, first, second = ORDERS[kind]
    draw, now = random.Random(0), [0.0]
    several = [Series(cell(str(at), of_kind), [*each]) for at, each in enumerate(earlier)]
    again = [Series(each.cell, each.rounds[:6]) for each in several if each.rounds]
    found = Schedule(several, again, rounds=8, minutes=minutes, started=0.0)
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def measure(several, has_time):
        for series in several:
            if not has_time():
                return
            found.begin(series)
            setting = settings.get(series.cell.name, Setting(noise=0.002))
            series.rounds += drawn(draw, setting, 1)
            now[0] += 1

    found.run(measure)
    known = 14 * bool(earlier[0])
    assert now[0] == sum(first) + sum(second.values()) - known
    assert [len(each.rounds) for each in found.first] == first
    assert {each.cell.name: len(each.rounds) for each in found.second} == second
    reached = f"{sum(each >= 4 for each in first)} of {len(first)} reached"
    told = rf"{reached}.*: \d+; until \d\d:\d\d:\d\d at the latest"
    assert re.fullmatch(told, found.line())


FLAKE, ABSENT = NotObservedError("it was killed", failed=True), NotObservedError("", failed=False)
DIFFER = {BASE: 4, AGAIN: 5, NEW: 6}
ONE_ROUND = {
    # what processes find of the base, of it again, which is asked next, and of the new version;
    # and what comes of it
    "exact and the same": (4, 4, 4, [{BASE: 4, NEW: 4}], {}, 2),
    "exact and not the same": (4, 5, 6, [DIFFER], {}, 3),
    "failed once": (4, 4, [FLAKE, 5], [MORE], {}, 4),
    "failed twice": (4, 4, [FLAKE, FLAKE], [], {NEW: "it was killed"}, 4),
    "not for this machine": (ABSENT, ABSENT, ABSENT, [], same(""), 3),
    "no time": (4, 4, 4, [], {}, 0),
}


@pytest.mark.parametrize("kind", ONE_ROUND)
def test_a_round_tries_once_more_what_fails_and_looks_again_at_a_base_that_differs(
    monkeypatch, kind
):
    *found, expected, missing, count = ONE_ROUND[kind]
    several, asked, told = [Series(cell("toy"))], [], []
    found = {role: iter([each] if not isinstance(each, list) else each)
             for role, each in zip((BASE, AGAIN, NEW), found, strict=True)}  # fmt: skip

    def observe(cell, tree, role):
        asked.append(role)
        seen = next(found[role])
        if isinstance(seen, Exception):
            raise seen
        return Observed(seen, exact=True)

    @contextmanager
    def servers(self):
        yield {role: role for role in (BASE, AGAIN, NEW)}

    monkeypatch.setattr(_rounds, "observe", observe)
    monkeypatch.setattr(Sides, "servers", servers)
    sides = Sides(SimpleNamespace(), SimpleNamespace())
    has_time = lambda: kind != "no time"  # noqa: E731
    run_round(several, sides, random.Random(4), has_time, told.append, told.append)

    (series,) = several
    assert (series.rounds, series.missing, len(asked)) == (expected, missing, count)
    assert series.failed == ({NEW} if "killed" in missing.get(NEW, "") else set())
    assert told == several * 2 * has_time()


ABOUT = {"base": "a", "new": "b", "machine": "here"}
BEGUN, A, B = json.dumps(ABOUT) + "\n", cell("a"), cell("b")
ROUND = '{"cell": "a", "again": false, "exact": true, "round": {"base": %s}}\n'


@pytest.fixture
def journal(tmp_path):
    found = Journal(tmp_path / "new" / "rounds.jsonl", ABOUT)
    found.begin()
    return found


def test_what_the_journal_keeps_is_taken_up_again(journal):
    failing = {"missing": {NEW: "it broke"}, "failed": {NEW}}
    for place in (1, 2):
        journal.keep(Series(A, [MORE] * place), again=False)
    journal.keep(Series(A, [MORE]), again=True)
    journal.keep(Series(B, [], exact=True, **failing), again=False)
    with journal.path.open("a") as file:
        file.write('{"cell": "a", "aga')  # which was not finished
    kept = [Series(B, exact=True, **failing), Series(A, [MORE, MORE]), Series(cell("c"))]

    assert journal.resume([B, A, cell("c")]) == (kept, [Series(A, [MORE])])
    journal.keep(Series(A, [MORE]), again=True)
    assert journal.resume([A])[1] == [Series(A, [MORE, MORE])]
    journal.begin()
    assert journal.resume([A]) == ([Series(A)], [])


@table(
    "content said",
    ("", "cannot be read"),
    ("nothing\n", "cannot be read"),
    ("[]\n", "is of [], and not of"),
    (json.dumps(ABOUT | {"machine": "elsewhere"}) + "\n", "and not of"),
    (BEGUN + '{"cell": "a"}\n', "cannot be read ('again')"),
    (BEGUN + "3\n", "cannot be read"),
    (BEGUN + ROUND % "NaN", "NaN is no number that was measured"),
    (BEGUN + ROUND % "1e999", "not finite"),
)
def test_what_cannot_be_resumed_is_told_and_stays_as_it_is(journal, content, said):
    journal.path.write_text(content)
    with pytest.raises(ComparisonError, match=r"leave --resume out") as told:
        journal.resume([A])
    assert said in str(told.value)
    assert journal.path.read_text() == content


def test_where_the_journal_cannot_be_written_the_rest_goes_on(tmp_path):
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file" / "rounds.jsonl", ABOUT)
    journal.begin()
    journal.keep(Series(A, [MORE]), again=False)
    assert journal.trouble.startswith("the rounds cannot be kept in")


@pytest.mark.parametrize("said", ["Process exited with 1", "Interrupted."])
def test_a_server_that_ends_is_a_failure_and_ctrl_c_is_none(monkeypatch, said):
    def ended(*_, **__):
        raise _cells.util.UserError(said)

    monkeypatch.setattr(_cells.runner, "run_benchmark", ended)
    with pytest.raises((NotObservedError, KeyboardInterrupt)) as caught:
        _cells.observe(cell("one"), SimpleNamespace(cache_for=lambda *_: None), None)

    assert isinstance(caught.value, NotObservedError) == (said != "Interrupted.")
    assert getattr(caught.value, "failed", True)
