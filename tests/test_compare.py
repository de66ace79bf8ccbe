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

from benchmarks._git import git as git_here
from benchmarks.compare import cells as _cells
from benchmarks.compare import command
from benchmarks.compare import rounds as _rounds
from benchmarks.compare.cells import Cell, NotObservedError, Observed
from benchmarks.compare.journal import Journal
from benchmarks.compare.rounds import AGAIN, BASE, NEW, Series, Sides, run_round
from benchmarks.compare.schedule import Schedule
from benchmarks.compare.tables import as_json, markdown, text
from benchmarks.compare.trees import ComparisonError
from benchmarks.compare.verdicts import Change, Looks, flagged, verdict
from tests.quality import alarms
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
class TestPlantedChanges:
    @table(
        "new changes code expected",
        ("HEAD", {}, "# a comment", {}),
        ("HEAD", BETTER, "from . import more", IMPROVED),
        (".", WORSE | {"memory": 8192}, FAILS, REGRESSED | {"toy.track_fired": "failed"}),
    )
    def test_each_is_told_and_nothing_else(self, repository, new, changes, code, expected):
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

    @table(
        "code bench status expected said",
        ("import nowhere", "^toy.*(memory|latency)", 1, "failed", "No module named 'nowhere'"),
        ("", "Elsewhere", 2, "not compared", "nothing could be compared"),
    )
    def test_where_no_cell_can_be_compared(self, repository, code, bench, status, expected, said):
        before, after = commit(repository, "before"), commit(repository, "after", code)
        found, verdicts, output = compared(repository, before, after, "-b", bench)
        assert found == status
        assert {each["verdict"] for each in verdicts.values()} == {expected}
        assert said in output

    def test_a_run_that_is_ended_leaves_no_process_and_is_resumed(self, repository):
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


def told(draw, *change):
    """The verdict of the two stages, for one cell by itself."""
    first = series(rounds(draw, *change))
    again = series(rounds(draw, *change)) if flagged([first]) else None
    return verdict(first, again).verdict


def same(value):
    return dict.fromkeys((BASE, AGAIN, NEW), value)


