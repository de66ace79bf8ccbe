"""What `python -m benchmarks compare` tells on the real suite: `python -m tests.quality.alarms`.

HEAD is compared with itself, where each change that is told is a false alarm, and with versions in
which a change was planted. The commits of those are on no branch; the files here stay as they are.
Each comparison is kept as it ends, and not made again: four hours can be spent in parts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._git import git
from benchmarks.compare.trees import commit_on_no_branch
from benchmarks.compare.verdicts import FAILED, IMPROVED, INCONCLUSIVE, NOT_COMPARED, REGRESSED
from tests.quality.record import Entries, Recorder, read

_FOLDER, _FIGURE = Path("docs", "benchmarks"), "alarms"
NOTHING = "nothing"
_HOME = "optimizer/__init__.py"
_WRAPPED = """

import functools as _functools
import time as _time

import torch as _torch

_plain = optimize


def _spend(seconds):
    until = _time.perf_counter() + seconds
    while _time.perf_counter() < until:
        pass


class _Slower(_torch.nn.Module):
    def __init__(self, fast, share, cold):
        super().__init__()
        self.fast, self.share, self.cold, self.calls = fast, share, cold, 0

    def forward(self, *inputs):
        began = _time.perf_counter()
        found = self.fast(*inputs)
        self.calls += 1
        times = 30 if self.cold and self.calls <= 3 else 1
        _spend((_time.perf_counter() - began) * (times * (1 + self.share) - 1))
        return found


def _slower(module, share, cold=False):
    return _Slower(module, share, cold)


def _with_parameter(module):
    module.register_parameter("planted", _torch.nn.Parameter(_torch.zeros(1024)))
    return module


def _with_node(module, function, *more):
    first = next(iter(module.graph.nodes))
    with module.graph.inserting_after(first):
        module.graph.call_function(function, (first, *more))
    module.recompile()
    return module


@_functools.wraps(_plain)
def optimize(*args, **kwargs):
    return {change}(_plain(*args, **kwargs){arguments})
"""


@dataclass(frozen=True)
class Planted:
    """A change of what `optimize` returns.

    Attributes:
        name: what it is.
        change: the function above that makes it, and more arguments for it.
        cells: which of them show it, a regular expression.
    """

    name: str
    change: str
    arguments: str
    cells: str


_SMALL = "resnet18|mobilenet_v3_large|densenet121|shufflenet_v2_x1_0"
_LATENCY = rf"^cpu\.Latency\..*\(({_SMALL}), optimized-1\)"
_GRAPH = r"^graph\..*track_{}\(resnet18, optimized-1\)"
PLANTED = (
    Planted("3 % slower", "_slower", ", 0.03", _LATENCY),
    Planted("5 % slower", "_slower", ", 0.05", _LATENCY),
    Planted("10 % slower", "_slower", ", 0.10", _LATENCY),
    Planted("47 % slower, the first three calls 30 times", "_slower", ", 0.47, True", _LATENCY),
    Planted("a node more", "_with_node", ", getattr, 'ndim'", _GRAPH.format("nodes")),
    Planted("4 KiB more", "_with_parameter", "", _GRAPH.format("parameter_bytes")),
    Planted("a launch more", "_with_node", ", _torch.relu", _GRAPH.format("launches")),
)


def planted(change: Planted) -> str:
    """The hash of a commit that is HEAD with the change."""
    wrapped = _WRAPPED.replace("{change}", change.change).replace("{arguments}", change.arguments)
    content = git("show", f"HEAD:{_HOME}") + wrapped
    blob = git("hash-object", "-w", "--stdin", content=content)
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
        git("read-tree", "HEAD", **index)
        git("update-index", "--cacheinfo", f"100644,{blob},{_HOME}", **index)
        return commit_on_no_branch(git("write-tree", **index), change.name)


def compared(
    new: str, seed: int, minutes: float, cells: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The verdicts of HEAD and another commit.

    Raises:
        RuntimeError: the comparison was not made.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "verdicts.json")
        command = [sys.executable, "-m", "benchmarks", "compare", "HEAD", new, "--json", str(file)]
        command += ["--seed", str(seed), "--minutes", str(minutes)]
        command += [word for each in cells for word in ("--bench", each)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not file.exists():
            raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}")
        found: list[dict[str, Any]] = json.loads(file.read_text())["verdicts"]
    return found


def measured(
    runs: int, minutes: float, asked: Sequence[str], seed: int, kept: Container[str] = ()
) -> Iterator[tuple[str, dict[str, int]]]:
    """Compare again and again; yield of each comparison that is not kept its name and counts."""
    for number in range(seed, seed + runs):
        if (name := f"{NOTHING}, run {number}") not in kept:
            yield name, counts(compared("HEAD", number, minutes, asked))
    for change in PLANTED:
        if change.name not in kept:
            told = compared(planted(change), seed, minutes, [change.cells])
            yield change.name, counts(told, right=REGRESSED)


def counts(verdicts: Iterable[dict[str, Any]], right: str = "") -> dict[str, int]:
    """Of how many cells what was said; `right` is the verdict that is no alarm."""
    said = Counter(each["verdict"] for each in verdicts)
    false = sum(said[each] for each in {REGRESSED, IMPROVED, FAILED} - {right})
    told, undecided = said[right] if right else 0, said[INCONCLUSIVE]
    reached = said.total() - said[NOT_COMPARED]
    return {"reached": reached, "told": told, "undecided": undecided, "false": false}


def table(entries: Entries) -> Iterator[str]:
    """The lines of a Markdown table of all that was measured."""
    yield "| planted | runs | cells that were reached | told | could not be told | false |"
    yield "|---|---|---|---|---|---|"
    for name in (NOTHING, *(each.name for each in PLANTED)):
        found = [each for key, each in entries.items() if key.partition(", run ")[0] == name]
        sums = [sum(e[key] for e in found) for key in ("reached", "told", "undecided", "false")]
        yield f"| {name} | {len(found)} | {' | '.join(map(str, sums))} |"
    yield ""
    yield f"At {', '.join(dict.fromkeys(each['commit'] for each in entries.values()))}."


def main() -> None:
    """Measure, keep each comparison as it ends, and print the table of all that are kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.quality.alarms", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of HEAD with itself")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each comparison")
    parser.add_argument("--bench", action="append", default=[], help="of HEAD with itself")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first run")
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="where runs are kept")
    options = parser.parse_args()
    record = Recorder.of(options.folder, _FIGURE, f"--minutes {options.minutes:g}")
    kept = read(options.folder, _FIGURE)
    asked = (options.runs, options.minutes, options.bench, options.seed)
    for name, found in measured(*asked, kept):
        record(name, **found)
        print(f"{name}: {found}", flush=True)
    print("\n".join(table(read(options.folder, _FIGURE))))


if __name__ == "__main__":
    main()
