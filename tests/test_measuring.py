"""`python -m benchmarks` on a small suite: what it keeps, what it says, and what stops it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
pytest.importorskip("asv")
pytest.importorskip("asv_tachyon")

ROOT = Path(__file__).parents[1]
OTHERS = ("__pycache__", "c*.py", "figures.py", "graph.py", "mps.py", "optimize_*.py", "zoo.py")
Measured = tuple[Path, int, str]
SUITE = '''
import time

MODELS = {models}


class {name}:
    """Numbers of the commit."""

    params = [MODELS, {variants}]
    param_names = ["model", "variant"]
    version = "1"

    def {track}(self, model, variant):
        import optimizer
        time.sleep(optimizer.SECONDS)
        return {value}
'''


def git(project: Path, *arguments: str) -> str:
    who = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    return subprocess.check_output(["git", *who, *arguments], cwd=project, text=True).strip()


def commit(project: Path, number: float, seconds: float = 0) -> str:
    text = f"NUMBER, SECONDS = {number}, {seconds}\n"
    (project / "optimizer" / "__init__.py").write_text(text)
    git(project, "add", "optimizer", "models", "torch", ".gitignore")
    git(project, "commit", "-q", "--allow-empty", "-m", f"number {number}")
    return git(project, "rev-parse", "HEAD")


def made(folder: Path) -> Path:
    """Our commands and plugins in a repository of its own, with a suite that takes no time."""
    suite = folder / "benchmarks"
    shutil.copytree(ROOT / "benchmarks", suite, ignore=shutil.ignore_patterns(*OTHERS))
    shutil.copytree(ROOT / "benchmarks" / "compare", suite / "compare", dirs_exist_ok=True)
    shutil.copy(ROOT / "asv.conf.json", folder)
    models, variants = ["tiny_convnet", "resnet18", "r3d_18"], ["eager", "optimized-1"]
    ratios = '{"samples": [optimizer.NUMBER + at / 1000 for at in range(9)], "number": 1}'
    for file, name, track, value in (
        ("graph", "Graph", "track_nodes", "int(100 * optimizer.NUMBER)"),
        ("cpu", "Paired", "track_relative_latency", ratios),
    ):
        fields = {"models": models, "variants": variants, "name": name}
        text = SUITE.format(**fields, track=track, value=value)
        (suite / f"{file}.py").write_text(text)
    for package in ("optimizer", "models", "torch"):  # the last takes no time to import
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    (folder / ".gitignore").write_text(".asv\n__pycache__\n")
    git(folder, "init", "-q")
    commit(folder, 0.5)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return made(tmp_path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """One that was measured while its tree had changes, the exit status, and what was said."""
    folder = made(tmp_path_factory.mktemp("measured"))
    (folder / "optimizer" / "__init__.py").write_text("NUMBER, SECONDS = 9, 0")
    return folder, *said(folder, "--bench", "^graph")


@pytest.fixture
def again(measured: Measured, tmp_path: Path) -> Path:
    """A copy of it, without asv's checkouts, which know where they are."""
    ignored = shutil.ignore_patterns(".asv")
    return shutil.copytree(measured[0], tmp_path, ignore=ignored, dirs_exist_ok=True)


def started(project: Path, *arguments: str) -> subprocess.Popen[str]:
    """Our command, which hears Ctrl-C even where the tests are a background job and do not."""
    environment = os.environ | {"HOME": str(project), "BENCHMARK_MACHINE": "here"}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def said(project: Path, *arguments: str) -> tuple[int, str]:
    process = started(project, *arguments)
    output, _ = process.communicate()
    assert "Traceback" not in output
    return process.returncode, output


def kept(project: Path, of: str) -> dict[str, list[object]]:
    (file,) = (project / "results" / "here").glob(f"{of[:8]}-*.json")
    return {name: row[0] for name, row in json.loads(file.read_text())["results"].items()}


def test_all_measures_every_model_and_the_headline_ones_are_compared_with_the_commit_before(
    project: Path,
) -> None:
    first = commit(project, 0.5)
    status, output = said(project, "--all")

    assert status == 0
    assert "r3d_18" in output
    assert kept(project, first)["graph.Graph.track_nodes"] == [50] * 6
    assert "No earlier commit was measured" in output

    second = commit(project, 0.6)
    status, output = said(project)
    last = output.splitlines()[-12:]

    assert status == 0
    assert 60 in kept(project, second)["graph.Graph.track_nodes"]
    assert f"Against {first[:8]}, the last that was measured here: 4 counts and bytes" in output
    assert "4 paired ratios moved by up to 19.8 % (4 slower, 0 faster)" in output
    assert "  graph.Graph.track_nodes('resnet18', 'optimized-1'): 50 to 60, worse" in last
    assert "r3d_18" not in output
    assert "--directory .asv/html" in last[-1]
    assert "Not on this machine, and not measured: " in output or not _absent()


def _absent() -> list[str]:
    from benchmarks.tiers import absent

    return absent()


def test_a_line_says_what_is_measured_how_much_is_left_and_until_when(measured: Measured) -> None:
    line = next(line for line in measured[2].splitlines() if line.startswith("-- "))

    assert re.fullmatch(r"-- graph: 0 of 6, \d+ minutes? left, to \d\d:\d\d", line)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_what_was_measured_is_kept_where_it_is_stopped_and_nothing_goes_on(
    project: Path, signum: int
) -> None:
    measured = commit(project, 0.5)
    slow = project / "benchmarks" / "cpu.py"
    slow.write_text(slow.read_text().replace("optimizer.SECONDS", "100"))
    process = started(project)
    _wait(lambda: process.poll() is not None or (_measures_ratios(process.pid)))
    process.send_signal(signum)
    output, _ = process.communicate(timeout=90)

    assert process.returncode == 130
    assert "Traceback" not in output
    assert "Kept: graphs. What is left is measured by:" in output
    assert 50 in kept(project, measured)["graph.Graph.track_nodes"]
    _wait(lambda: not _servers(project), seconds=30)  # asv itself gives up a cell after 60


