"""`python -m benchmarks compare`: what is measured when, what is kept, and what is told."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from statistics import median
from subprocess import PIPE, STDOUT

import pytest

from benchmarks.compare import command
from benchmarks.compare.cells import Cell
from benchmarks.compare.rounds import AGAIN, BASE, NEW, Series
from benchmarks.compare.verdicts import Change, Looks, flagged, verdict
from tests.quality.verdicts import Setting, simulate
from tests.quality.verdicts import rounds as drawn
from tests.repository import committed, git, processes, project, table, wait_for
from tests.single_pass import rows

SUITE = """
import os, pathlib, random, time
from optimizer import MEASURED

class Toy:
    params = [["steady", "cold"]]
    param_names = ["kind"]
    unit = "seconds"

    def track_latency(self, kind):
        centre = MEASURED[kind] * (1 + 0.004 * random.Random(os.urandom(8)).gauss(0, 1))
        samples = [centre * (1 + 0.001 * place) for place in range(10)]
        samples[0] *= 30 if kind == "cold" else 1
        return {"samples": samples, "number": 1}

def track_memory():
    tried = pathlib.Path(__file__).with_suffix(".tried")
    if not tried.exists():
        raise OSError(tried.touch())  # once
    return MEASURED["memory"]

def track_fired():
    return MEASURED["fired"]

def track_asleep():
    time.sleep(600 if MEASURED["sleeps"] else 0)
    return 1

class Elsewhere:
    def setup(self):
        raise NotImplementedError("no such device")

    def track_speed(self):
        return 1
"""
CACHED = """
def setup_cache():
    from optimizer import MEASURED
    return MEASURED

def track_nodes(cache):
    return cache["nodes"]
"""
BEFORE = {"steady": 0.01, "cold": 0.01, "memory": 4096, "fired": 3, "nodes": 7, "sleeps": 0}
COMMAND = [sys.executable, "-m", "benchmarks.compare.command"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A project with the suite above, without the pages, which need more than asv."""
    folder = project(tmp_path_factory.mktemp("project"), toy=SUITE, toy_graph=CACHED)
    settings = folder / "asv.conf.json"
    settings.write_text(settings.read_text().replace(', ".benchmarks.plugins.dashboard"', ""))
    commit(folder, "before")
    return folder


def write(folder, code="", **changes):
    """Write a version of the project in which some numbers are others."""
    module = folder / "optimizer" / "__init__.py"
    module.write_text(f"MEASURED = {BEFORE | changes}\n{code}")


def commit(folder, name, **changes):
    write(folder, **changes)
    return committed(folder, name)


def compared(folder, *arguments):
    """The exit code, the verdicts by cell, and all that was printed."""
    file = folder / ".asv" / "verdicts.json"
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    asked = [*COMMAND, *arguments, "--rounds", "5", "--json", str(file)]
    done = subprocess.run(asked, cwd=folder, stdout=PIPE, stderr=STDOUT, text=True)
    found = json.loads(file.read_text())["verdicts"] if file.exists() else []
    return done.returncode, {each["name"]: each for each in found}, done.stdout


EXPECTED = {
    "toy.Toy.track_latency(steady)": "improved",
    "toy.Toy.track_latency(cold)": "regressed",
    "toy.track_memory": "regressed",
    "toy.track_fired": "failed",
    "toy.track_asleep": "same",
    "toy.Elsewhere.track_speed": "not compared",
    "toy_graph.track_nodes": "intended",
}


@pytest.mark.integration
def test_planted_changes_are_told_and_nothing_else(repository):
    file, told = repository / "declared.toml", "[[change]]\ncells='{}'\nreason='worth it'\n"
    file.write_text(told.format("memory"))  # of an earlier change
    before = commit(repository, "before")
    file.write_text(told.format("memory") + told.format("nodes"))
    (repository / "optimizer" / "more.py").touch()
    changes = {"steady": 0.0095, "cold": 0.0147, "memory": 8192, "nodes": 8}
    write(repository, "from . import more; del MEASURED['fired']", **changes)
    status_before = git(repository, "status", "--short")
    arguments = (before, ".", "-b", "toy", "--declared", file.name)
    status, found, output = compared(repository, *arguments)

    assert {name: each["verdict"] for name, each in found.items()} == EXPECTED, output
    assert status == 1
    assert found["toy.Elsewhere.track_speed"]["reason"].endswith("no such device')")
    assert git(repository, "status", "--short") == status_before


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
    status, again, _ = compared(repository, *arguments, "--resume", "--minutes", "0.001")

    assert (running.returncode, status) == (2, 0)
    assert "1 not compared, 1 same" in output
    assert asleep
    assert not left
    assert again["toy.track_memory"]["verdict"] == "same"
    assert again["toy.track_asleep"]["verdict"] == "not compared"
    assert compared(repository, "HEAD", "HEAD", "-b", "Elsewhere")[0] == 2


