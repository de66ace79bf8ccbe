"""The last lines of a run, what they rest on, and what is said meanwhile."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("asv")

from benchmarks import measuring
from benchmarks.history import spread
from benchmarks.progress import Part, Progress
from benchmarks.stored import Run, UnreadableError, older_suites, read, runs
from benchmarks.verdict import lines

NODES, FIRED = "graph.Graph.track_nodes", "graph.Rewrites.track_fired"
RATIO, LATENCY = "cpu.Paired.track_relative_latency", "cpu.Latency.time_forward"
COLUMNS = ["result", "params", "version", "stats_ci_99_a", "stats_ci_99_b"]
NAN = float("nan")


MEMORY = "cpu.Memory.track_peak_memory"


def stored(folder: Path, results: dict[str, Any], version: str = "1") -> Run:
    """A file of results of one model; ratios are given with the width of their interval."""
    rows = {}
    for name, found in results.items():
        value, width = found if isinstance(found, tuple) else (found, None)
        interval = [None, None] if width is None else [[value - width], [value + width]]
        model = "'optimized-2'" if name == MEMORY else "'one'"
        rows[name] = [[value], [[model]], version, *interval]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "12345678-here.json"
    about = {"commit_hash": "12345678", "env_name": "here", "result_columns": COLUMNS}
    file.write_text(json.dumps(about | {"results": rows}))
    return read(file)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({NODES: 9}, {NODES: 10}, "1 count differs (1 larger, 0 smaller)"),
        ({NODES: 9}, {NODES: 8}, "1 count differs (0 larger, 1 smaller)"),
        ({FIRED: 9}, {FIRED: 8}, "1 count differs (0 larger, 0 smaller, 1 neither)"),
        ({NODES: 9}, {NODES: NAN}, "no counts and bytes differ"),
        ({NODES: NAN}, {NODES: 9}, "no counts and bytes differ"),
        ({NODES: None}, {NODES: 9}, "no counts and bytes differ"),
        ({MEMORY: 64}, {MEMORY: 96}, "no counts and bytes differ"),
        (
            {RATIO: (0.5, 0.01)},
            {RATIO: (0.6, 0.01)},
            "1 paired ratio moved by up to 20.0 % (1 slower, 0 faster), which separate runs cannot"
            " tell from noise: `python -m benchmarks compare 12345678 12345678` decides",
        ),
        (
            {RATIO: (0.5, 0.01)},
            {RATIO: (0.4, 0.01)},
            "1 paired ratio moved by up to 20.0 % (0 slower, 1 faster)",
        ),
        ({RATIO: (0.5, 0.06)}, {RATIO: (0.6, 0.06)}, "no paired ratio moved"),
        ({RATIO: (0.5, NAN)}, {RATIO: (0.6, 0.01)}, "no paired ratio moved"),
        ({LATENCY: (1.0, 0.01)}, {LATENCY: (2.0, 0.01)}, "no paired ratio moved"),
    ],
)
def test_what_differs_is_told(tmp_path: Path, before: Any, after: Any, expected: str) -> None:
    told = list(lines(stored(tmp_path / "b", after), stored(tmp_path / "a", before)))

    assert expected in told[0]
    assert len(told) == 1 + expected.startswith("1")
    assert not re.search("ratio.* (worse|better)", "\n".join(told))


def test_what_was_defined_otherwise_is_not_compared(tmp_path: Path) -> None:
    before, after = stored(tmp_path / "a", {NODES: 9}), stored(tmp_path / "b", {NODES: 10}, "2")

    assert "no counts and bytes differ" in next(lines(after, before))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"results": {"a": 3}, "result_columns": ["result"]}']
)
def test_what_cannot_be_read_is_a_sentence_that_says_what_to_do(tmp_path: Path, text: str) -> None:
    file = tmp_path / "12345678-here.json"
    file.write_text(text)

    with pytest.raises(UnreadableError, match=r"git checkout -- .* or delete it"):
        read(file)
    assert runs(tmp_path)[0] == []
    assert len(runs(tmp_path)[1]) == 1


def test_files_of_an_older_suite_are_named(tmp_path: Path) -> None:
    run = stored(tmp_path, {NODES: 9})

    assert older_suites([run], {NODES: "1"}) == ""
    assert str(run.file) in older_suites([run], {NODES: "2"})
    assert f"names are gone: {NODES}." in older_suites([run], {"graph.other": "1"})


def test_commits_are_spread_evenly_with_the_newest_and_the_oldest() -> None:
    life = [str(number) for number in range(11)]

    assert spread(life, 3) == ["0", "5", "10"]
    assert spread(life, 1) == ["0"]
    assert spread(life, 99) == life


def test_a_line_comes_while_asv_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    part = Part("memory", ("Memory",), 60.0, cells=11)
    with Progress([part, part], silence=0.05) as progress:
        progress.begin(part)
        progress.told.write_text("cpu.Memory('one')\ncpu.Memory('two')\n")
        time.sleep(0.3)
    told = capsys.readouterr().out.splitlines()

    assert len(told) >= 3
    assert told[0].startswith("-- memory: 0 of 22, 22 minutes left, to ")
    assert told[-1].startswith("-- memory, cpu.Memory('two'): 2 of 22, ")


def test_a_disk_that_is_nearly_full_stops_it_before_a_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = measuring.Place("12345678", "there", "here")
    monkeypatch.setattr(measuring.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    monkeypatch.setattr(measuring, "run_part", lambda *_, **__: 0)
    status = measuring._parts(place, [Part("memory", ("Memory",), 60.0, cells=11)], [])

    assert status == 1
    assert "the disk has 1 MB left" in capsys.readouterr().err
