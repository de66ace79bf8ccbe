"""What was rewritten, what was refused and why, as text and as a page of HTML."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from difflib import SequenceMatcher
from html import escape
from itertools import chain
from typing import Any

from torch import fx

from optimizer.core.node import describe, shape_text, source_of, tensors_of


@dataclass(frozen=True)
class Rewrite:
    """One rewrite that fired: the node it replaced, and where the user wrote that."""

    name: str
    node: str
    source: str


@dataclass(frozen=True)
class Refusal(Rewrite):
    """One rewrite that matched and was refused, with the reason."""

    reason: str


@dataclass(frozen=True)
class Choice:
    """Which program runs a region of a lowered call, and why.

    `seconds` has the median time of each candidate that was timed, `rejected` why another was
    not, `spent` the seconds that it took to make and verify each.
    """

    region: str  # what it computes
    key: str  # the same for regions that differ only in their weights
    chosen: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)
    held: int = 0  # bytes of weights that what runs it holds a second time

    def fates(self) -> dict[str, str]:
        """Return why each other candidate does not run the region: an error or its time."""
        rejected = {name: f"rejected: {reason}" for name, reason in self.rejected.items()}
        slower = [name for name in [*self.seconds][1:] if name != self.chosen]
        return rejected | {name: self.took(name) for name in slower}

    def took(self, name: str) -> str:
        """Return the time of a candidate, relative to that of the first, the region as it is."""
        first = next(iter(self.seconds), name)
        ratio = name != first and self.seconds[name] / self.seconds[first]
        return f"{ratio:.0%} of its time as it is" if ratio else ""


@dataclass(frozen=True)
class Size:
    """Deterministic counts of a graph: nodes, module calls, parameters and their bytes."""

    nodes: int = 0
    modules: int = 0
    parameters: int = 0
    bytes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def of(cls, module: fx.GraphModule) -> Size:
        """Count a graph module. Tensors that share storage are counted once."""
        calls = sum(node.op == "call_module" for node in module.graph.nodes)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        storages = (tensor.untyped_storage() for tensor in tensors_of(module))
        sizes = {storage._cdata: storage.nbytes() for storage in storages}
        return cls(len(module.graph.nodes), calls, parameters, sum(sizes.values()))


@dataclass(frozen=True)
class Line:
    """One node of a graph, to be read; and which pass made it, of which of the model's nodes."""

    name: str
    text: str
    shape: str
    source: str
    made_by: str = ""
    made_from: tuple[str, ...] = ()

    @classmethod
    def of(cls, node: fx.Node) -> Line:
        """Return the line of a node."""
        inputs = ", ".join(each.name for each in node.all_input_nodes)
        is_call = node.op.startswith("call")
        text = f"{describe(node)}({inputs})" if is_call else f"{node.op} {inputs}"
        origin = node.meta.get("made_by", ""), node.meta.get("made_from", ())
        return cls(node.name, text, shape_text(node), source_of(node), *origin)

    def origin(self) -> str:
        """Return the pass and the nodes that it was made by and of; empty if it is the model's."""
        return f"{self.made_by} of {', '.join(self.made_from)}" if self.made_by else ""


def listing(module: fx.GraphModule) -> tuple[Line, ...]:
    """Return all nodes of a graph, in order."""
    return tuple(map(Line.of, module.graph.nodes))


