"""What the tests of the benchmark suite share: tables, git in a folder, what asv keeps there."""

from __future__ import annotations

import json
import subprocess

import pytest

COLUMNS = ["result", "params", "version", "stats_ci_99_a", "stats_ci_99_b"]


def table(cells, *rows):
    """Run a test on each of some rows; `cells` are the arguments that they hold."""
    return pytest.mark.parametrize(cells.split(), rows)


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
