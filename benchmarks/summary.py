"""`python -m benchmarks.summary`: the committed results of the latest commit as one table.

One row a model: of one forward, its median latency and peak memory in eager, at level 1 and at
level 2, and the paired ratios of latencies, which are what to read for "is it faster".
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .site.numbers import LATENCY, MEMORY, RATIO
from .stored import LISTING, suite
from .subjects import DEVICES

RESULTS = Path("results")
_HEAD = (
    "| model | latency, ms | level 1 of eager | level 2 of eager | peak memory, MiB |\n"
    "|---|---|---|---|---|"
)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.summary", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    device = parser.parse_args(arguments).device
    names = [f"{device}.{each}" for each in (LATENCY, MEMORY, RATIO)]
    runs = [json.loads(file.read_text()) for file in RESULTS.glob("*/[0-9a-f]*-*.json")]
    whole = [run for run in runs if run["results"].keys() >= {*names}]
    if not whole:
        sys.exit("There are no results yet: run `python -m tox run -e bench` first.")
    latest = max(whole, key=lambda run: run["date"])
    print(f"Commit {latest['commit_hash'][:8]} on {latest['params']['machine']}\n\n{_HEAD}")
    for row in _rows(latest, *names):
        print(row)


def _rows(results: dict[str, Any], *names: str) -> Iterator[str]:
    latency, memory, ratio = (_cells(results, name, "result") for name in names)
    low, high = (_cells(results, names[-1], f"stats_ci_99_{end}") for end in "ab")
    for model in dict.fromkeys(model for model, _ in latency):
        rewritten = [(model, variant) for variant in ("optimized-1", "optimized-2")]
        every = [(model, "eager"), *rewritten]
        if not (latency.keys() >= set(every) and high.keys() >= set(rewritten)):
            continue  # some of it was not measured, or failed
        bytes_held = [memory.get(each) for each in every]
        columns = [
            " → ".join(f"{latency[each] * 1e3:.3g}" for each in every),
            *(f"{ratio[each]:.3f} [{low[each]:.3f}, {high[each]:.3f}]" for each in rewritten),
            " → ".join("n/a" if each is None else f"{each / 2**20:.3g}" for each in bytes_held),
        ]
        yield f"| {model} | {' | '.join(columns)} |"


def _cells(results: dict[str, Any], name: str, column: str) -> dict[tuple[str, ...], float]:
    """One column of a benchmark's results, by the names of its parameters: what was measured."""
    stored = dict(zip(results["result_columns"], results["results"][name], strict=False))
    if stored.get("version") != _versions().get(name, stored.get("version")):
        return {}  # by an older definition
    names = itertools.product(*stored["params"])
    keys = (tuple(part.strip("'") for part in parts) for parts in names)
    found = zip(keys, stored.get(column) or (), strict=False)
    return {key: value for key, value in found if value is not None}


def _versions() -> dict[str, str]:
    """Of the benchmarks as asv listed them last."""
    listing = RESULTS / LISTING.name
    return suite(listing) if listing.exists() else {}


if __name__ == "__main__":
    main(sys.argv[1:])
