"""`python -m benchmarks.peers`: ours beside what a user would pick instead, as tables.

Every peer runs in a process of its own, and they are asked in turn. Results are kept in
`results/MACHINE/peers-COMMIT.jsonl` after each model; the same command continues an interrupted
run, and tries again what failed. The tables of all that is kept are printed at the end.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import os
import platform
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks._git import git_or_nothing
from benchmarks._machine import gpu, machine_name
from benchmarks._workloads import LIBRARIES, TORCHVISION
from benchmarks.subjects import EAGER, PEER, all_subjects, names

from ._process import worker
from ._rounds import Plan, measured
from ._store import Store
from ._table import tables

RESULTS = Path("results")
_QUICK = Plan(rounds=6, block_seconds=0.05)
_PACKAGES = ("torch", "torchvision", "onnxruntime", "openvino")
# Seconds until a peer is ready, roughly: to start, and to prepare a model of torchvision's.
_START = 4.0
_PREPARE = {"compile": 40.0, "compile-freezing": 60.0, "onnxruntime": 10.0, "openvino": 3.0}
_PREPARE_OTHER = 2.0


def main(arguments: list[str]) -> None:
    options = _options(arguments)
    store = _latest(options.device) if options.table else _store(options)
    if not options.table:
        _measure(options, store)
    versions = ", ".join(map(" ".join, store.about["versions"].items()))
    print(f"Commit {store.about['commit']} on {store.about['cpu']}, {versions}\n")
    print("\n".join(tables(store.cells)))


def _store(options: argparse.Namespace) -> Store:
    about = _about()
    file = RESULTS / machine_name() / f"peers-{about['commit']}.jsonl"
    return Store(None if options.quick else file, about)


def _latest(device: str) -> Store:
    every = [Store(file, {}) for file in RESULTS.glob("*/peers-*.jsonl")]
    stores = [each for each in every if any(place[0] == device for place in each.cells)]
    if not stores:
        sys.exit(f"There are no results on {device} yet: leave --table away.")
    return max(stores, key=lambda store: store.about["date"])


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    told = "workloads, or timm and transformers for all of theirs; torchvision's if not given"
    parser.add_argument("--models", type=_names, help=told)
    parser.add_argument("--peers", type=_names, help=f"of {', '.join(all_subjects())}")
    parser.add_argument("--threads", type=_numbers, default=[1], help="such as 1,2")
    parser.add_argument("--batch", type=_numbers, default=[1], help="such as 1,16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=Plan().rounds, help="at least 6")
    parser.add_argument("--quick", action="store_true", help="few and short rounds; keeps nothing")
    parser.add_argument("--table", action="store_true", help="only print the latest that is kept")
    options = parser.parse_args(arguments)
    unknown = set(options.peers or []) - set(all_subjects())
    if unknown or options.rounds < 6:
        parser.error(f"no such peers: {unknown}" if unknown else "too few rounds for an interval")
    return options


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _measure(options: argparse.Namespace, store: Store) -> None:
    asked = options.models or TORCHVISION
    models = [model for name in asked for model in LIBRARIES.get(name, [name])]
    peers = [EAGER, *(options.peers or names(PEER, options.device))]
    plan = _QUICK if options.quick else Plan(rounds=options.rounds)
    tasks = list(itertools.product(options.threads, options.batch, models))
    guess = _seconds(peers, plan) * len(tasks) / 60
    print(f"{len(tasks)} tasks, {len(set(peers))} peers: about {guess:.0f} minutes", flush=True)
    for number, (threads, batch, model) in enumerate(tasks, 1):
        task = {"device": options.device, "dtype": options.dtype, "model": model}
        task |= {"batch": batch, "threads": threads}
        started = time.monotonic()
        _measure_task(task, peers, plan, store)
        seconds = time.monotonic() - started
        done = f"{number}/{len(tasks)} {model}, batch {batch}, {threads} threads"
        print(f"{done}: {seconds:.0f} s", flush=True)


def _measure_task(task: dict[str, Any], peers: list[str], plan: Plan, store: Store) -> None:
    """Measure what is not kept yet beside eager."""
    place = tuple(task.values())
    missing = [peer for peer in peers if store.lacks((*place, peer))]
    if missing:
        cells = measured(missing, lambda peer: worker({**task, "peer": peer}, plan.limit), plan)
        store.add({(*place, peer): cell for peer, cell in cells.items()})


def _seconds(peers: list[str], plan: Plan) -> float:
    """A guess for one task: calls that do not count make a block half as long again."""
    ready = sum(_START + _PREPARE.get(peer, _PREPARE_OTHER) for peer in peers)
    return ready + plan.rounds * plan.block_seconds * 1.5 * len(peers)


def _about() -> dict[str, Any]:
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": ", ".join(filter(None, [_processor(), gpu()])),
        "cores": os.cpu_count(),
        "versions": dict(_versions()),
    }


def _commit() -> str:
    asked = ("describe", "--always", "--dirty", "--abbrev=8", "--exclude=*")
    return git_or_nothing(*asked) or "unknown"


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    return _named(information.read_text() if information.exists() else "") or platform.processor()


def _named(information: str) -> str:
    """The processor's name with its family and model: a virtual machine may name all alike."""
    lines = (line.partition(":") for line in information.splitlines())
    found = {key.strip(): value.strip() for key, _, value in lines}
    numbers = [f"{key} {found[key]}" for key in ("cpu family", "model") if key in found]
    return ", ".join([found["model name"], *numbers]) if "model name" in found else ""


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"


if __name__ == "__main__":
    main(sys.argv[1:])
