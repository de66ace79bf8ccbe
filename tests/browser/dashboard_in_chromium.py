"""asv's views of the published dashboard in a headless Chromium: `tox run -e dashboard`.

Not named test_*, so that `pytest` does not ask everyone for a browser. asv publishes made-up
results of the real suite, and the page is opened with every other host out of reach.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from asv.benchmarks import Benchmarks
from asv.config import Config
from asv.results import Results
from asv.runner import BenchmarkResult

COMMITS = 4
BENCHMARKS = [
    "cpu.Latency.time_forward",
    "cpu.Memory.track_peak_memory",
    "cpu.Paired.track_relative_latency",
    "cuda.Latency.time_forward",
    "graph.Graph.track_nodes",
    "optimize_cost.Scaling.time_optimize",
]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory, copy_suite: Any, commit: Any) -> Path:
    project = tmp_path_factory.mktemp("project")
    copy_suite(project)
    commits = [commit(project, f"Change number {number}") for number in range(COMMITS)]
    _make_up_results(project, commits)
    subprocess.run([sys.executable, "-m", "asv", "publish"], cwd=project, check=True)
    return project / ".asv" / "html"


def _make_up_results(project: Path, commits: list[str]) -> None:
    config = Config.load(str(project / "asv.conf.json"))
    config.results_dir = str(project / config.results_dir)
    benchmarks = Benchmarks(config, _listed(project))
    benchmarks.save()
    machine = {"machine": "made-up", "arch": "x86_64", "cpu": "none", "num_cpu": "2", "ram": "1"}
    folder = Path(config.results_dir) / "made-up"
    folder.mkdir()
    (folder / "machine.json").write_text(json.dumps(machine | {"os": "none", "version": 1}))
    for position, name in enumerate(commits):
        _results(benchmarks, machine, name, position).save(config.results_dir)


def _listed(project: Path) -> list[dict[str, object]]:
    listing = project / "listing.json"
    script = Path(sys.modules["asv"].__file__).parent / "benchmark.py"
    command = [sys.executable, script, "discover", project / "benchmarks", listing]
    subprocess.run(command, cwd=project, check=True)
    return json.loads(listing.read_text())


def _results(benchmarks: Benchmarks, machine: dict, commit: str, position: int) -> Results:
    environment = ["3.11", "hostoverlay-py3.11", {"OMP_NUM_THREADS": "1"}]
    results = Results(machine, {}, commit, 1_700_000_000_000 + position * 86_400_000, *environment)
    for name, benchmark in benchmarks.items():
        count = len(list(itertools.product(*benchmark["params"])))
        values = [float("nan") if name.startswith(("cuda", "mps")) else 1.0 + position] * count
        outcome = BenchmarkResult(values, [None] * count, [None] * count, 0, "", None)
        results.add_result(benchmark, outcome)
    return results


def test_each_benchmark_is_shown_and_nothing_is_asked_of_another_host_or_fails(dashboard):
    dashboard.go("asv.html")
    card = dashboard.page.get_by_text("cuda.Latency.time_forward", exact=True).locator("..")
    assert "—" in card.inner_text()  # what was not measured
    for name in BENCHMARKS:
        dashboard.go(f"asv.html#view=explore&bench={name}")
        dashboard.page.get_by_text(name).first.wait_for()

    assert dashboard.requests_elsewhere == []
    assert dashboard.complaints == []


def test_the_chart_of_a_benchmark_draws_each_variant(dashboard):
    dashboard.go("asv.html#view=explore&bench=cpu.Latency.time_forward")
    series = dashboard.page.inner_text("body")
    dashboard.page.wait_for_selector(".uplot canvas")
    painted = dashboard.page.evaluate("""() => {
        const canvas = document.querySelector(".uplot canvas");
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(new Uint32Array(pixels.buffer)).size;
    }""")

    assert "model='resnet18', variant='optimized-1'" in series
    assert painted > 10


def test_a_narrow_page_is_no_wider_than_its_window(dashboard):
    dashboard.page.set_viewport_size({"width": 375, "height": 800})
    dashboard.go("asv.html")
    width = dashboard.page.evaluate("document.documentElement.scrollWidth")

    assert width <= 375