STILL, MORE = same(4), same(4) | {NEW: 5}
FAILING = {"missing": same("it broke"), "failed": {NEW}}
NEITHER = {"less_is_better": None}
LARGE_AT_ONCE = [same(1.0) | {NEW: 1.6 if place % 2 else 0.8} for place in range(8)]
UNSTABLE = "it differs from process to process"
VERDICTS = {
    "not again": (timed(5, 0.2), timed(50), "inconclusive", ""),
    "the other way": (timed(10, 0.2, 0.001), timed(11, -0.2, 0.001), "inconclusive", ""),
    "too small again": (timed(10, 0.2, 0.001), timed(11, 0.01, 0.001), "inconclusive", ""),
    "one large round": (timed(11, 0.2), series(LARGE_AT_ONCE), "inconclusive", ""),
    "too noisy": (timed(2, 0.0, 0.3), None, "inconclusive", ""),
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
def test_what_is_said_of_rounds(kind):
    first, again, expected, reason = VERDICTS[kind]
    found = verdict(first, again)
    assert (found.verdict, found.reason) == (expected, reason)
    assert bool(flagged([first])) is (again is not None)
    if again is not None:
        assert found.change == Change.of([*first.rounds, *again.rounds])


class TestTheStatistics:
    @pytest.mark.parametrize(("change", "power"), [(0.05, 0.95), (-0.10, 0.99)])
    def test_a_change_is_nearly_always_seen(self, change, power):
        draw = random.Random(1)
        wanted = "regressed" if change > 0 else "improved"
        assert sum(told(draw, change) == wanted for _ in range(100)) >= power * 100

    def test_the_interval_holds_the_truth_as_often_as_it_says(self):
        draw = random.Random(3)
        found = [Change.of(rounds(draw, 0.04)) for _ in range(400)]
        assert 367 <= sum(change.low <= 1.04 <= change.high for change in found) <= 391

    @pytest.mark.parametrize("cells", [1, 50])
    def test_the_smallest_visible_change_is_told_in_four_of_five(self, cells):
        draw, looks = random.Random(4), Looks(cells, 1)
        visible = median(Change.of(rounds(draw)).visible(looks) for _ in range(100))
        said = simulate(Setting(visible, cells=cells), runs=20).said
        assert 0.02 < visible < 0.04
        assert 12 <= said["regressed"] <= 19

    def test_among_more_cells_only_larger_changes_are_visible(self):
        change = Change.of(rounds(random.Random(4), spread=0.02))
        looks = [Looks(1), Looks(50), Looks(50, 10), Looks(300, 10)]
        seen = [change.visible(each) for each in looks]
        assert seen == sorted(set(seen))

    @table(
        "setting least",
        (Setting(0.03), 15),
        (Setting(0.05, spiked=0.1), 14),
        (Setting(), 0),
        (Setting(noise=0.03), 0),
        (Setting(spiked=0.1), 0),
        (Setting(noise=0.005, noisier=3), 0),
    )
    def test_one_change_among_many_cells_is_told_and_hardly_any_that_is_none(self, setting, least):
        found = simulate(setting, runs=17)
        assert found.said["regressed"] >= least
        assert not found.false

    @pytest.mark.parametrize(("change", "expected"), [(0.03, "inconclusive"), (0.01, "same")])
    def test_same_is_said_of_a_change_that_shows_where_it_is_too_small(self, change, expected):
        """The rounds are sure of both, but too few to confirm."""
        found = verdict(timed(13, change, 0.002))
        assert found.verdict == expected
        assert 1 < found.change.low < found.change.high < 1.05

    def test_second_rounds_confirm_the_more_strictly_the_more_cells_they_have(self):
        draw = random.Random(14)
        first, again = series(rounds(draw, 0.2)), series(rounds(draw, 0.03))
        chance = Change.of(again.rounds).chance
        said = [verdict(first, again, Looks(1, many)).verdict for many in (1, int(0.06 / chance))]
        assert said == ["regressed", "inconclusive"]

    @pytest.mark.parametrize("role", [BASE, NEW])
    def test_a_spike_weighs_nothing(self, role):
        found = rounds(random.Random(15), 0.05)
        spiked = [each | {role: each[role] * (1.5 if at in (2, 5) else 1)}
                  for at, each in enumerate(found)]  # fmt: skip
        assert Change.of(spiked).ratio == pytest.approx(Change.of(found).ratio, abs=0.01)
        assert Change.of(spiked).low > 1.03

    def test_without_any_noise_the_change_is_what_it_is(self):
        change = Change.of([{BASE: 1.0, AGAIN: 1.0, NEW: 1.1}] * 4)
        assert (change.ratio, change.low, change.high) == pytest.approx((1.1, 1.1, 1.1))
        assert change.counts
        assert change.visible(Looks()) == pytest.approx(0.02)

    def test_of_many_cells_few_are_measured_again_for_nothing(self):
        """At one in a hundred for each, ten of these thousand would be."""
        draw = random.Random(9)
        assert len(flagged([series(rounds(draw, spread=0.05)) for _ in range(1000)])) <= 2

    def test_what_the_base_shows_against_itself_is_no_change(self):
        up, down = math.exp(0.2), math.exp(-0.2)
        found = [{BASE: first, AGAIN: second, NEW: 1.05}
                 for first, second in ((up, down), (down, up)) * 4]  # fmt: skip
        change = Change.of(found)
        assert not flagged([series(found)])
        assert change.low < 0.95 < 1.15 < change.high

    def test_the_change_that_is_told_is_of_the_second_rounds(self):
        """The first were chosen for being large."""
        found = verdict(timed(6, 0.3), timed(60, 0.1))
        assert found.verdict == "regressed"
        assert found.change.ratio == pytest.approx(1.1, abs=0.03)


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


def test_json_names_everything_of_a_cell():
    params = {"model": "resnet18", "variant": "eager"}
    cell = Cell("cpu.Latency.time_forward(resnet18, eager)", True, "seconds", 0, {}, params)
    found = verdict(Series(cell, timed(7).rounds))
    (told,) = json.loads(as_json([found], {}))["verdicts"]
    expected = {"metric": "cpu.Latency.time_forward", "verdict": "same", **params}
    assert told == told | expected
    assert told["change"]["low"] < told["change"]["ratio"] < told["change"]["high"]


def test_a_line_says_what_is_reached_and_measured():
    schedule = Schedule([series([]), series([])], [], 8, minutes=1.0)
    schedule.begin(series([]))
    told = r"0 of 2 reached: toy; until \d\d:\d\d:\d\d at the latest"
    assert re.fullmatch(told, schedule.line())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "interrupted; what is whole follows, --resume goes on"),
        (OSError(28, "No space left on device"), "interrupted: [Errno 28] No space left on device"),
    ],
    ids=["Ctrl-C", "a full disk"],
)
def test_an_interruption_keeps_the_rounds_that_are_whole(
    error, said, repository, tmp_path, monkeypatch, capsys
):
    draw = random.Random(8)

    def run_round(several, *_):
        if len(several[0].rounds) == 5:
            raise error
        for each in several:
            each.rounds += rounds(draw, count=1, spread=0.3)

    monkeypatch.chdir(repository)
    monkeypatch.setattr(command, "run_round", run_round)
    monkeypatch.setattr(command, "cells", lambda *_: [cell("toy")])
    file = tmp_path / "verdicts.json"
    status = command.main(["HEAD", "HEAD", "--json", str(file)])
    (found,) = json.loads(file.read_text())["verdicts"]

    assert (status, found["verdict"]) == (2, "inconclusive")
    out, err = capsys.readouterr()
    assert "a quieter machine tell what is inconclusive" in out
    assert said in err


