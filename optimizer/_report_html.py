"""A report as one page of HTML that needs nothing else: rewrites, refusals, both graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from difflib import SequenceMatcher
from html import escape
from itertools import zip_longest

from optimizer._report import Choice, Line, Report

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
    shown = (f"{line.name} = {line.text}", line.shape, line.source, note)
    kind = f' class="{mark}"' if line.made_by or not stayed else ""
    return "".join(
        f"<td{kind}>{escape(cell)}</td>" if index == 0 else f'<td class="note">{escape(cell)}</td>'
        for index, cell in enumerate(shown)
    )
