"""What is said of results: the last lines of a run, the table, the alarms of `asv publish`."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import committed, stored, table

pytest.importorskip("asv")

from benchmarks import summary
from benchmarks.history import spread
from benchmarks.stored import UnreadableError, older_suites, read, runs
from benchmarks.verdict import lines

ROOT = Path(__file__).parents[1]
NODES, FIRED = "graph.Graph.track_nodes", "graph.Rewrites.track_fired"
RATIO, LATENCY = "cpu.Paired.track_relative_latency", "cpu.Latency.time_forward"
MEMORY, NAN = "cpu.Memory.track_peak_memory", float("nan")
EQUAL, STILL = "no counts and bytes differ", "no paired ratio moved"


def run_of(folder, value, name, version="1", width=None):
    """A file of one result of a model; a ratio is given with the width of its interval."""
    file = folder / "12345678-here.json"
    interval = [None, None] if width is None else [[value - width], [value + width]]
    model = "'optimized-2'" if name == MEMORY else "'one'"
    stored(file, "12345678", {name: [[value], [[model]], version, *interval]})
    return read(file)


@table("name before after width expected",
        (NODES, 9, 10, None, "1 count differs (1 larger, 0 smaller)"),
        (FIRED, 9, 8, None, "1 count differs (0 larger, 0 smaller, 1 neither)"),
        (NODES, 9, NAN, None, EQUAL),
        (MEMORY, 64, 96, None, EQUAL),
        (RATIO, 0.5, 0.6, 0.01, "1 paired ratio moved by up to 20.0 % (1 slower, 0 faster), which"
         " separate runs cannot tell from noise: `python -m benchmarks compare 12345678 12345678`"),
        (RATIO, 0.5, 0.4, 0.01, "1 paired ratio moved by up to 20.0 % (0 slower, 1 fast"),
        (RATIO, 0.5, 0.6, 0.06, STILL),
        (LATENCY, 1.0, 2.0, 0.01, STILL),
    )  # fmt: skip
def test_what_differs_is_told(tmp_path, name, before, after, width, expected):
    old, new = (run_of(tmp_path / end, value, name, width=width)
                for end, value in (("old", before), ("new", after)))  # fmt: skip
    told = list(lines(new, old))

    assert expected in told[0]
    assert len(told) == 1 + expected.startswith("1")


def test_what_an_older_suite_found_is_named_and_not_compared(tmp_path):
    before, after = (run_of(tmp_path / each, 9 + int(each), NODES, each) for each in "12")
    assert EQUAL in next(lines(after, before))
    assert older_suites([before], {NODES: "1"}) == ""
    assert str(before.file) in older_suites([before], {NODES: "2"})
    assert f"names are gone: {NODES}." in older_suites([before], {"graph.other": "1"})


@pytest.mark.parametrize("text", ["{", "3", '{"results": {"a": 3}, "result_columns": ["result"]}'])
def test_what_cannot_be_read_is_a_sentence_that_says_what_to_do(tmp_path, text):
    file = tmp_path / "12345678-here.json"
    file.write_text(text)
    with pytest.raises(UnreadableError, match=r"git checkout -- .* or delete it") as told:
        read(file)
    assert runs(tmp_path) == ([], [str(told.value)])


def test_commits_are_spread_evenly_with_the_newest_and_the_oldest():
    assert [spread(range(11), count) for count in (1, 3, 99)] == [[0], [0, 5, 10], [*range(11)]]


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """The table, of files of a commit, its date, and the numbers that each benchmark found."""

    def printed(commit, date, found, models=("'one'",), names=(LATENCY, MEMORY, RATIO)):
        row = [found, [models, ["'eager'", "'optimized-1'", "'optimized-2'"]], "1", found, found]
        about = {"date": date, "params": {"machine": "there"}}
        file = tmp_path / "there" / f"{commit}-here.json"
        stored(file, commit * 8, dict.fromkeys(names, row), **about)
        monkeypatch.setattr(summary, "RESULTS", tmp_path)
        summary.main([])
        return capsys.readouterr().out

    return printed


def test_the_latest_that_is_whole_is_printed(printed, tmp_path):
    assert printed("a", 2, None).rstrip().endswith("|---|")
    found = printed("a", 2, [4.0, None, 1.0, 4e-3, 2e-3, 1e-3], models=("'one'", "'other'"))
    assert found.startswith("Commit aaaaaaaa on there")
    assert "| other | 4 → 2 → 1 | 0.002 [0.002, 0.002] | 0.001 [0.001, 0.001] |" in found
    assert "| one |" not in found
    ones = [1.0, 1.0, 1.0]
    assert printed("c", 1, ones).startswith("Commit aaaaaaaa")
    assert printed("b", 3, ones, names=(LATENCY,)).startswith("Commit aaaaaaaa")
    (tmp_path / "benchmarks.json").write_text(json.dumps({MEMORY: {"version": "2"}}))
    assert "| n/a → n/a → n/a |" in printed("d", 4, ones)


FOUR, WORSE = ["'eager'", "'optimized-1'", "'fx_fuse'", "'optimized-2'"], [9, 9, 12, 12]
BYTES = [64, 64, 96, 96]
# What each benchmark finds in four commits, by variant; it is worse, or merely more, in the last.
FOUND = {
    LATENCY: [[1, 1, 2, 2]] * 4,
    RATIO: [[0.5, 0.5, 0.9, 0.9]] * 4,
    MEMORY: [BYTES, [64, 64, 65, 65], BYTES, BYTES],
    NODES: [WORSE, [1000, 1000, 1000, 1001], WORSE, [9] * 4],
    "graph.Work.track_launches": [WORSE, [9, 9, 8, 8], WORSE, [9] * 4],
    FIRED: [[3, 3, 5, 5]],
    "optimize_cost.Models.time_optimize": [[1, 1, 2, 2]] * 4,
}


def benchmark(name):
    params = [["'one'"], FOUR][: 1 if "Rewrites" in name else 2]
    kind = "time" if "time_" in name else "track"
    about = {"name": name, "version": "1", "type": kind, "unit": "", "params": params}
    return about | {"param_names": ["model", "variant"][: len(params)]}


def test_only_exact_numbers_that_a_commit_makes_worse_are_alarms(tmp_path, monkeypatch):
    """What the page of regressions has after each of four commits was measured."""
    pytest.importorskip("asv_tachyon")
    folder = tmp_path / "results" / "there"
    machine = dict.fromkeys(("arch", "cpu", "num_cpu", "ram", "os"), "") | {"machine": "there"}
    about = {"python": "", "requirements": {}, "env_vars": {}, "version": 2, "params": machine}
    for place, commit in enumerate([committed(tmp_path, str(place)) for place in range(4)]):
        rows = {
            name: [[cells[place] for cells in found], benchmark(name)["params"], "1"]
            for name, found in FOUND.items()
        }
        stored(folder / f"{commit[:8]}-here.json", commit, rows, date=1000 * place, **about)
    stored(folder / "12345678-here.json", commit, {"by hand": 3}, date=1, **about)
    (folder / "machine.json").write_text(json.dumps(machine | {"version": 1}))
    listing = {name: benchmark(name) for name in FOUND} | {"version": 2}
    (tmp_path / "results" / "benchmarks.json").write_text(json.dumps(listing))
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    shutil.copy(ROOT / "asv.conf.json", tmp_path)
    home = os.environ | {"HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "asv", "publish"], cwd=tmp_path, check=True, env=home)
    found = json.loads((tmp_path / ".asv" / "html" / "regressions.json").read_text())

    listed = {name for name, *_ in found["regressions"]}
    assert listed == {f"{name}('one', 'optimized-1')" for name in (MEMORY, NODES)}
    # What was not measured ends no step.
    monkeypatch.syspath_prepend(ROOT)
    alarms = importlib.import_module("benchmarks.plugins.alarms")
    series = [(1, 5), (2, None), (3, 5), (4, NAN), (7, 6)]
    assert alarms.steps(series) == [(1, 4, 5, 5, 0.0), (7, 8, 6, 6, 0.0)]
