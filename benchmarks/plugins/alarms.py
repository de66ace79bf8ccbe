"""Makes the alarms of `asv publish` exact; asv.conf.json says what they are for.

asv smooths a series before it looks for steps, as times need it: a count that rose by one, or in
the last commit only, is taken for noise. What alarms here has none, so each change is a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from asv.plugins.regressions import Regressions
from asv.publishing import OutputPublisher
from asv.util import is_na

Step = tuple[int, int, float, float, float]  # from, until, value, least, error


class Alarms(OutputPublisher):
    name = "alarms"
    button_label = "Alarms"
    description = "What a commit made worse"
    order = 4  # after asv's own list, which is written anew

    @classmethod
    def publish(cls, conf, repo, benchmarks, graphs, revisions) -> None:
        Regressions.publish(conf, repo, benchmarks, _Exact(graphs), revisions)


class _Exact:
    """The graphs of asv, with steps where values change."""

    def __init__(self, graphs: Any) -> None:
        self.get_params, self._graphs = graphs.get_params, graphs

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, graph in self._graphs:
            yield name, _Stepped(graph)


class _Stepped:
    def __init__(self, graph: Any) -> None:
        self.params, self.path, self._graph = graph.params, graph.path, graph

    def get_steps(self) -> list[Any]:
        data = self._graph.get_data()
        if self._graph.scalar_series:
            return steps([(revision, value) for revision, value, _ in data])
        series = range(self._graph.n_series)
        return [steps([(revision, values[at]) for revision, values, _ in data]) for at in series]


def steps(series: list[tuple[int, float | None]]) -> list[Step]:
    """The pieces of a series over which its value is the same, without what was not measured."""
    measured = [(revision, value) for revision, value in series if not is_na(value)]
    pieces = [list(piece) for _, piece in itertools.groupby(measured, key=lambda each: each[1])]
    return [(one[0][0], one[-1][0] + 1, one[0][1], one[0][1], 0.0) for one in pieces]