@dataclass(frozen=True)
class Report:
    """The account of one call of `optimize`."""

    model: str
    level: int
    fired: tuple[Rewrite, ...] = ()  # in the order in which they happened
    refused: tuple[Refusal, ...] = ()  # what matched a pattern and was left alone
    remarks: tuple[str, ...] = ()  # what concerns the whole model
    before: Size = field(default_factory=Size)
    after: Size = field(default_factory=Size)
    checked: str = ""  # when the answer was: "final", "each", or empty where it was not
    front_end: str = "symbolic"  # or "dynamo"; empty where the model is left as it is
    seconds: float = 0.0  # that `optimize` took
    choices: tuple[Choice, ...] = ()  # what runs each region of the example's call, at level 2
    tried: tuple[Choice, ...] = ()  # the same for a call that is not lowered; a remark says why
    graph_before: tuple[Line, ...] = ()
    graph_after: tuple[Line, ...] = ()
    figures: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of `measured`
    compared: str = ""  # the speed-up that `measured` found, as text

    def __deepcopy__(self, memo: Any) -> Report:
        return self  # it is never changed

    def with_graphs(self, graphs: Sequence[Report]) -> Report:
        """Return the report with those of the graphs that the model was recorded as."""
        names = "fired", "refused", "choices", "tried", "graph_before", "graph_after"
        joined: dict[str, Any] = {
            name: tuple(chain(*(getattr(each, name) for each in graphs))) for name in names
        }
        count = [f"Dynamo found {len(graphs)} graphs"] * (len(graphs) > 1)
        remarks = dict.fromkeys(chain(self.remarks, count, *(each.remarks for each in graphs)))
        before = sum((each.before for each in graphs), Size())
        after = sum((each.after for each in graphs), Size())
        return replace(self, **joined, remarks=tuple(remarks), before=before, after=after)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, fit for JSON."""
        return asdict(self)

    def to_html(self) -> str:
        """Return the whole report as one page of HTML, with the graph, that needs no network."""
        lines = [self.summary(), self.compared, *(f"remark: {each}" for each in self.remarks)]
        choices = self.choices or self.tried
        rows = [(c.region, c.chosen, "; ".join(map(": ".join, c.fates().items()))) for c in choices]
        regions = "regions" if self.choices else "regions, not lowered"
        name = escape(self.model)
        parts = [
            f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{name}</title>",
            f'<meta name=viewport content="width=device-width"><style>{_STYLE}</style></head>',
            f"<body><h1>{name}</h1>",
            *(f"<p>{escape(each)}</p>" for each in lines if each),
            _table("numbers", ("", "before", "after"), _changes(self)),
            _fold(regions, len(rows), _table("", ("region", "runs", "tried"), rows), "open"),
            _groups("rewritten", self.fired),
            _groups("refused", self.refused),
            _fold("nodes of the graph", len(self.graph_after), _graph(self)),
        ]
        return "\n".join([*parts, "</body></html>\n"])

    def counts(self) -> dict[str, int]:
        """Return how often each pass fired."""
        return dict(Counter(rewrite.name for rewrite in self.fired))

    def __str__(self) -> str:
        changes = [f"{name} {old} -> {new}" for name, old, new in _changes(self)]
        lines = (", ".join(changes[1:4]), ", ".join(changes[4:7]), self.compared)
        counted = [_counted("rewritten", self.fired), _counted("refused", self.refused)]
        head = [line for line in (self.summary(), *lines) if line]
        sections = [*counted, _regions(self), [f"remark: {remark}" for remark in self.remarks]]
        over = len(head) + sum(map(len, sections)) - _LINES
        for _ in range(over + 1 if over > 0 else 0):  # of the longest ones the last lines give way
            max(sections, key=len).pop()
        more = [f"... and {over + 1} more; report.to_html() lists all"] * (over > 0)
        parts = (" ".join(line.splitlines()) for part in (head, *sections) for line in part)
        return "\n".join([*parts, *more])

    def summary(self) -> str:
        """Return what became of the model, in one line."""
        checked = "answer checked" if self.checked else "answer not checked"
        checked += " after each pass" * (self.checked == "each")
        checked = checked if self.front_end else "nothing to check: the model is unchanged"
        start = f"{self.model}, level {self.level}, {self.seconds:.2f} s, {checked}"
        start += "" if self.front_end in ("", "symbolic") else f", captured by {self.front_end}"
        calls = [line.text.partition("(") for line in self.graph_before]
        kinds = Counter(name for name, bracket, _ in calls if bracket).most_common(4)
        saw = ", ".join(f"{count} x {name}" for name, count in kinds)
        nodes = f": {self.before.nodes} -> {self.after.nodes} nodes" if self.after.nodes else ""
        return start + nodes + f"; it saw {saw}" * bool(saw)


_LINES = 20


def _counted(title: str, entries: Sequence[Rewrite]) -> list[str]:
    rows = [("", str(len(group)), *what) for what, group in grouped(entries).items()]
    return [f"{title}: {len(entries) or 'nothing'}", *columns(rows)]


def grouped(entries: Iterable[Rewrite]) -> dict[tuple[str, str], list[Rewrite]]:
    """Group rewrites by their pass, and refusals by their reason too."""
    groups = defaultdict[tuple[str, str], list[Rewrite]](list)
    for each in entries:
        groups[each.name, getattr(each, "reason", "")].append(each)
    return groups


def _regions(report: Report) -> list[str]:
    choices = report.choices or report.tried
    if not choices:
        return []
    groups = defaultdict[tuple[str, str], list[str]](list)
    for each in report.choices:
        by = f"run by {each.chosen}".replace("by as it is", "as it is")
        groups[by, each.region].append(each.took(each.chosen))
    fates = sorted((n, c.region, w) for c in choices for n, w in c.fates().items())
    for name, region, why in fates:
        groups[f"tried {name}", region].append(why)
    rows = [("", str(len(whys)), *what, _range(whys)) for what, whys in groups.items()]
    spent, copies = sum(sum(c.spent.values()) for c in choices), sum(c.held for c in report.choices)
    title = f"regions: {len(choices)}, each a part of the model that one program may run"
    title += ", none of them lowered" * (not report.choices) + f", prepared in {spent:.2f} s"
    title += f", {copies:,} bytes of weights held a second time" * bool(copies)
    return [title, *columns(rows)]


def _range(times: Iterable[str]) -> str:
    """Return the least and the most of some times; shorter numbers are less."""
    least, *_, most = sorted([*times] * 2, key=lambda each: (len(each), each))
    return least if least == most else f"{least.partition(' of ')[0]} to {most}"


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines of text, with their cells under one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _changes(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield what a model had and its result has, by name."""
    before, after = asdict(report.before), asdict(report.after)
    sizes = {name: (value, after[name]) for name, value in before.items() if report.after.nodes}
    for name, pair in (sizes | dict(report.figures)).items():
        old, new = (f"{n:,}" if isinstance(n, int) else f"{n:.3g}" for n in pair)
        yield name, old, new