@table(
    "arguments said",
    ("HEAD no-such-branch", "there is no commit 'no-such-branch' here"),
    ("HEAD HEAD -b nothing", "no benchmark matches 'nothing'"),
    ("HEAD HEAD --declared a.toml", "no reason for a"),
)
def test_what_cannot_be_compared_is_told(repository, monkeypatch, capfd, arguments, said):
    (repository / "a.toml").write_text("[[change]]\ncells = 'a'\nreason = ' '")
    commit(repository, "after")
    monkeypatch.chdir(repository)
    monkeypatch.setattr("benchmarks.compare.cells._less_is_better", lambda name: True)
    with pytest.raises(SystemExit, match="2"):
        sys.exit(command.main(arguments.split()))
    assert said in "".join(capfd.readouterr())


def series(found=(), name="toy", kind="time", less_is_better=True, **options):
    cell = Cell(name, less_is_better, "seconds", index=None, benchmark={"type": kind})
    return Series(cell, [*found], **options)


def timed(seed, change=0.0, spread=0.01, count=8):
    """Rounds whose processes differ by `spread`; the machine drifts by 3 %."""
    draw = seed if isinstance(seed, random.Random) else random.Random(seed)
    return series(drawn(draw, Setting(change, noise=spread), count))


def same(value, **others):
    return dict.fromkeys((BASE, AGAIN, NEW), value) | others


MORE = same(4, new=5)
FAILING = {"missing": same("it broke"), "failed": {NEW}}
LARGE_AT_ONCE = [same(1.0, new=1.6), same(1.0, new=0.8)] * 4
SHAKY = [same(1.0, new=1.05) | {BASE: way, AGAIN: 1 / way} for way in (1.2, 0.8) * 4]
NO_NOISE, UNSTABLE = series([same(1.0, new=1.1)] * 4), [MORE, MORE | {AGAIN: 6}]
VERDICTS = {
    "confirmed": (timed(6, 0.3), timed(60, 0.1), "regressed", ""),
    "not again": (timed(5, 0.2), timed(50), "inconclusive", ""),
    "the other way": (timed(10, 0.2, 0.001), timed(11, -0.2, 0.001), "inconclusive", ""),
    "too small again": (timed(10, 0.2, 0.001), timed(11, 0.01, 0.001), "inconclusive", ""),
    "without any noise": (NO_NOISE, NO_NOISE, "regressed", ""),
    "one large round": (timed(11, 0.2), series(LARGE_AT_ONCE), "inconclusive", ""),
    "too small": (timed(13, 0.01, 0.002), None, "same", ""),
    "the base against itself": (series(SHAKY), None, "inconclusive", ""),
    "unstable": (series(UNSTABLE, exact=True), None, "inconclusive", "from process to process"),
    "failing as before": (series(**FAILING), None, "not compared", "it broke"),
    "no logarithm": (series([same(0.0)] * 4), None, "not compared", "a number is not positive"),
    "too few": (timed(0, count=3), None, "not compared", "3 of 4 rounds were reached"),
    "neither better": (series([MORE], less_is_better=None, exact=True), None, "changed", ""),
}


@rows("first again expected reason", VERDICTS)
def test_what_is_said_of_rounds_and_of_which_the_change_is(first, again, expected, reason):
    """The first rounds were chosen for being large: what the second confirm is of these alone."""
    found = verdict(first, again)
    assert found.verdict == expected
    assert reason in found.reason
    assert bool(flagged([first])) is (again is not None)
    if again is not None:
        before = first.rounds * (expected == "inconclusive")
        assert found.change == Change.of([*before, *again.rounds])


def test_the_interval_and_the_smallest_visible_change_hold_as_often_as_they_say():
    draw, looks = random.Random(3), Looks(50, 1)
    found = [Change.of(timed(draw, 0.04).rounds) for _ in range(400)]
    visible = median(change.visible(looks) for change in found)
    assert 367 <= sum(change.low <= 1.04 <= change.high for change in found) <= 391
    assert 0.02 < visible < 0.04
    assert 12 <= simulate(Setting(visible), runs=20).said["regressed"] <= 19
