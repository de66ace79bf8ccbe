"""What each page shows, in the order in which it shows it; templates only lay it out."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks import verdict
from benchmarks._workloads import EVERY_MODEL, HEADLINE, TORCHVISION, VARIANTS
from benchmarks.peers._rounds import Cell
from benchmarks.stored import Number, Run
from benchmarks.subjects import EAGER, PEER, VARIANT, names

from . import numbers
from .data import Commit, Peers, Place, Site, behind
from .numbers import LATENCY, MEMORY, RATIO, Shown

LEVEL_1 = "optimized-1"
WORSE = "Counts and bytes that got worse"
BETTER = "Counts and bytes that got better"
MOVED = "Ratios that moved, which separate runs cannot tell from noise"
FAILS = "Fails now"
_MODELS = list(dict.fromkeys([*HEADLINE, *TORCHVISION, *EVERY_MODEL]))
_PEERS = names(PEER)  # others' first
_SLOTS = {name: slot for slot, name in enumerate(dict.fromkeys([*VARIANTS, *_PEERS]))}
_OF_A_MODEL = ("graph.", LATENCY, MEMORY, RATIO)
_BENCH = "python -m tox run -e bench"
_ELSEWHERE = {
    "cpu": ("CPU", "", f"{_BENCH} -- --bench '^cpu'"),
    "cuda": ("CUDA", "on a machine with an NVIDIA or AMD GPU", f"{_BENCH} -- --bench '^cuda'"),
    "mps": ("MPS", "on a Mac with an Apple GPU", f"{_BENCH} -- --bench '^mps'"),
}
_PARTS = {
    "graph.Work.": "the work of each graph",
    "graph.Lowered.": "what runs each region",
    "graph.Error.": "the bounds of errors",
    RATIO: "paired ratios",
    LATENCY: "latencies",
    MEMORY: "peak memory",
}
COUNTS = {
    "nodes": "graph.Graph.track_nodes",
    "calls": "graph.Graph.track_calls",
    "modules": "graph.Graph.track_modules",
    "parameters": "graph.Graph.track_parameters",
    "bytes of parameters": "graph.Graph.track_parameter_bytes",
    "launches of kernels": "graph.Work.track_launches",
    "operations (flops)": "graph.Work.track_flops",
    "bytes moved": "graph.Work.track_bytes_moved",
    "bytes alive at the peak": "graph.Work.track_live_bytes",
}
LOWERED = {
    "regions": "track_regions",
    "calls by engines": "track_calls_of_engines",
    "calls on packed weights": "track_calls_of_packed",
    "calls as they are": "track_calls_as_they_are",
    "calls outside all regions": "track_calls_outside",
    "bytes of weights held twice": "track_held_twice",
}
LIVE = "graph.Work.track_live_bytes"


class Row(NamedTuple):
    """A model in the matrix: speed-ups and milliseconds by variant, speed-ups by peer, memory."""

    model: str
    eager: Shown
    variants: list[tuple[Shown, Shown]]
    peers: list[Shown]
    memory: list[Shown]


class Matrix(NamedTuple):
    """Models by variants and peers, of the newest commits that have any."""

    commit: Commit | None
    peers_of: Peers | None
    variants: list[str]
    peers: list[str]
    memory_of: list[str]
    rows: list[Row]


class Change(NamedTuple):
    """A cell that differs from the last measurement, and the model whose page has more."""

    model: str
    text: str


class Verdict(NamedTuple):
    """What the newest commit changed, in a sentence and in lists by what they are called."""

    sentence: str
    lists: dict[str, list[Change]]


class Machine(NamedTuple):
    """A row of the table of machines."""

    place: Place
    newest: Commit
    behind: int
    measured: int
    described: str


class Missing(NamedTuple):
    """What was not run, and the command that runs it."""

    what: str
    where: str
    command: str


class Series(NamedTuple):
    """A line of a chart: which of the colours it has, and a cell for each commit."""

    name: str
    slot: int
    is_dashed: bool
    cells: list[Shown]


class Chart(NamedTuple):
    """Lines over commits, the oldest first, and commits with which something stepped."""

    title: str
    unit: str
    commits: list[Commit]
    series: list[Series]
    steps: dict[str, list[str]]

    @property
    def drawing(self) -> dict[str, Any]:
        """What the script draws."""
        return {
            "unit": self.unit,
            "commits": [[each.short, each.date, each.subject] for each in self.commits],
            "series": [
                {"name": s.name, "slot": s.slot, "dash": s.is_dashed,
                 "values": [each.value for each in s.cells]}
                for s in self.series
            ],
            "steps": [at for at, each in enumerate(self.commits) if each.hash in self.steps],
        }  # fmt: skip


class Facts(NamedTuple):
    """A table of a model: of which commit, its head, and its rows of a name and cells."""

    commit: Commit | None
    head: list[str]
    rows: list[tuple[str, list[Shown]]]


@functools.cache  # there are few names, and every page asks
def params_of(cell: str) -> tuple[str, ...]:
    """The parameters in the name of a cell; none where they cannot be read."""
    _, _, rest = cell.partition("(")
    try:
        return tuple(map(str, ast.literal_eval(f"({rest[:-1]},)"))) if rest else ()
    except (ValueError, SyntaxError):
        return ()


def models(place: Place) -> list[str]:
    """Those that any commit was measured with here, as the suite has them and then by name."""
    found = {model for run in place.runs for model in _models_of(run)}
    found |= {model for peers in place.peers for model, _ in peers.cells}
    return _as_in(_MODELS, found)


def _as_in(order: Sequence[str], found: set[str]) -> list[str]:
    """Names in a known order, and then those that are not in it."""
    known = {name: at for at, name in enumerate(order)}
    return sorted(found, key=lambda name: (known.get(name, len(known)), name))


def _models_of(run: Run) -> set[str]:
    cells = (cell for cell in {*run.numbers, *run.failed} if cell.startswith(_OF_A_MODEL))
    return {params[0] for cell in cells if (params := params_of(cell))}


def variants(runs: Iterable[Run], *benchmarks: str) -> list[str]:
    """Those that benchmarks have cells of, in the order of the suite."""
    cells = {cell for run in runs for cell in {*run.numbers, *run.failed}
             if cell.startswith(benchmarks)}  # fmt: skip
    found = {params[1] for cell in cells if len(params := params_of(cell)) > 1}
    return _as_in(VARIANTS, found)


def newest(runs: Sequence[Run], *beginnings: str) -> Run | None:
    """The newest run that has a cell whose name begins so."""
    for run in reversed(runs):
        if any(cell.startswith(beginnings) for cell in {*run.numbers, *run.failed}):
            return run
    return None


def matrix(site: Site, place: Place) -> Matrix:
    """The first table of a machine."""
    run, peers = newest(place.runs, RATIO, LATENCY), place.peers[-1] if place.peers else None
    runs = [run] if run else []
    columns = [name for name in variants(runs, RATIO, LATENCY) if name != EAGER]
    memory_of, others = variants(runs, MEMORY), _peers_in([peers] if peers else [])
    cells = peers.cells if peers else {}
    shown = set(_models_of(run) if run else ()) | {model for model, _ in cells}
    rows = [
        Row(
            model,
            _eager(run, cells, model),
            [(numbers.speed(run, model, name), numbers.milliseconds(run, model, name))
             for name in columns],
            [numbers.peer_speed(cells.get((model, name))) for name in others],
            [numbers.mebibytes(run, MEMORY, model, name) for name in memory_of],
        )
        for model in models(place) if model in shown
    ]  # fmt: skip
    commit = site.history[run.commit] if run else None
    return Matrix(commit, peers, columns, others, memory_of, rows)


def _eager(run: Run | None, cells: dict[tuple[str, str], Cell], model: str) -> Shown:
    """Eager's milliseconds: the suite's, or those that the peers were compared with."""
    own = numbers.milliseconds(run, model, EAGER)
    return own if run else numbers.peer_milliseconds(cells.get((model, EAGER)))


def _peers_in(files: Iterable[Peers]) -> list[str]:
    return _as_in(_PEERS, {peer for each in files for _, peer in each.cells} - {EAGER})


def judged(place: Place) -> Verdict | None:
    """What the newest run says against the one before it."""
    if not place.runs:
        return None
    now = place.runs[-1]
    before = verdict.earlier(place.runs, now.commit, place.machine, place.environment)
    sentence = next(iter(verdict.lines(now, before)))
    if before is None:
        return Verdict(sentence, {})
    found = list(verdict.differences(now, before))
    gone = sorted(now.failed & before.numbers.keys())
    lists = {
        WORSE: [_change(each) for each in found if each.worse],
        BETTER: [_change(each) for each in found if each.worse is False],
        "Counts and bytes that changed, where neither way is better": [
            _change(each) for each in found if each.worse is None and not each.is_ratio
        ],
        MOVED: [_change(each) for each in found if each.is_ratio],
        "Ratios whose intervals are too wide to tell a change of 5 %": [
            _change(each) for each in verdict.undecided(now, before)
        ],
        FAILS: [Change(_model(cell), cell) for cell in gone],
    }
    return Verdict(sentence, lists)


def _change(difference: verdict.Difference) -> Change:
    return Change(_model(difference.cell), difference.text.strip())


def _model(cell: str) -> str:
    return next(iter(params_of(cell)), "")


def machines(site: Site) -> list[Machine]:
    """Where anything was measured, and how long ago."""
    age = site.age
    rows = []
    for place in site.places:
        last = site.history[min(place.commits, key=age.__getitem__)]
        about = (place.about.get(key) for key in ("cpu", "ram", "os"))
        described = ", ".join(each for each in about if each)
        rows.append(Machine(place, last, behind(last.hash), len(set(place.commits)), described))
    return rows


def missing(site: Site, place: Place) -> list[Missing]:
    """What the newest run lacks."""
    run = place.runs[-1:]
    measured = {each.device for each in site.places if each.machine == place.machine}
    found = [Missing(*each) for name, each in _ELSEWHERE.items() if name not in measured]
    parts = [what for name, what in _PARTS.items() if not newest(run, name)]
    usual, here = names(VARIANT, place.device), variants(run, RATIO, LATENCY, MEMORY)
    absent = [name for name in usual if name not in here]
    if parts or absent:
        found.append(Missing(", ".join([*parts, *absent]), "", _BENCH))
    known = {model for each in run for model in _models_of(each)}
    if left := [name for name in EVERY_MODEL if name not in known]:
        found.append(Missing(f"{len(left)} of {len(EVERY_MODEL)} models", "", f"{_BENCH} -- --all"))
    if not place.peers:
        found.append(Missing("other tools", "", "python -m tox run -e peers"))
    return found


def charts(site: Site, place: Place, model: str, stepped: dict[str, list[str]]) -> list[Chart]:
    """A model over commits: speed-ups over eager, and milliseconds."""
    points = _points(site, place, model)
    commits = [commit for commit, _, _ in points]
    kinds = (
        ("Speed-up over eager", numbers.TIMES, numbers.speed, numbers.peer_speed),
        ("Milliseconds of one forward", "ms", numbers.milliseconds, numbers.peer_milliseconds),
    )
    found = []
    for title, unit, of_run, of_peer in kinds:
        series = [
            _series(name, [of_run(run, model, name) for _, run, _ in points])
            for name in variants(place.runs, RATIO, LATENCY)
        ]
        series += [
            _series(f"{name} (peers)", [of_peer(_cell(peers, model, name)) for *_, peers in points])
            for name in _peers_in(place.peers)
        ]
        found.append(Chart(title, unit, commits, [s for s in series if _has_some(s)], stepped))
    return found


def _points(site: Site, place: Place, model: str) -> list[tuple[Commit, Run | None, Peers | None]]:
    """The commits at which a model was measured, the oldest first."""
    runs = {run.commit: run for run in place.runs if model in _models_of(run)}
    peers = {each.commit.hash: each for each in place.peers if (model, EAGER) in each.cells}
    known = sorted(runs.keys() | peers.keys(), key=site.age.__getitem__, reverse=True)
    return [(site.history[each], runs.get(each), peers.get(each)) for each in known]


def _cell(peers: Peers | None, model: str, peer: str) -> Cell | None:
    return peers.cells.get((model, peer)) if peers else None


def _has_some(series: Series) -> bool:
    return any(each.kind != "absent" for each in series.cells)


def _series(name: str, cells: list[Shown]) -> Series:
    plain = name.removesuffix(" (peers)")
    return Series(name, _SLOTS.get(plain, len(_SLOTS)), plain != name, cells)


def steps(place: Place) -> dict[str, dict[str, list[str]]]:
    """By model and commit, what differs there from the run before, of what is made here."""
    found: dict[str, dict[str, list[str]]] = {}
    for before, now in itertools.pairwise(place.runs):
        for each in verdict.differences(now, before):
            model, *rest = params_of(each.cell) or ("",)
            if not rest or rest[0] not in (EAGER, "fx_fuse"):
                texts = found.setdefault(model, {}).setdefault(now.commit, [])
                texts.append(each.text.strip())
    return found


def counts(site: Site, place: Place, model: str) -> Facts:
    """Counts of the graph before and after."""
    run = _of_model(place, model, "graph.")
    rows = []
    for name, benchmark in COUNTS.items():
        cells = [numbers.count(run, benchmark, model, each) for each in (EAGER, LEVEL_1)]
        rows.append((name, [*cells, _difference(*cells)]))
    return _facts(site, run, [EAGER, LEVEL_1, "change"], rows)


def _difference(before: Shown, after: Shown) -> Shown:
    if before.value is None or after.value is None:
        return Shown("")
    if not before.value:
        return Shown("same" if after.value == before.value else "")
    change = after.value / before.value - 1
    return Shown(f"{change:+.1%}" if change else "same", value=change)


def memory(site: Site, place: Place, model: str) -> Facts:
    """Peak memory as measured, beside what the graph must hold."""
    run = _of_model(place, model, MEMORY, LIVE)
    rows = [
        (name, [numbers.mebibytes(run, each, model, name) for each in (MEMORY, LIVE)])
        for name in variants([run] if run else [], MEMORY, LIVE)
    ]
    return _facts(site, run, ["peak, MiB", "liveness bound, MiB"], rows)


def rewrites(site: Site, place: Place, model: str) -> Facts:
    """What optimizing did, and left alone."""
    run = _of_model(place, model, "graph.Rewrites.")
    rows = [
        (kind, [numbers.count(run, f"graph.Rewrites.track_{kind}", model)])
        for kind in ("fired", "refused")
    ]
    return _facts(site, run, ["rewrites"], rows)


def lowered(site: Site, place: Place, model: str) -> Facts:
    """The regions of level 2, and what runs them."""
    run = _of_model(place, model, "graph.Lowered.")
    columns = variants([run] if run else [], "graph.Lowered.")
    rows = [
        (name, [numbers.count(run, f"graph.Lowered.{each}", model, column) for column in columns])
        for name, each in LOWERED.items()
    ]
    return _facts(site, run, columns, rows if columns else [])


def errors(site: Site, place: Place, model: str) -> Facts:
    """How far the answers are from float64's."""
    run = _of_model(place, model, "graph.Error.")
    rows = [
        (name, [numbers.count(run, "graph.Error.track_error", model, name)])
        for name in variants([run] if run else [], "graph.Error.")
    ]
    return _facts(site, run, ["at most, in eps"], rows)