_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 1.5em auto; max-width: 1100px; padding: 0 1em; }
body { color: #222; overflow-wrap: anywhere; } .wide { overflow-x: auto; }
summary { font-weight: 600; margin: 1em 0 .4em; cursor: pointer; }
details details summary { font-weight: 400; margin: .2em 1em; }
details details .wide { margin-left: 2em; }
table { border-collapse: collapse; overflow-wrap: break-word; }
td, th { padding: 2px 12px 2px 0; text-align: left; vertical-align: top; }
.numbers td + td, .numbers th { text-align: right; font-variant-numeric: tabular-nums; }
.graph { font: 12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
.gone { background: #fde3e1; } .new { background: #dff3df; } .graph td + td + td { color: #666; }
"""
_MARKS = {"-": "gone", "+": "new"}


def _groups(title: str, entries: Sequence[Rewrite]) -> str:
    folds = ""
    for what, group in grouped(entries).items():
        table = _table("", ("node", "source"), [(each.node, each.source) for each in group])
        folds += _fold(": ".join(filter(None, what)), len(group), table)
    return _fold(title, len(entries), folds, "open")


def _fold(title: str, count: int, body: str, state: str = "") -> str:
    summary = f"<summary>{escape(title)}: {count}</summary>"
    return f"<details {state}>{summary}\n{body}</details>\n" if count else ""


def _table(kind: str, names: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table; a row that begins with a mark has its colour."""
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in names)]
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        lines.append(f'<tr class="{_MARKS.get(row[0], "")}">{cells}')
    body = "</tr>\n".join([*lines, ""])
    return f'<div class="wide"><table class="{kind}">\n{body}</table></div>'


def _graph(report: Report) -> str:
    """Return every node, before (-) and after (+), and once where it stayed."""
    old, new = report.graph_before, report.graph_after
    by = {rewrite.node: rewrite.name for rewrite in report.fired}
    by |= {name: line.made_by for line in new for name in line.made_from}
    old_keys, new_keys = ([(line.name, line.made_by) for line in lines] for lines in (old, new))
    matcher = SequenceMatcher(None, old_keys, new_keys, autojunk=False)
    rows = list[tuple[str, ...]]()
    for kind, i, j, k, n in matcher.get_opcodes():
        stayed = kind == "equal"
        gone = [("-", line, by.get(line.name, "")) for line in old[i:j] if not stayed]
        there = [("" if stayed else "+", line, line.origin()) for line in new[k:n]]
        for mark, line, note in gone + there:
            rows.append((mark, f"{line.name} = {line.text}", line.shape, line.source, note))
    return _table("graph", ("", "node", "shape", "source", "pass"), rows)
