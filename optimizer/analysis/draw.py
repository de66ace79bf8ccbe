"""A graph as an SVG picture: data flows from top to bottom, colour tells the operation.

A node's rank is the longest path that leads to it. An edge that passes ranks holds a place in
each of them, one for all readers of the same node, so that no edge runs behind a box.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from optimizer.core.inputs import require_graph
from optimizer.core.node import describe, shape_text, source_of

_GAP = 14.0
_LANE = 6.0
_SWEEPS = 8
_MAIN = 100.0  # the weight of what lies between inputs and output: that is to be straight


@dataclass(eq=False)
class Place:
    """A box for a node, or, without width, a point that its edges pass."""

    node: fx.Node
    rank: int
    width: float = _LANE
    weight: float = 1.0
    is_box: bool = False
    x: float = 0.0
    above: list[Place] = field(default_factory=list)
    below: list[Place] = field(default_factory=list)


def layout(graph: fx.Graph, width: Callable[[fx.Node], float]) -> list[list[Place]]:
    """The rows of a drawing, each from left to right; `x` is the middle of a place."""
    rows = _rows(graph, width)
    for sweep in range(_SWEEPS):
        _order(rows, down=sweep % 2 == 0)
    for row in rows:
        _spread(row, [0.0] * len(row))
    for sweep in range(_SWEEPS):
        _align(rows, down=sweep % 2 == 0)
    left = min(place.x - place.width / 2 for row in rows for place in row)
    for row in rows:
        for place in row:
            place.x -= left
    return rows


def _from_inputs(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose values depend on the inputs."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _to_output(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the output depends on."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or not found.isdisjoint(node.users):
            found.add(node)
    return found


def _ranks(graph: fx.Graph, data: set[fx.Node]) -> dict[fx.Node, int]:
    ranks: dict[fx.Node, int] = {}
    for node in graph.nodes:
        ranks[node] = max((ranks[each] + 1 for each in node.all_input_nodes), default=0)
    ranks[node] = max(ranks.values())  # the output comes last
    for node in reversed(graph.nodes):
        if node not in data and node.users:  # weights stand next to their first reader
            ranks[node] = max(0, min(ranks[user] for user in node.users) - 1)
    return ranks


def _rows(graph: fx.Graph, width: Callable[[fx.Node], float]) -> list[list[Place]]:
    data = _from_inputs(graph)
    ranks, main = _ranks(graph, data), data & _to_output(graph)
    rows: list[list[Place]] = [[] for _ in range(max(ranks.values()) + 1)]
    lanes: dict[tuple[fx.Node, int], Place] = {}
    for node, rank in ranks.items():
        last = max((ranks[user] for user in node.users), default=rank + 1)
        for level in range(rank, max(last, rank + 1)):
            place = Place(node, level, weight=_MAIN if node in main else 1.0)
            rows[level].append(place)
            lanes[node, level] = place
            if level > rank:
                _link(lanes[node, level - 1], place)
        box = lanes[node, rank]
        box.width, box.is_box = width(node), True
    for node, rank in ranks.items():
        for each in node.all_input_nodes:
            _link(lanes[each, rank - 1], lanes[node, rank])
    return rows


def _link(upper: Place, lower: Place) -> None:
    upper.below.append(lower)
    lower.above.append(upper)


def _order(rows: list[list[Place]], *, down: bool) -> None:
    """Sort each row by the mean position of its neighbours in the row before."""
    position: dict[Place, float] = {}
    for row in rows if down else reversed(rows):
        for index, place in enumerate(row):
            known = [position[each] for each in (place.above if down else place.below)]
            place.x = sum(known) / len(known) if known else index / len(row)
        row.sort(key=lambda place: place.x)
        position |= {place: index / len(row) for index, place in enumerate(row)}


def _align(rows: list[list[Place]], *, down: bool) -> None:
    """Move each row as close below, or above, its neighbours as the widths allow."""
    for row in rows if down else reversed(rows):
        wanted = []
        for place in row:
            near = place.above if down else place.below
            weight = sum(each.weight for each in near)
            pull = sum(each.x * each.weight for each in near)
            wanted.append(pull / weight if near else place.x)
        _spread(row, wanted)


def _spread(row: list[Place], wanted: Sequence[float]) -> None:
    """Place a row in its order, without overlaps, at the least squared distance from `wanted`.

    With d the distances that widths demand, x[i] = y[i] + d[i] for the y that is not decreasing
    and closest to wanted - d: neighbours in the wrong order are pooled to their mean.
    """
    offsets = [0.0]
    for left, right in pairwise(row):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + _GAP)
    pools: list[tuple[float, float, int]] = []  # weighted sum, weight, count
    for place, target, offset in zip(row, wanted, offsets, strict=True):
        total, weight, count = (target - offset) * place.weight, place.weight, 1
        while pools and pools[-1][0] / pools[-1][1] > total / weight:
            before = pools.pop()
            total, weight, count = total + before[0], weight + before[1], count + before[2]
        pools.append((total, weight, count))
    means = [total / weight for total, weight, count in pools for _ in range(count)]
    for place, mean, offset in zip(row, means, offsets, strict=True):
        place.x = mean + offset


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