def _servers(project: Path) -> list[str]:
    """The processes that asv measures in, of this project."""
    listing = subprocess.check_output(["ps", "-Awwo", "pid=,args="], text=True).splitlines()
    return [line for line in listing if "run_server" in line and str(project) in line]


def _measures_ratios(parent: int) -> bool:
    """Whether asv, which our command started, has begun a cell of the second part."""
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(parent)]
    listing = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    for pid in (line.split()[0] for line in listing if "Paired" in line):
        told = dict(
            each.partition("=")[::2]
            for each in Path("/proc", pid, "environ").read_text().split("\0")
        )["BENCHMARK_TOLD"]
        return bool(Path(told).read_text())
    return False


def _wait(condition: Callable[[], bool], seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_tree_with_changes_is_not_what_is_measured(measured: Measured) -> None:
    project, status, output = measured

    assert status == 0
    assert "1 files have changes: the commit is measured, not they." in output
    assert kept(project, git(project, "rev-parse", "HEAD"))["graph.Graph.track_nodes"] == [50] * 6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--commit", "nonesuch"], "there is no commit 'nonesuch' here"),
        (["--bench", "nonesuch"], "no benchmark matches ['nonesuch']"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    project: Path, arguments: list[str], expected: str
) -> None:
    status, output = said(project, *arguments)

    assert status == 1
    assert expected in output


def test_where_asv_is_not_configured_it_says_so(project: Path) -> None:
    (project / "asv.conf.json").unlink()
    status, output = said(project)

    assert status == 1
    assert "there is no asv.conf.json here" in output


@pytest.mark.parametrize("damage", [lambda text: text[:200], lambda _: '{"results": [3]}'])
def test_results_that_cannot_be_read_are_told_and_left_as_they_are(
    again: Path, damage: Callable[[str], str]
) -> None:
    (file,) = (again / "results" / "here").glob("*-*.json")
    file.write_text(damage(file.read_text()))
    damaged = file.read_text()
    status, output = said(again, "--bench", "^graph")

    assert status == 1
    assert "cannot be read" in output
    assert "asv looks the suite through" not in output
    assert "git checkout" in output
    assert file.read_text() == damaged


def test_those_of_another_commit_hinder_nothing(again: Path) -> None:
    (file,) = (again / "results" / "here").glob("*-*.json")
    file.write_text(file.read_text()[:200])
    now = commit(again, 0.6)
    status, output = said(again, "--bench", "^graph")

    assert status == 0
    assert f"{file.name} cannot be read" in output
    assert kept(again, now)["graph.Graph.track_nodes"] == [60] * 6


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full is Linux's")
def test_a_full_disk_cuts_nothing_off(again: Path) -> None:
    (file,) = (again / "results" / "here").glob("*-*.json")
    before = file.read_text()
    file.with_name(f"{file.name}.partial").symlink_to("/dev/full")
    status, output = said(again, "--bench", "^graph")

    assert status == 1
    assert "No space left on device" in output
    assert file.read_text() == before


def test_history_measures_earlier_commits_once_and_names_those_it_cannot(again: Path) -> None:
    git(again, "rm", "-rq", "--cached", "models")
    git(again, "commit", "-qm", "no models")
    lacking = git(again, "rev-parse", "HEAD")
    numbers = [0.1, 0.2]
    commits = [commit(again, number) for number in numbers]
    arguments = ("history", "--commits", "9", "--models", "resnet18")
    status, output = said(again, *arguments)

    assert status == 0
    assert f"{lacking[:8]}: not measured, because it has no package `models`" in output
    for number, each in zip(numbers, commits, strict=True):
        assert int(100 * number) in kept(again, each)["graph.Graph.track_nodes"]
        assert f"{each[:8]}: graph counts, Paired of resnet18" in output

    status, output = said(again, *arguments)

    assert status == 0
    assert "-- commit" not in output
    assert f"{commits[0][:8]}: graph counts, Paired of resnet18" in output


def test_history_takes_up_what_took_too_long_and_says_which_results_are_of_an_older_suite(
    again: Path,
) -> None:
    now = git(again, "rev-parse", "HEAD")
    suite = again / "benchmarks" / "graph.py"
    suite.write_text(suite.read_text().replace("track_nodes", "track_other_nodes"))
    slow = again / "benchmarks" / "cpu.py"
    text = slow.read_text()
    slow.write_text(text.replace("optimizer.SECONDS", "100"))
    arguments = ("history", "--commits", "1", "--models", "resnet18", "--minutes-each", "0.9")
    _, output = said(again, *(*arguments[:-1], "0.1"))

    assert f"{now[:8]}: nothing; no time for graph counts, Paired of resnet18" in output

    slow.write_text(text)
    status, output = said(again, *arguments)

    assert status == 0
    assert f"{now[:8]}: graph counts, Paired of resnet18" in output
    assert "1 of 1 files have numbers of an older suite" in output
    assert "Benchmarks of these names are gone: graph.Graph.track_nodes." in output
