"""`python -m benchmarks.summary`: the committed results of the latest commit as one table.

One row a model: median latency and peak memory of one forward, eager and optimized, and the
paired ratio of the two latencies, which is what to read for "is it faster".
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path("results")
_HEAD = (
    "| model | latency eager → optimized, ms | of eager [interval] | peak memory, MiB | nodes |\n"
    "|---|---|---|---|---|"
)


def main() -> None:
    files = list(RESULTS.glob("*/[0-9a-f]*-*.json"))
    if not files:
        sys.exit("There are no results yet: run `python -m tox run -e bench` first.")
    latest = max((json.loads(file.read_text()) for file in files), key=lambda r: r["date"])
    print(f"Commit {latest['commit_hash'][:8]} on {latest['params']['machine']}\n\n{_HEAD}")
    for row in _rows(latest):
        print(row)


def _rows(results: dict[str, Any]) -> Iterator[str]:
    latency = _cells(results, "cpu.Latency.time_forward", "result")
    memory = _cells(results, "cpu.Memory.track_peak_memory", "result")
    nodes = _cells(results, "graph.Graph.track_nodes", "result")
    ratio = _cells(results, "cpu.Paired.track_relative_latency", "result")
    low = _cells(results, "cpu.Paired.track_relative_latency", "stats_ci_99_a")
    high = _cells(results, "cpu.Paired.track_relative_latency", "stats_ci_99_b")
    for model in dict.fromkeys(model for model, _ in latency):
        before, after = (model, "eager"), (model, "optimized-1")
        yield (
            f"| {model} | {latency[before] * 1e3:.3g} → {latency[after] * 1e3:.3g}"
            f" | {ratio[after]:.3f} [{low[after]:.3f}, {high[after]:.3f}]"
            f" | {memory[before] / 2**20:.3g} → {memory[after] / 2**20:.3g}"
            f" | {nodes[before]:.0f} → {nodes[after]:.0f} |"
        )


def _cells(results: dict[str, Any], name: str, column: str) -> dict[tuple[str, ...], float]:
    """One column of a benchmark's results, by the names of its parameters."""
    stored = dict(zip(results["result_columns"], results["results"][name], strict=False))
    names = itertools.product(*stored["params"])
    keys = (tuple(part.strip("'") for part in parts) for parts in names)
    return dict(zip(keys, stored[column], strict=True))


if __name__ == "__main__":
    main()
