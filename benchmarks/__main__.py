"""`python -m benchmarks`: measure the current commit, publish, and say where the dashboard is.

`compare BASE NEW` tells what one version changed against another. `--smoke` tries the suite out on
one small model and keeps nothing. `machine` says under which name results are filed here.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ._machine import machine_name, register
from .peers import ASKED

_COMMIT = "HEAD^!"
_HTML = ".asv/html"
_ADDRESS = "http://127.0.0.1:8000/"
_SERVE = f"python -m http.server --bind 127.0.0.1 --directory {_HTML} 8000"
_PARTS = ("graph", "optimize_cost", "cpu", "cuda", "mps")
_SMOKE_MODEL = "tiny_convnet"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["compare"]:
        from .compare.command import main as compare

        return compare(arguments[1:])
    if arguments == ["machine"]:
        print(machine_name())
        return 0
    machine = register()
    if arguments == ["--smoke"]:
        return _smoke(machine)
    run = ["run", _COMMIT, "--machine", machine, *_launch(), *arguments]
    selected = {"-b", "--bench"} & set(arguments)
    # asv keeps what a run measured when the run ends; an interruption loses one part only.
    parts = [[]] if selected else [["--bench", f"^{part}\\."] for part in _parts()]
    failures = [_asv(*run, *part) for part in parts]
    if _asv("publish"):
        return 1
    print(f"Dashboard: {_HTML}/index.html; to open it run {_SERVE}, then see {_ADDRESS}")
    return max(failures)


def _parts() -> list[str]:
    return [*_PARTS, *(["peers"] if os.environ.get(ASKED) else [])]


def _smoke(machine: str) -> int:
    if _asv("check"):
        return 1
    only = ["--bench", rf"^(cpu|graph|optimize_cost)\..*'{_SMOKE_MODEL}'"]
    quick = ["--quick", "--dry-run", "--show-stderr"]
    with _results_as_before():
        status, output = _heard("run", _COMMIT, "--machine", machine, *_launch(), *quick, *only)
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


def _launch() -> list[str]:
    """Apple's frameworks cannot be used after a fork."""
    return ["--launch-method", "spawn"] if sys.platform == "darwin" else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
