"""Where the nodes of a graph are drawn: layers from top to bottom, with few crossings.

A node's rank is the longest path that leads to it. An edge that passes ranks holds a place in
each of them, one for all readers of the same node, so that no edge runs behind a box.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

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