def _of_model(place: Place, model: str, *beginnings: str) -> Run | None:
    """The newest run that has a number of a model."""
    for run in reversed(place.runs):
        if any(cell.startswith(beginnings) and _model(cell) == model for cell in run.numbers):
            return run
    return None


def _facts(
    site: Site, run: Run | None, head: list[str], rows: list[tuple[str, list[Shown]]]
) -> Facts:
    if run is None:
        return Facts(None, head, [])
    known = [row for row in rows if any(each.text not in ("", "n/a") for each in row[1])]
    return Facts(site.history[run.commit], head, known)


def noise(site: Site, place: Place) -> Facts:
    """Half of each 99 % interval, of the newest paired ratios and latencies."""
    run = newest(place.runs, RATIO, LATENCY)
    runs = [run] if run else []
    columns = [(RATIO, name) for name in variants(runs, RATIO)]
    columns += [(LATENCY, name) for name in variants(runs, LATENCY)]
    rows = [
        (model, [_half(numbers.found(run, benchmark, model, name)) for benchmark, name in columns])
        for model in models(place)
    ]
    kinds = {RATIO: "ratio", LATENCY: "latency"}
    return _facts(site, run, [f"{kinds[each]}, {name}" for each, name in columns], rows)


def _half(number: Number | Shown) -> Shown:
    if isinstance(number, Shown):
        return number
    if number.low is None or number.high is None or number.value <= 0:
        return Shown("n/a", "absent", note="a single measurement")
    value = (number.high - number.low) / 2 / number.value
    return Shown(f"{value:.1%}".replace("%", " %"), value=value)
