"""The two versions that are compared, each checked out as an asv environment of its own."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asv import runner, util
from asv.config import Config
from asv.environment import get_environments
from asv.plugin_manager import plugin_manager
from asv.repo import get_repo

from benchmarks._git import git

WORKING_TREE = "."
_FOLDER = Path(".asv/compare")


class ComparisonError(Exception):
    """The versions cannot be compared; the message says what to do."""


def commit_of(name: str) -> str:
    """The hash of a commit, or of one made of the working tree as it is, for ".".

    That one is on no branch, and the index stays as it is.

    Raises:
        ComparisonError: there is no such commit.
    """
    if name == WORKING_TREE:
        return _snapshot()
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except subprocess.CalledProcessError as error:
        raise ComparisonError(
            f"there is no commit {name!r} here: name a commit, a branch, or . for the working tree."
        ) from error


def content_of(commit: str, file: str) -> str:
    """A file of the project as a commit has it.

    Raises:
        subprocess.CalledProcessError: it has none.
    """
    return git("show", f"{commit}:{file}")


def _snapshot() -> str:
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        git("read-tree", "HEAD", **index)
        git("add", "--all", **index)
        return commit_on_no_branch(git("write-tree", **index), "the working tree")


def commit_on_no_branch(tree: str, message: str) -> str:
    """A commit of a tree, after HEAD.

    Whose it is and of when never differs, so that one tree is one commit, and can be resumed.
    """
    said = {"NAME": "compare", "EMAIL": "compare", "DATE": git("log", "-1", "--format=%cI")}
    author = {f"GIT_{who}_{key}": said[key] for who in ("AUTHOR", "COMMITTER") for key in said}
    return git("commit-tree", tree, "-p", "HEAD", "-m", message, **author)


class Tree:
    """A version that is checked out; benchmarks of it run in processes that it starts.

    Args:
        conf: of asv.
        commit: a hash.
        place: the name of its folder.
    """

    def __init__(self, conf: Any, commit: str, place: str) -> None:
        own = copy.copy(conf)
        own.env_dir = str(_FOLDER / place)
        (self.environment,) = get_environments(own, [])
        self.repository, self.conf, self.commit = get_repo(own), own, commit
        self.environment.create()
        self.environment.install_project(own, self.repository, commit)
        self._caches: dict[str, str] = {}

    @contextlib.contextmanager
    def server(self) -> Iterator[Any]:
        """The server of asv for new processes, which has imported the version once.

        Raises:
            ComparisonError: the version cannot be imported.
        """
        method = self.conf.launch_method if hasattr(os, "fork") else "spawn"
        server = runner.get_spawner(self.environment, self.conf.benchmark_dir, method)
        try:
            imported, told = server.preimport()
            if not imported:
                raise ComparisonError(
                    f"{self.commit[:8]} cannot be imported: {told.strip()[-500:]}"
                )
            yield server
        finally:
            server.close()

    def cache_for(self, benchmark: dict[str, Any], server: Any) -> str | None:
        """The folder in which the `setup_cache` of a benchmark ran, once for this version.

        Raises:
            ComparisonError: it failed.
        """
        key = benchmark.get("setup_cache_key")
        if key is None:
            return None
        if key not in self._caches:
            limit = benchmark.get("setup_cache_timeout") or benchmark["timeout"]
            folder, told = server.create_setup_cache(benchmark["name"], limit, "{}")
            if folder is None:
                raise ComparisonError(f"setup_cache: {last_line(told)}")
            self._caches[key] = folder
        return self._caches[key]

    def close(self) -> None:
        """Remove what its caches left."""
        for folder in self._caches.values():
            util.long_path_rmtree(folder, ignore_errors=True)


def last_line(text: str) -> str:
    """What a process said last: of a traceback, the error."""
    lines = [line.strip().removeprefix("asv: skipped: ") for line in text.splitlines()]
    told = [line for line in lines if line and not line.startswith("asv: ")]
    return told[-1][:200] if told else ""


def configuration() -> Any:
    """How asv is configured here; its plugins are loaded.

    Raises:
        ComparisonError: there is none here.
    """
    if not Path("asv.conf.json").exists():
        raise ComparisonError("there is no asv.conf.json here: run this where the project is.")
    conf = Config.load("asv.conf.json")
    for plugin in conf.plugins:
        plugin_manager.import_plugin(plugin)
    return conf
