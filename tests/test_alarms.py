"""The alarms of `asv publish`: of made-up results, it lists what can be believed and no more."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("asv")
pytest.importorskip("asv_tachyon")

ROOT = Path(__file__).parents[1]
MODELS, VARIANTS = ["'one'"], ["'eager'", "'optimized-1'", "'fx_fuse'", "'optimized-2'"]
BYTES, COUNTS, SAME = [64, 64, 96, 96], [9, 9, 12, 12], [9, 9, 9, 9]
# What each benchmark finds in the commits, by variant; it is worse, or merely more, in the last.
FOUND = {
    "cpu.Latency.time_forward": [[1, 1, 2, 2]] * 4,
    "cpu.Paired.track_relative_latency": [[0.5, 0.5, 0.9, 0.9]] * 4,
    "cpu.Memory.track_peak_memory": [
        [64, 64, 96, 96],
        [64, 64, 65, 65],
        [64, 64, 96, 96],
        [64, 64, 96, 96],
    ],
    "graph.Graph.track_nodes": [
        [9, 9, 12, 12],
        [1000, 1000, 1000, 1001],
        [9, 9, 12, 12],
        [9, 9, 9, 9],
    ],
    "graph.Work.track_launches": [COUNTS, [9, 9, 8, 8], COUNTS, SAME],
    "graph.Rewrites.track_fired": [[3, 3, 5, 5]],
    "graph.Rewrites.track_refused": [[3, 3, 5, 5]],
    "optimize_cost.Models.time_optimize": [[1, 1, 2, 2]] * 4,
}
ALARMS = [
    "cpu.Memory.track_peak_memory('one', 'optimized-1')",
    "graph.Graph.track_nodes('one', 'optimized-1')",
]


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the page of regressions has after each of four commits was measured."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "benchmarks", project / "benchmarks")
    shutil.copy(ROOT / "asv.conf.json", project)
    _make_up(project, [_commit(project, place) for place in range(4)])
    file, *_ = (project / "results" / "there").glob("*-here.json")
    edited = json.loads(file.read_text()) | {"results": {"by hand": 3}}
    file.with_name("12345678-here.json").write_text(json.dumps(edited))
    home = os.environ | {"HOME": str(project)}
    subprocess.run([sys.executable, "-m", "asv", "publish"], cwd=project, check=True, env=home)
    found = json.loads((project / ".asv" / "html" / "regressions.json").read_text())
    return sorted(name for name, *_ in found["regressions"])


def _commit(project: Path, place: int) -> str:
    if not place:
        subprocess.run(["git", "init", "--quiet"], cwd=project, check=True)
    who = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    what = ["commit", "--quiet", "--allow-empty", "--message", f"number {place}"]
    subprocess.run(["git", *who, *what], cwd=project, check=True)
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=project, text=True).strip()


def _make_up(project: Path, commits: list[str]) -> None:
    folder = project / "results" / "there"
    folder.mkdir(parents=True)
    machine = {"machine": "there", "arch": "", "cpu": "", "num_cpu": "", "ram": "", "os": ""}
    (folder / "machine.json").write_text(json.dumps(machine | {"version": 1}))
    listing = {name: _benchmark(name) for name in FOUND}
    (project / "results" / "benchmarks.json").write_text(json.dumps(listing | {"version": 2}))
    for place, commit in enumerate(commits):
        results = {
            name: [[cells[place] for cells in found], _benchmark(name)["params"], "1", 0, 0]
            for name, found in FOUND.items()
        }
        about = {"commit_hash": commit, "env_name": "here", "date": 1000 * place, "python": ""}
        about |= {"params": machine, "requirements": {}, "env_vars": {}, "version": 2}
        about |= {"result_columns": ["result", "params", "version", "started_at", "duration"]}
        file = folder / f"{commit[:8]}-here.json"
        file.write_text(json.dumps(about | {"results": results}))


def _benchmark(name: str) -> dict[str, object]:
    params = [MODELS, VARIANTS][: 1 if "Rewrites" in name else 2]
    kind = "time" if "time_" in name else "track"
    about = {"name": name, "version": "1", "type": kind, "unit": "", "params": params}
    return about | {"param_names": ["model", "variant"][: len(params)]}


def test_only_exact_numbers_that_a_commit_makes_worse_are_listed(listed: list[str]) -> None:
    assert listed == ALARMS


def test_what_was_not_measured_ends_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    alarms = importlib.import_module("benchmarks.plugins.alarms")
    series = [(1, 5), (2, None), (3, 5), (4, float("nan")), (7, 6)]

    assert alarms.steps(series) == [(1, 4, 5, 5, 0.0), (7, 8, 6, 6, 0.0)]
