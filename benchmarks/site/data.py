"""What the pages are made of: results, peers, machines, commits and the tables of docs/.

What cannot be read is a sentence in `Site.complaints`, and the rest is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import stored
from benchmarks._git import git, git_or_nothing
from benchmarks.peers._rounds import Cell
from benchmarks.peers._store import Store
from benchmarks.stored import Run
from benchmarks.subjects import DEVICES

_ALIKE = {"dtype": "float32", "batch": 1, "threads": 1}
_UNTOLD = (OSError, ValueError, KeyError, TypeError, AttributeError)


class Commit(NamedTuple):
    """A commit of the history that is published."""

    hash: str
    date: str
    subject: str

    @property
    def short(self) -> str:
        """Its first eight digits."""
        return self.hash[:8]

    @property
    def day(self) -> str:
        """Its date without the time."""
        return self.date[:10]


@dataclass(frozen=True)
class Peers:
    """A file of peers: what it was measured on, and its cells by model and peer."""

    commit: Commit
    versions: str
    cells: dict[tuple[str, str], Cell]


@dataclass(frozen=True)
class Place:
    """A device of a machine with one set of versions: no series mixes two of them.

    Attributes:
        device: "cpu", "cuda" or "mps", which the names of its cells do without.
        environment: of asv; "" where there are only peers.
        about: what asv knows of the machine.
        runs: of its commits, the oldest first.
        peers: likewise.
        is_only_one: whether the machine has no other environment.
    """

    machine: str
    device: str
    environment: str
    about: dict[str, str]
    runs: list[Run]
    peers: list[Peers]
    is_only_one: bool = True

    @property
    def name(self) -> str:
        """As links call it."""
        versions = "" if self.is_only_one else self.versions
        device = "" if self.device == "cpu" else self.device.upper()
        return " · ".join(filter(None, [self.machine, device, versions]))

    @property
    def versions(self) -> str:
        """Of Python and of what was measured with, as its environment is named."""
        return self.environment.removeprefix("hostoverlay-").replace("-", " ")

    @property
    def commits(self) -> list[str]:
        """The hashes of all that was measured here."""
        return [run.commit for run in self.runs] + [each.commit.hash for each in self.peers]


@dataclass(frozen=True)
class Site:
    """All that the pages show.

    Attributes:
        history: the commits by hash, the newest first.
        places: those measured last first.
        complaints: sentences on what cannot be read or shown.
        notes: sentences on what is older than what is shown.
        docs: the pages of the documentation, by name.
    """

    history: dict[str, Commit]
    places: list[Place] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    docs: dict[str, str] = field(default_factory=dict)

    @property
    def age(self) -> dict[str, int]:
        """The place of each commit in the history, 0 for the newest."""
        return {name: place for place, name in enumerate(self.history)}


def load(results: Path, docs: Path = Path("docs")) -> Site:
    """Read everything."""
    site = Site(_history())
    found, complaints = stored.runs(results)
    site.complaints.extend(complaints)
    runs = list(_known(site, _of_today(site, found, results / stored.LISTING.name)))
    peers = _peers(site, results)
    site.places.extend(sorted(_places(site, results, runs, peers), key=_newest(site)))
    site.docs.update({page.stem: page.read_text() for page in sorted(docs.glob("*.md"))})
    return site


def _history() -> dict[str, Commit]:
    listing = git_or_nothing("log", "--format=%H%x00%cI%x00%s", "HEAD")
    commits = (Commit(*line.split("\0", 2)) for line in listing.splitlines())
    return {each.hash: each._replace(date=each.date[:16].replace("T", " ")) for each in commits}


def behind(commit: str) -> int:
    """How many commits the published head is ahead of this one."""
    return int(git("rev-list", "--count", f"{commit}..HEAD"))


def _of_today(site: Site, runs: list[Run], listing: Path) -> Iterator[Run]:
    """The runs without what was measured by an older definition."""
    try:
        today = {name: str(version) for name, version in stored.suite(listing).items()}
    except _UNTOLD as error:
        reason = f"{listing} cannot be read ({type(error).__name__}): versions are not compared."
        site.complaints.append(reason)
        yield from runs
        return
    if older := stored.older_suites(runs, today):
        site.notes.append(older)
    for run in runs:
        yield _only(run, {name for name, each in run.versions.items() if today.get(name) == each})


def _only(run: Run, names: set[str]) -> Run:
    def holds(cell: str) -> bool:
        return cell.partition("(")[0] in names

    numbers = {cell: number for cell, number in run.numbers.items() if holds(cell)}
    return replace(run, numbers=numbers, failed=frozenset(filter(holds, run.failed)))


def _known(site: Site, runs: Iterable[Run]) -> Iterator[Run]:
    """The runs of commits of the history that is published."""
    for run in runs:
        if run.commit in site.history:
            yield run
        else:
            site.complaints.append(f"{run.file} is of a commit that is not in this history.")


def _peers(site: Site, results: Path) -> dict[tuple[str, str], list[Peers]]:
    """What was measured of peers by machine and device, the oldest commit first."""
    found: dict[tuple[str, str], list[Peers]] = {}
    for file in sorted(results.glob("*/peers-*.jsonl")):
        try:
            for device, each in _peers_of(site, file).items():
                found.setdefault((file.parent.name, device), []).append(each)
        except _UNTOLD as error:
            reason = f"{type(error).__name__}: {error}"
            site.complaints.append(f"{file} cannot be read ({reason}), and is not shown.")
    for each in found.values():
        each.sort(key=lambda peers: -site.age.get(peers.commit.hash, 0))
    return found


def _peers_of(site: Site, file: Path) -> dict[str, Peers]:
    store = Store(file, {})
    short, dirty, _ = str(store.about["commit"]).partition("-")
    commit = next((each for name, each in site.history.items() if name.startswith(short)), None)
    if commit is None or dirty:
        raise ValueError("its commit is not in this history")
    versions = ", ".join(f"{name} {each}" for name, each in store.about["versions"].items())
    found: dict[str, Peers] = {}
    for (device, dtype, model, batch, threads, peer), cell in store.cells.items():
        if (dtype, batch, threads) == tuple(_ALIKE.values()):
            of_device = found.setdefault(device, Peers(commit, versions, {}))
            of_device.cells[model, peer] = _checked(cell)
    return found


def _checked(cell: Cell) -> Cell:
    """A cell of which everything is there that the pages read."""
    if "reason" in cell:
        return {"reason": str(cell["reason"])}
    for name in ("seconds", "eager_seconds"):
        if not cell[name] or min(map(float, cell[name])) <= 0:
            raise ValueError(f"{name} are not above zero")
    float(cell["difference"])
    return cell


def _places(
    site: Site, results: Path, runs: list[Run], peers: dict[tuple[str, str], list[Peers]]
) -> Iterator[Place]:
    age = site.age
    machines: dict[tuple[str, str], dict[str, list[Run]]] = {place: {} for place in peers}
    for run in sorted(runs, key=lambda each: -age[each.commit]):
        for device in _devices(run):
            kinds = machines.setdefault((run.file.parent.name, device), {})
            kinds.setdefault(run.environment, []).append(_of_device(run, device))
    for (machine, device), kinds in machines.items():
        about = _about(site, results / machine / "machine.json")
        those = peers.get((machine, device), [])
        for environment, own in (kinds or {"": []}).items():
            yield Place(machine, device, environment, about, own, those, len(kinds) < 2)


def _devices(run: Run) -> list[str]:
    """Those that forwards were measured on; what has no forwards is of the CPU."""
    cells = {cell.partition(".")[0] for cell in {*run.numbers, *run.failed}}
    return [each for each in DEVICES if each in cells] or [DEVICES[0]]


def _of_device(run: Run, device: str) -> Run:
    """What a run has of a device, and of none, by names without the device."""
    others = tuple(f"{each}." for each in DEVICES if each != device)

    def own(named: dict[str, Any]) -> dict[str, Any]:
        kept = {name: each for name, each in named.items() if not name.startswith(others)}
        return {name.removeprefix(f"{device}."): each for name, each in kept.items()}

    failed = frozenset(own(dict.fromkeys(run.failed)))
    return replace(run, numbers=own(run.numbers), versions=own(run.versions), failed=failed)


def _about(site: Site, file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    try:
        return {str(key): str(value) for key, value in json.loads(file.read_text()).items()}
    except _UNTOLD as error:
        site.complaints.append(f"{file} cannot be read ({type(error).__name__}).")
        return {}


def _newest(site: Site) -> Callable[[Place], tuple[bool, int, str]]:
    """Those with runs first, then by the newest commit."""
    age = site.age
    return lambda place: (not place.runs, min(age[each] for each in place.commits), place.name)


def table_after(page: str, start: str) -> list[list[str]]:
    """The rows of the first table of a page whose head begins so; none if there is no such table.

    The line below the head is left out.
    """
    lines = page[page.find(start) :].splitlines() if start in page else []
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([each.strip() for each in line.strip().strip("|").split("|")])
    return [row for row in rows if not all(re.fullmatch(r":?-+:?", each) for each in row)]
