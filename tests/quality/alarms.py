"""What `python -m benchmarks compare` tells on the real suite: `python -m tests.quality.alarms`.

HEAD is compared with itself, where each change that is told is a false alarm, and with versions in
which a change was planted. The commits of those are on no branch; the files here stay as they are.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._machine import machine_name
from benchmarks.compare.trees import commit_on_no_branch, git
from benchmarks.compare.verdicts import FAILED, IMPROVED, NOT_COMPARED, REGRESSED

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


def table(runs: int, minutes: float, asked: Sequence[str], seed: int) -> Iterator[str]:
    """The lines of a Markdown table, each as it is known."""
    yield "| planted | runs | of cells that were reached | told | false |"
    yield "|---|---|---|---|---|"
    yield line("nothing", [compared("HEAD", seed + each, minutes, asked) for each in range(runs)])
    for change in PLANTED:
        found = compared(planted(change), seed, minutes, [change.cells])
        yield line(change.name, [found], right=REGRESSED)


def line(name: str, several: Sequence[Sequence[dict[str, Any]]], right: str = "") -> str:
    """Of some comparisons, how many cells were told; `right` is the verdict that is no alarm."""
    said = Counter(each["verdict"] for found in several for each in found)
    reached = said.total() - said[NOT_COMPARED]
    false = sum(said[each] for each in {REGRESSED, IMPROVED, FAILED} - {right})
    told = said[right] if right else 0
    return f"| {name} | {len(several)} | {reached} | {told} | {false} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.quality.alarms", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of HEAD with itself")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each comparison")
    parser.add_argument("--bench", action="append", default=[], help="of HEAD with itself")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{git('rev-parse', '--short', 'HEAD')} on {machine_name()}\n", flush=True)
    for line in table(options.runs, options.minutes, options.bench, options.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
