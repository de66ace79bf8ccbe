"""Makes `asv publish` write pages that work without a network.

Ours come first. asv's own load their scripts from the network and show only an error without it;
asv-tachyon shows the same data with what it brings along, one click away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from asv import util
from asv.commands import publish
from asv.console import log
from asv.machine import iter_machine_files
from asv.plugins import regressions
from asv.publishing import OutputPublisher
from asv.results import Results, iter_results_paths
from asv_tachyon.cli import cmd_install

from benchmarks import stored
from benchmarks.plugins import alarms  # asv finds what it publishes with among the classes
from benchmarks.site import data, pages

__all__ = ["Dashboard", "alarms"]


class Dashboard(OutputPublisher):
    name = "dashboard"
    button_label = "Dashboard"
    description = "The same data, without a network"

    @classmethod
    def publish(cls, conf, repo, benchmarks, graphs, revisions) -> None:
        folder = Path(conf.html_dir)
        util.write_json(folder / "commits.json", _subjects(revisions))
        _answer_in_advance(folder, [path for path, _ in graphs], benchmarks)
        util.write_json(folder / "index.json", {})  # asv writes it last; the installer looks for it
        cmd_install(folder, backup=False)
        (folder / "index.html").replace(folder / pages.ASV)
        pages.write(data.load(_near(conf.results_dir)), folder)


def _near(folder: str) -> Path:
    """As seen from here, so that sentences about files name what can be typed."""
    path, here = Path(folder).resolve(), Path.cwd().resolve()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _subjects(commits) -> dict[str, str]:
    """The first line of each commit's message, which the charts show."""
    if not commits:
        return {}
    log = util.check_output(["git", "log", "--no-walk", "--format=%H %s", *commits])
    return dict(line.split(" ", 1) for line in log.splitlines())


def _answer_in_advance(folder: Path, graphs: list[str], names: Iterable[str]) -> None:
    """Empty files for what the page asks for and can do without, lest its console shows errors."""
    util.write_json(folder / "profiles.json", {"paths": {}})
    util.write_json(folder / "regressions-ignore.json", [])
    places = {Path(graph).parent for graph in graphs}
    asked = {place / name for place in places for name in names} | set(map(Path, graphs))
    for graph in asked:
        if not (folder / f"{graph}.json").exists():  # of a machine that did not measure it
            util.write_json(folder / f"{graph}.json", [])
        util.write_json(folder / "samples" / f"{graph.relative_to('graphs')}.json", {})


def _readable_results(folder: str) -> Iterator[Results]:
    """What asv can read: it ends with a traceback at a file that was edited by hand."""
    for place, name, machine in iter_results_paths(folder):
        file = Path(place, name)
        try:
            stored.read(file)
            yield Results.load(str(file), machine_name=machine)
        except (stored.UnreadableError, util.UserError) as error:
            log.warning(str(error))


def _readable_machines(folder: str) -> Iterator[Any]:
    """Likewise of the files that describe machines."""
    for file in iter_machine_files(folder):
        try:
            util.load_json(file)["machine"]
        except (util.UserError, KeyError, TypeError) as error:
            log.warning(f"{file} cannot be read: {error}")
        else:
            yield file


publish.iter_results = regressions.iter_results = _readable_results
publish.iter_machine_files = _readable_machines
