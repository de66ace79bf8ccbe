"""A graph as an SVG picture: data flows from top to bottom, colour tells the kind of call."""

from __future__ import annotations

import html
from collections.abc import Container, Iterator

from torch import fx

from optimizer._graph import describe, shape_text, source_of
from optimizer._inputs import require_graph
from optimizer._layout import Place, layout

_BOX, _ROW, _MARGIN, _TITLE = 32, 52, 16, 28  # heights and distances, in pixels
_LONGEST, _CHARACTER = 34, 6.7  # of a label, in characters; their width
_STYLE = """
svg { font: 11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }
text { text-anchor: middle; fill: #222; }
.title { font-size: 14px; text-anchor: start; }
.name { fill: #666; font-size: 10px; }
path { fill: none; stroke: #999; }
rect { stroke: #888; fill: #eee; }
.call_module rect { fill: #d3e4fd; }
.call_function rect { fill: #d9f0d9; }
.call_method rect { fill: #eedcf5; }
.get_attr rect { fill: #fdf0c4; }
.gone rect { stroke: #c22; stroke-width: 2.5; stroke-dasharray: 5 3; }
.new rect { stroke: #171; stroke-width: 2.5; }
"""


def draw(module: fx.GraphModule, after: fx.GraphModule | None = None) -> str:
    """The graph of a module as SVG text, alone or beside the graph that it became.

    Beside one another, nodes that only the first graph has are dashed, and those that only the
    second has are outlined in green. A box shows what is called, the node's name and its shape.

    Raises:
        InputError: an argument is no graph: pass `optimizer.capture(model)`.
    """
    modules = [module] if after is None else [module, after]
    graphs = [require_graph(each) for each in modules]
    names = [{node.name for node in graph.nodes} for graph in graphs]
    parts, left, height = [], float(_MARGIN), 0
    for index, graph in enumerate(graphs):
        rows = layout(graph, _width)
        title = f"{type(modules[index]).__name__}, {len(graph.nodes)} nodes"
        inside = "\n".join(_picture(rows, names[-1 - index], ("gone", "new")[index]))
        parts.append(
            f'<g transform="translate({left:.0f} {_TITLE})"><text class="title" y="-8">'
            f"{html.escape(title)}</text>\n{inside}\n</g>"
        )
        right = max(place.x + place.width / 2 for row in rows for place in row)
        left += max(right, len(title) * 9) + 3 * _MARGIN
        height = max(height, _TITLE + len(rows) * _ROW)
    width = left - 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}"'
        f' viewBox="0 0 {width:.0f} {height}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" style="fill: white; stroke: none"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _picture(rows: list[list[Place]], others: Container[str], mark: str) -> Iterator[str]:
    places = [place for row in rows for place in row]
    for place in places:
        if place.below:
            yield f'<path d="{"".join(map(_edge, [place] * len(place.below), place.below))}"/>'
    for place in places:
        if place.is_box:
            yield _box(place, "" if place.node.name in others else f" {mark}")


def _edge(upper: Place, lower: Place) -> str:
    """From the top of a lane, or the bottom of a box, to the top of what is below."""
    top = upper.rank * _ROW
    start, end = top + _BOX, lower.rank * _ROW
    middle = (start + end) / 2
    first = f"M{upper.x:.1f} {start if upper.is_box else top}V{start}"
    if abs(upper.x - lower.x) < 0.5:
        return f"{first}V{end}"
    return f"{first}C{upper.x:.1f} {middle} {lower.x:.1f} {middle} {lower.x:.1f} {end}"


def _box(place: Place, mark: str) -> str:
    node, y = place.node, place.rank * _ROW
    call, name = _labels(node)
    title = f"{node.format_node()}  {source_of(node)}".strip()
    return (
        f'<g class="{node.op}{mark}"><title>{html.escape(title)}</title>'
        f'<rect x="{place.x - place.width / 2:.1f}" y="{y}" width="{place.width:.1f}"'
        f' height="{_BOX}" rx="4"/>'
        f'<text x="{place.x:.1f}" y="{y + 14}">{html.escape(call)}</text>'
        f'<text class="name" x="{place.x:.1f}" y="{y + 26}">{html.escape(name)}</text></g>'
    )


def _labels(node: fx.Node) -> tuple[str, str]:
    """What a box says: what is called, and the node's name and shape."""
    call, name = describe(node), f"{node.name} {shape_text(node)}".strip()
    if len(call) > _LONGEST:
        call = f"{call[: _LONGEST - 1]}…"
    if len(name) > _LONGEST:  # names differ in how they end
        name = f"…{name[1 - _LONGEST :]}"
    return call, name


def _width(node: fx.Node) -> float:
    return max(map(len, _labels(node))) * _CHARACTER + 14