NOISY, CHANGING = Setting(noise=0.2), Setting(0.1, noise=0.002)
ORDERS = {
    # settings of cells by name, cells, minutes, and then their first rounds and second ones
    "short of time": ({}, 20, 0.7, [4] * 8 + [2] + [1] * 7 + [0] * 4, {}),
    "what is not settled goes on": ({"1": NOISY}, 3, 10, [4, 8, 4], {}),
    "what may have changed": ({"2": CHANGING}, 3, 10, [4, 4, 8], {"2": 8}),
    "undecided": (dict.fromkeys("01234", NOISY), 5, 0.6, [8, 7, 7, 7, 6], {}),
}


class Drawn:
    """Rounds whose numbers are drawn, of cells by name, and a clock that each moves by a second."""

    def __init__(self, monkeypatch, settings):
        self.settings, self.draw, self.now, self.order = settings, random.Random(0), 0.0, []
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def measure(self, several, has_time):
        for series in several:
            if not has_time():
                return
            setting = self.settings.get(series.cell.name, Setting(noise=0.002))
            series.rounds += drawn(self.draw, setting, 1)
            self.order.append(series.cell.name)
            self.now += 1

    def run(self, first, minutes=10, second=()):
        schedule = Schedule(first, [*second], rounds=8, minutes=minutes, started=self.now)
        schedule.run(self.measure)
        return schedule


def many(count, kind="time"):
    return [Series(cell(str(place), kind)) for place in range(count)]


@pytest.mark.parametrize("kind", ORDERS)
def test_what_is_measured_how_often(kind, monkeypatch):
    settings, cells, minutes, first, second = ORDERS[kind]
    found = Drawn(monkeypatch, settings).run(many(cells), minutes)
    assert [len(each.rounds) for each in found.first] == first
    assert {each.cell.name: len(each.rounds) for each in found.second} == second


def test_numbers_that_are_not_timed_share_one_round(monkeypatch):
    run = Drawn(monkeypatch, {})
    run.run(many(20, "track"))
    assert run.order[:20] == [str(place) for place in range(20)]


def test_rounds_of_an_earlier_run_are_not_measured_again(monkeypatch):
    before = drawn(random.Random(1), CHANGING, 8)
    run = Drawn(monkeypatch, {"0": CHANGING})
    found = run.run([Series(cell("0"), before)], second=[Series(cell("0"), before[:6])])
    assert len(run.order) == 2
    assert len(found.second[0].rounds) == 8


def one_round(monkeypatch, seed=0, **found):
    """A cell after a round in which processes find this, and who was asked."""
    asked, series = [], Series(cell("toy"))

    def observe(cell, tree, server):
        asked.append(server)
        told = found[server].pop(0) if isinstance(found[server], list) else found[server]
        if isinstance(told, Exception):
            raise told
        return Observed(told, exact=True)

    monkeypatch.setattr(_rounds, "observe", observe)
    measure(monkeypatch, [series], random.Random(seed), lambda: True, lambda s: None)
    return series, asked


def measure(monkeypatch, several, draw, has_time, tell):
    @contextmanager
    def servers(self):
        yield {BASE: "base", AGAIN: "again", NEW: "new"}

    monkeypatch.setattr(Sides, "servers", servers)
    run_round(several, Sides(SimpleNamespace(), SimpleNamespace()), draw, has_time, tell, tell)


FLAKE, ABSENT = NotObservedError("it was killed", failed=True), NotObservedError("", failed=False)


class TestARound:
    @pytest.mark.parametrize("seed", range(6))
    def test_exact_numbers_need_a_second_look_at_the_base_where_they_differ(
        self, monkeypatch, seed
    ):
        series, asked = one_round(monkeypatch, seed, base=4, again=4, new=4)
        assert series.is_done
        assert len(asked) == (3 if asked[0] == "again" else 2)
        series, _ = one_round(monkeypatch, seed, base=4, again=5, new=6)
        assert series.rounds == [{BASE: 4, AGAIN: 5, NEW: 6}]

    @table(
        "base again new expected missing asked",
        (4, 4, [FLAKE, 5], [MORE], {}, 4),
        (4, 4, [FLAKE, FLAKE], [], {NEW: "it was killed"}, 4),
        (ABSENT, ABSENT, ABSENT, [], same(""), 3),
    )
    def test_what_fails_is_tried_once_more(
        self, monkeypatch, base, again, new, expected, missing, asked
    ):
        series, found = one_round(monkeypatch, base=base, again=again, new=new)
        assert (series.rounds, series.missing, len(found)) == (expected, missing, asked)
        assert series.failed == ({NEW} if "killed" in missing.get(NEW, "") else set())

    def test_no_cell_begins_when_the_time_is_over(self, monkeypatch):
        told = []
        measure(monkeypatch, many(3), random.Random(0), lambda: False, told.append)
        assert not told


