"""`python -m benchmarks.summary`: the committed results of the latest commit as one table.

One row a model: of one forward, its median latency and peak memory in eager, at level 1 and at
level 2, and the paired ratios of latencies, which are what to read for "is it faster".
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
    "| model | latency, ms | level 1 of eager | level 2 of eager | peak memory, MiB |\n"
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
    ratio = _cells(results, "cpu.Paired.track_relative_latency", "result")
    low = _cells(results, "cpu.Paired.track_relative_latency", "stats_ci_99_a")
    high = _cells(results, "cpu.Paired.track_relative_latency", "stats_ci_99_b")
    for model in dict.fromkeys(model for model, _ in latency):
        rewritten = [(model, variant) for variant in ("optimized-1", "optimized-2")]
        every = [(model, "eager"), *rewritten]
        cells = [
            " → ".join(f"{latency[each] * 1e3:.3g}" for each in every),
            *(f"{ratio[each]:.3f} [{low[each]:.3f}, {high[each]:.3f}]" for each in rewritten),
            " → ".join(f"{memory[each] / 2**20:.3g}" for each in every),
        ]
        yield f"| {model} | {' | '.join(cells)} |"


def _cells(results: dict[str, Any], name: str, column: str) -> dict[tuple[str, ...], float]:
    """One column of a benchmark's results, by the names of its parameters."""
    stored = dict(zip(results["result_columns"], results["results"][name], strict=False))
    names = itertools.product(*stored["params"])
    keys = (tuple(part.strip("'") for part in parts) for parts in names)
    return dict(zip(keys, stored[column], strict=True))


if __name__ == "__main__":
    main()
