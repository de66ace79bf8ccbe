"""Makes `asv publish` write a dashboard that works without a network.

asv's own pages load their scripts from the network and show only an error without it. asv-tachyon
shows the same data with what it brings along.
"""

from __future__ import annotations

from pathlib import Path

from asv import util
from asv.publishing import OutputPublisher
from asv_tachyon.cli import cmd_install

from benchmarks.plugins import alarms  # asv finds what it publishes with among the classes

__all__ = ["Dashboard", "alarms"]


class Dashboard(OutputPublisher):
    name = "dashboard"
    button_label = "Dashboard"
    description = "The same data, without a network"

    @classmethod
    def publish(cls, conf, repo, benchmarks, graphs, revisions) -> None:
        folder = Path(conf.html_dir)
        util.write_json(folder / "commits.json", _subjects(revisions))
        _answer_in_advance(folder, [path for path, _ in graphs])
        util.write_json(folder / "index.json", {})  # asv writes it last; the installer looks for it
        cmd_install(folder, backup=False)


def _subjects(commits) -> dict[str, str]:
    """The first line of each commit's message, which the charts show."""
    log = util.check_output(["git", "log", "--no-walk", "--format=%H %s", *commits])
    return dict(line.split(" ", 1) for line in log.splitlines())


def _answer_in_advance(folder: Path, graphs: list[str]) -> None:
    """Empty files for what the page asks for and can do without, lest its console shows errors."""
    util.write_json(folder / "profiles.json", {"paths": {}})
    util.write_json(folder / "regressions-ignore.json", [])
    for graph in graphs:
        samples = folder / "samples" / Path(graph).relative_to("graphs")
        util.write_json(f"{samples}.json", {})
