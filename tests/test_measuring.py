"""`python -m benchmarks` on a small suite: what it keeps, what it says, and what stops it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import repository
from tests.repository import committed, git, processes, wait_for

pytestmark = pytest.mark.integration
pytest.importorskip("asv")
pytest.importorskip("asv_tachyon")

RATIOS = '{"samples": [optimizer.NUMBER + at / 1000 for at in range(9)], "number": 1}'
NODES = "graph.Graph.track_nodes"
SUITE = """
import time

class {name}:
    params = [["tiny_convnet", "resnet18", "r3d_18"], ["eager", "optimized-1"]]
    param_names = ["model", "variant"]
    version = "1"

    def {track}(self, model, variant):
        import optimizer
        time.sleep(0)
        return {value}
"""


def commit(project, number):
    (project / "optimizer" / "__init__.py").write_text(f"NUMBER = {number}\n")
    return committed(project, f"number {number}")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One whose suite takes no time, measured while its tree has changes, and what was said."""
    nodes = {"name": "Graph", "track": "track_nodes", "value": "int(100 * optimizer.NUMBER)"}
    ratios = {"name": "Paired", "track": "track_relative_latency", "value": RATIOS}
    suites = {"graph": SUITE.format(**nodes), "cpu": SUITE.format(**ratios)}
    folder = repository.project(tmp_path_factory.mktemp("made"), **suites)
    commit(folder, 0.5)
    (folder / "optimizer" / "__init__.py").write_text("NUMBER = 9")
    return folder, *said(folder, "--bench", "^graph")


@pytest.fixture
def project(made, tmp_path):
    """A copy of it, without asv's checkouts, which know where they are."""
    ignored = shutil.ignore_patterns(".asv")
    return shutil.copytree(made[0], tmp_path, ignore=ignored, dirs_exist_ok=True)


def started(project, *arguments):
    """Our command, which hears Ctrl-C even where the tests are a background job and do not."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=project,
        env=os.environ | {"HOME": str(project), "BENCHMARK_MACHINE": "here"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def said(project, *arguments):
    process = started(project, *arguments)
    output, _ = process.communicate()
    assert "Traceback" not in output
    return process.returncode, output


def nodes(project, of):
    (file,) = (project / "results" / "here").glob(f"{of[:8]}-*.json")
    return json.loads(file.read_text())["results"][NODES][0]


def test_every_model_is_measured_or_the_headline_and_compared_with_the_commit_before(project):
    shutil.rmtree(project / "results")
    first = commit(project, 0.5)
    status, output = said(project, "--all")

    assert status == 0
    assert nodes(project, first) == [50] * 6
    assert "No earlier commit was measured" in output

    second = commit(project, 0.6)
    status, output = said(project)
    last = output.splitlines()[-12:]

    assert status == 0
    assert 60 in nodes(project, second)
    assert f"Against {first[:8]}, the last that was measured here: 4 counts and bytes" in output
    assert "4 paired ratios moved by up to 19.8 % (4 slower, 0 faster)" in output
    assert f"  {NODES}('resnet18', 'optimized-1'): 50 to 60, worse" in last
    assert "r3d_18" not in output
    assert "--directory .asv/html" in last[-1]


def test_a_tree_with_changes_is_not_what_is_measured_and_a_line_says_how_much_is_left(made):
    project, status, output = made
    assert status == 0
    assert "1 files have changes: the commit is measured, not they." in output
    assert nodes(project, git(project, "rev-parse", "HEAD")) == [50] * 6
    assert re.search(r"^-- graph: 0 of 6, \d+ minutes? left, to \d\d:\d\d$", output, re.MULTILINE)


def test_what_was_measured_is_kept_where_it_is_stopped_and_nothing_goes_on(project):
    suite = project / "benchmarks" / "cpu.py"
    suite.write_text(suite.read_text().replace("sleep(0)", "sleep(100)"))
    process = started(project)
    wait_for(lambda: process.poll() is not None or _measures_ratios(process.pid))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)

    assert process.returncode == 130
    assert "Kept: graphs. What is left is measured by:" in output
    assert 50 in nodes(project, git(project, "rev-parse", "HEAD"))
    wait_for(lambda: not processes("-A", "run_server", str(project)), seconds=30)  # asv: after 60


def _measures_ratios(parent):
    """Whether asv, which our command started, has begun a cell of the second part."""
    for pid in processes(f"--ppid {parent}", "Paired"):
        told = re.search("BENCHMARK_TOLD=([^\0]*)", Path("/proc", pid, "environ").read_text())
        return bool(Path(told[1]).read_text())
    return False


HISTORY = ("history", "--models", "resnet18", "--commits")
PARTS = "graph counts, Paired of resnet18"


def test_history_measures_earlier_commits_once_and_names_those_it_cannot(project):
    (project / ".gitignore").write_text("models\n")
    git(project, "rm", "-rq", "--cached", "models")
    lacking = committed(project, "no models")
    (project / ".gitignore").write_text(".asv\n__pycache__\nresults\n*.html\n")
    commits = {number: commit(project, number) for number in (0.1, 0.2)}
    first, second = (said(project, *HISTORY, "9") for _ in range(2))

    assert (first[0], second[0]) == (0, 0)
    assert f"{lacking[:8]}: not measured, because it has no package `models`" in first[1]
    for number, each in commits.items():
        assert int(100 * number) in nodes(project, each)
        assert all(f"{each[:8]}: {PARTS}" in output for _, output in (first, second))
    assert "-- commit" not in second[1]
