"""What was rewritten, what was refused and why, as text and as a page of HTML."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from html import escape
from itertools import zip_longest
from textwrap import indent
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

    Attributes:
        region: what it computes.
        key: the same for regions that differ only in their weights.
        chosen: the candidate that runs it.
        seconds: the median time of each candidate that was timed.
        rejected: why a candidate was not.
        spent: the seconds that it took to make and verify each.
        held: the bytes of the region's weights, where what runs it holds them a second time.
    """

    region: str
    key: str
    chosen: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)
    held: int = 0

    def fates(self) -> dict[str, str]:
        """Of each candidate that does not run the region, why: what is wrong, or its time."""
        found = {name: f"rejected: {reason}" for name, reason in self.rejected.items()}
        times = list(self.seconds.items())  # as it is comes first
        slower = [each for each in times[1:] if each[0] != self.chosen]
        return found | {name: f"{spent / times[0][1]:.2f} of its time" for name, spent in slower}


@dataclass(frozen=True)
class Size:
    """Deterministic counts of a graph: nodes, module calls, parameters and their bytes."""

    nodes: int = 0
    modules: int = 0
    parameters: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, module: fx.GraphModule) -> Size:
        """Count a graph module. Tensors that share storage are counted once."""
        calls = sum(node.op == "call_module" for node in module.graph.nodes)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors_of(module)}
        total = sum(storage.nbytes() for storage in storages.values())
        return cls(len(module.graph.nodes), calls, parameters, total)


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
        """What can be read of a node."""
        inputs = ", ".join(each.name for each in node.all_input_nodes)
        text = (
            f"{describe(node)}({inputs})" if node.op.startswith("call") else f"{node.op} {inputs}"
        )
        made = node.meta.get("made_by", ""), node.meta.get("made_from", ())
        return cls(node.name, text, shape_text(node), source_of(node), *made)


def listing(module: fx.GraphModule) -> tuple[Line, ...]:
    """All nodes of a graph, in order."""
    return tuple(map(Line.of, module.graph.nodes))


@dataclass(frozen=True)
class Report:
    """The account of one call of `optimize`.

    Attributes:
        fired: the rewrites, in the order in which they happened.
        refused: what matched a pattern and was left alone.
        remarks: what concerns the whole model.
        before, after: counts of the graph.
        checked: when the answer was checked: "final", "each", or empty where it was not.
        front_end: what captured the model: "symbolic", "export", "exported program" or "dynamo".
        seconds: how long `optimize` took.
        choices: which program runs each region of the example's call, at level 2.
        tried: the same for a call that is not lowered; a remark says why.
        graph_before, graph_after: the nodes, and where those that are new come from.
    """

    model: str
    level: int
    fired: tuple[Rewrite, ...] = ()
    refused: tuple[Refusal, ...] = ()
    remarks: tuple[str, ...] = ()
    before: Size = field(default_factory=Size)
    after: Size = field(default_factory=Size)
    checked: str = ""
    front_end: str = "symbolic"
    seconds: float = 0.0
    choices: tuple[Choice, ...] = ()
    tried: tuple[Choice, ...] = ()
    graph_before: tuple[Line, ...] = ()
    graph_after: tuple[Line, ...] = ()

    def __deepcopy__(self, memo: Any) -> Report:
        return self  # it is never changed

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, fit for JSON."""
        return asdict(self)

    def to_html(self) -> str:
        """The report as one page of HTML, with both graphs, that needs no network."""
        return page(self)

    def counts(self) -> dict[str, int]:
        """How often each pass fired."""
        return dict(Counter(rewrite.name for rewrite in self.fired))

    def __str__(self) -> str:
        rewrites = [self._head(), self._fired(), self._refused(), self._lowered()]
        sections = [*rewrites, self._remarks(), self._sizes()]
        return "\n\n".join(section for section in sections if section)

    def _head(self) -> str:
        checked = _CHECKED[self.checked]
        captured = "" if self.front_end in ("", "symbolic") else f", captured by {self.front_end}"
        return f"{self.model}, level {self.level}, {self.seconds:.2f} s, {checked}{captured}"

    def _fired(self) -> str:
        if not self.fired:
            return "rewritten: nothing"
        rows = [(str(count), name) for name, count in self.counts().items()]
        return f"rewritten: {len(self.fired)}\n" + indent(columns(rows), "  ")

    def _refused(self) -> str:
        if not self.refused:
            return ""
        rows = [(r.name, r.node, r.source, r.reason) for r in self.refused]
        return f"refused: {len(self.refused)}\n" + indent(columns(rows), "  ")

    def _lowered(self) -> str:
        if not self.choices and not self.tried:
            return ""
        counts = Counter((choice.chosen, choice.region) for choice in self.choices)
        rows = [(str(count), *what, "") for what, count in counts.items()]
        every = self.choices or self.tried
        whys = defaultdict[tuple[str, str], list[str]](list)
        for name, region, why in ((n, c.region, w) for c in every for n, w in c.fates().items()):
            whys[name, region].append(why)
        extremes = {what: dict.fromkeys((min(found), max(found))) for what, found in whys.items()}
        rows += [("0", *what, " to ".join(found)) for what, found in sorted(extremes.items())]
        spent, held = (sum(sum(c.spent.values()) for c in every), sum(c.held for c in self.choices))
        title = f"regions: {len(every)}" + ", none of them lowered" * (not self.choices)
        title += f", prepared in {spent:.2f} s" + f", {held:,} bytes of weights held again" * bool(
            held
        )
        return f"{title}\n" + indent(columns(rows), "  ") if rows else title

    def _remarks(self) -> str:
        return "\n".join(f"remark: {remark}" for remark in self.remarks)

    def _sizes(self) -> str:
        return indent(columns([("", "before", "after"), *_sizes(self)]), "  ")


_CHECKED = {
    "": "answer not checked",
    "final": "answer checked",
    "each": "answer checked after each pass",
}


def columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of text with their cells under one another."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2em; color: #222; }
h2 { font-size: 16px; margin: 2em 0 .5em; }
table { border-collapse: collapse; }
td, th { padding: 2px 12px 2px 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #bbb; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.graph { font: 12px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
.graph td { padding: 1px 8px; white-space: nowrap; }
.gone { background: #fde3e1; }
.new { background: #dff3df; }
.note { color: #666; }
"""


