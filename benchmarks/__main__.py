"""`python -m benchmarks`: measure the current commit, publish, and say what differs.

`compare BASE NEW` tells what one version changed against another. `history --commits N` measures
earlier commits. `--smoke` tries the suite out on one small model and keeps nothing. `machine` says
under which name results are filed here.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ._machine import machine_name, register
from .measuring import main as measure
from .running import launch

_COMMIT = "HEAD^!"
_SMOKE_MODEL = "tiny_convnet"


def main(arguments: list[str]) -> int:
    name, rest = (arguments or [""])[0], arguments[1:]
    if name == "compare":
        from .compare.command import main as compare

        return compare(rest)
    if name == "history":
        from .history import main as history

        return history(rest)
    if arguments == ["machine"]:
        print(machine_name())
        return 0
    return _smoke(register()) if arguments == ["--smoke"] else measure(arguments)


def _smoke(machine: str) -> int:
    if _asv("check"):
        return 1
    only = ["--bench", rf"^(cpu|graph|optimize_cost)\..*'{_SMOKE_MODEL}'"]
    quick = ["--quick", "--dry-run", "--show-stderr"]
    with _results_as_before():
        status, output = _heard("run", _COMMIT, "--machine", machine, *launch(), *quick, *only)
    print(output)
    if not re.search(rf"{_SMOKE_MODEL}( +\S+)? +\d", output):
        print("Nothing was measured.", file=sys.stderr)
        return 1
    return status


@contextlib.contextmanager
def _results_as_before() -> Iterator[None]:
    """Even a dry run describes its machine and its benchmarks among the results."""
    results = Path("results")
    before = {file: file.read_bytes() for file in results.rglob("*.json")}
    yield
    for file in set(results.rglob("*.json")) - set(before):
        file.unlink()
    for file, content in before.items():
        file.write_bytes(content)


def _heard(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "asv", *arguments]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return finished.returncode, finished.stdout


def _asv(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "asv", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
