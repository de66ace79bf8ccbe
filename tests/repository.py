"""What the tests of the benchmark suite share: tables, git in a folder, what asv keeps there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Benchmarks of ours, which need what they measure.
OTHERS = ("__pycache__", "c*.py", "figures.py", "graph.py", "mps.py", "optimize_*.py", "zoo.py")
COLUMNS = ["result", "params", "version", "stats_ci_99_a", "stats_ci_99_b"]


def table(cells, *rows):
    """Run a test on each of some rows; `cells` are the arguments that they hold."""
    return pytest.mark.parametrize(cells.split(), rows)


def project(folder, **suite):
    """A repository with our commands and configuration of asv, and a suite of these files."""
    ours, own = ROOT / "benchmarks", folder / "benchmarks"
    shutil.copytree(ours, own, ignore=shutil.ignore_patterns(*OTHERS))
    shutil.copytree(ours / "compare", own / "compare", dirs_exist_ok=True)
    shutil.copy(ROOT / "asv.conf.json", folder)
    for name, text in suite.items():
        (own / f"{name}.py").write_text(text)
    for package in ("optimizer", "models", "torch"):  # the last takes no time to import
        (folder / package).mkdir()
        (folder / package / "__init__.py").touch()
    (folder / ".gitignore").write_text(".asv\n__pycache__\nresults\n*.tried\n")
    return folder


def installed_by_pip(source, folder):
    """Let pip install a package, without what it needs, in a folder; return that."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder), str(source)], check=True)
    return folder


def declared(folder, entry_points):
    """Write the metadata of an installed package that declares such entry points."""
    about = folder / "elsewhere-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)


def wait_for(condition, seconds=90):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def processes(of, *words):
    """The numbers of the processes, those that `ps` lists, whose commands have these words."""
    command = ["ps", "-ww", "-o", "pid=,args=", *of.split()]
    listing = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [line.split()[0] for line in listing if all(word in line for word in words)]


def git(folder, *arguments):
    who = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    return subprocess.check_output(["git", *who, *arguments], cwd=folder, text=True).strip()


def committed(folder, name):
    """Commit all that is there, and return the commit; the folder becomes a repository."""
    git(folder, "init", "-q")
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "--allow-empty", "-m", name)
    return git(folder, "rev-parse", "HEAD")


def stored(file, commit, rows, **about):
    """Write results as asv does, each row with what COLUMNS say."""
    about = {"commit_hash": commit, "env_name": "here", "result_columns": COLUMNS} | about
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(about | {"results": rows}))


def commit_number():
    """How many commits lead to this one; 0 outside a repository."""
    command = ["git", "rev-list", "--count", "HEAD"]
    counted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(counted.stdout or 0)