def page(report: Report) -> str:
    """The whole page."""
    parts = [
        f"<h1>{escape(report.model)}</h1>",
        f"<p>{escape(str(report).partition(chr(10))[0])}</p>",
        *(f"<p>remark: {escape(remark)}</p>" for remark in report.remarks),
        *_section("before and after", ("", "before", "after"), _sizes(report), number=True),
        *_section("rewritten", ("pass", "node", "source"), map(_cells, report.fired)),
        *_section("refused", ("pass", "node", "source", "reason"), map(_cells, report.refused)),
        *_section("regions", ("region", "runs", "others"), map(_regions, report.choices)),
        *_section("regions, not lowered", ("region", "", "tried"), map(_regions, report.tried)),
        *_graphs(report),
    ]
    head = f'<meta charset="utf-8"><title>{escape(report.model)}</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n{body}\n</body></html>\n"


def _cells(row: object) -> tuple[str, ...]:
    return tuple(asdict(row).values())  # type: ignore[call-overload]


def _regions(choice: Choice) -> tuple[str, ...]:
    fates = "; ".join(f"{name}: {why}" for name, why in choice.fates().items())
    return choice.region, choice.chosen, fates


def _sizes(report: Report) -> Iterator[tuple[str, ...]]:
    after = asdict(report.after)
    for name, value in asdict(report.before).items():
        yield name, f"{value:,}", f"{after[name]:,}"


def _section(
    title: str, names: Iterable[str], rows: Iterable[tuple[str, ...]], *, number: bool = False
) -> Iterator[str]:
    rows = list(rows)
    if not rows:
        return
    kind = ' class="number"' if number else ""
    count = "" if number else f": {len(rows)}"
    yield f"<h2>{title}{count}</h2>\n<table>"
    yield "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table>"


def _graphs(report: Report) -> Iterator[str]:
    """Both graphs beside one another, a node that stayed on one row with itself."""
    old, new = report.graph_before, report.graph_after
    if not new:
        return
    by = {rewrite.node: rewrite.name for rewrite in report.fired}
    by |= {name: line.made_by for line in new for name in line.made_from}
    yield '<h2>the graph</h2>\n<table class="graph">'
    yield "<tr><th colspan=4>before</th><th colspan=4>after</th></tr>"
    matcher = SequenceMatcher(None, [n.name for n in old], [n.name for n in new], autojunk=False)
    for _, i, j, k, n in matcher.get_opcodes():
        for left, right in zip_longest(old[i:j], new[k:n]):
            stayed = left is not None and right is not None and left.name == right.name
            gone = "" if left is None or stayed else by.get(left.name, "")
            yield f"<tr>{_node(left, 'gone', stayed, gone)}{_node(right, 'new', stayed, '')}</tr>"
    yield "</table>"


def _node(line: Line | None, mark: str, stayed: bool, note: str) -> str:
    if line is None:
        return "<td></td>" * 4
    if line.made_by:
        note = f"{line.made_by} of {', '.join(line.made_from)}"
    kind = f' class="{mark}"' if line.made_by or not stayed else ""
    notes = [f'<td class="note">{escape(text)}</td>' for text in (line.shape, line.source, note)]
    return "".join([f"<td{kind}>{escape(f'{line.name} = {line.text}')}</td>", *notes])