ABOUT = {"base": "a", "new": "b", "machine": "here"}
BEGUN, A, B = json.dumps(ABOUT) + "\n", cell("a"), cell("b")
ROUND = '{"cell": "a", "again": false, "exact": true, "round": {"base": %s}}\n'


@pytest.fixture
def journal(tmp_path):
    found = Journal(tmp_path / "new" / "rounds.jsonl", ABOUT)
    found.begin()
    return found


class TestTheJournal:
    def test_what_it_keeps_is_taken_up_again(self, journal):
        failing = {"missing": {NEW: "it broke"}, "failed": {NEW}}
        for place in (1, 2):
            journal.keep(Series(A, [MORE] * place), again=False)
        journal.keep(Series(A, [MORE]), again=True)
        journal.keep(Series(B, [], exact=True, **failing), again=False)
        first, second = journal.resume([B, A, cell("c")])

        kept = [Series(B, exact=True, **failing), Series(A, [MORE, MORE]), Series(cell("c"))]
        assert first == kept
        assert second == [Series(A, [MORE])]

    def test_a_line_that_was_not_finished_is_dropped_and_a_new_run_begins_anew(self, journal):
        for count in (1, 2):
            journal.keep(Series(A, [MORE]), again=False)
            with journal.path.open("a") as file:
                file.write('{"cell": "a", "aga')
            assert journal.resume([A])[0][0].rounds == [MORE] * count
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
    def test_what_cannot_be_resumed_is_told_and_stays_as_it_is(self, journal, content, said):
        journal.path.write_text(content)
        with pytest.raises(ComparisonError, match=r"leave --resume out") as told:
            journal.resume([A])
        assert said in str(told.value)
        assert journal.path.read_text() == content

    def test_where_it_cannot_be_written_the_rest_goes_on(self, tmp_path):
        (tmp_path / "file").touch()
        journal = Journal(tmp_path / "file" / "rounds.jsonl", ABOUT)
        journal.begin()
        journal.keep(Series(A, [MORE]), again=False)
        assert journal.trouble.startswith("the rounds cannot be kept in")


def test_what_compare_is_tried_on_is_head_with_a_change_and_nothing_here_changes():
    before = git_here("status", "--porcelain")
    made = alarms.planted(alarms.PLANTED[0])
    assert git_here("diff", "--name-only", "HEAD", made) == "optimizer/__init__.py"
    compile(git_here("show", f"{made}:optimizer/__init__.py"), "planted", "exec")
    assert git_here("status", "--porcelain") == before
    assert alarms.planted(alarms.PLANTED[0]) == made


@pytest.mark.parametrize(("right", "told"), [("", 0), ("regressed", 2)])
def test_an_alarm_is_false_unless_it_was_planted(right, told):
    said = [{"verdict": each} for each in ("regressed", "regressed", "improved", "not compared")]
    expected = {"reached": 3, "told": told, "undecided": 0, "false": 3 - told}
    assert alarms.counts(said, right=right) == expected


def test_comparisons_are_kept_as_they_end_and_not_made_again(monkeypatch, tmp_path, capsys):
    made = []

    def compared(new, seed, *rest):
        made.append(new)
        if len(made) == 3:
            raise KeyboardInterrupt
        return [{"verdict": "regressed" if new == "planted" else "same"}]

    monkeypatch.setattr(alarms, "compared", compared)
    monkeypatch.setattr(alarms, "planted", lambda change: "planted")
    monkeypatch.setattr(sys, "argv", ["alarms", "--runs", "2", "--folder", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        alarms.main()
    alarms.main()

    assert made == ["HEAD"] * 2 + ["planted"] * (1 + len(alarms.PLANTED))
    printed = capsys.readouterr().out
    assert "| nothing | 2 | 2 | 0 | 0 | 0 |" in printed
    assert "| 3 % slower | 1 | 1 | 1 | 0 | 0 |" in printed


@pytest.mark.parametrize("said", ["Process exited with 1", "Interrupted."])
def test_a_server_that_ends_is_a_failure_and_ctrl_c_is_none(monkeypatch, said):
    def ended(*_, **__):
        raise _cells.util.UserError(said)

    monkeypatch.setattr(_cells.runner, "run_benchmark", ended)
    with pytest.raises((NotObservedError, KeyboardInterrupt)) as caught:
        _cells.observe(cell("one"), SimpleNamespace(cache_for=lambda *_: None), None)

    assert isinstance(caught.value, NotObservedError) == (said != "Interrupted.")
    assert getattr(caught.value, "failed", True)
