"""`python -m benchmarks`: measure the current commit, publish, and say where the dashboard is.

`--smoke` instead tries the suite out on one small model and keeps nothing. Results are filed under
the name of the machine: BENCHMARK_MACHINE, or its architecture and number of cores.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys

_COMMIT = "HEAD^!"
_HTML = ".asv/html"
_ADDRESS = "http://127.0.0.1:8000/"
_SERVE = f"python -m http.server --bind 127.0.0.1 --directory {_HTML} 8000"
_SMOKE_MODEL = "tiny_convnet"


def main(arguments: list[str]) -> int:
    machine = os.environ.get("BENCHMARK_MACHINE") or f"{platform.machine()}-{os.cpu_count()}core"
    _asv("machine", "--yes", "--machine", machine)
    if arguments == ["--smoke"]:
        return _smoke(machine)
    failures = _asv("run", _COMMIT, "--machine", machine, *_launch(), *arguments)
    if _asv("publish"):
        return 1
    print(f"Dashboard: {_HTML}/index.html; to open it run {_SERVE}, then see {_ADDRESS}")
    return failures


def _smoke(machine: str) -> int:
    only = ["--bench", rf"^(cpu|graph|optimize_cost)\..*'{_SMOKE_MODEL}'"]
    quick = ["--quick", "--dry-run", "--show-stderr"]
    command = ["run", _COMMIT, "--machine", machine, *_launch(), *quick, *only]
    if _asv("check"):
        return 1
    output = subprocess.run(
        [sys.executable, "-m", "asv", *command], stdout=subprocess.PIPE, text=True, check=False
    )
    print(output.stdout)
    if not re.search(rf"{_SMOKE_MODEL}( +\S+)? +\d", output.stdout):
        print("Nothing was measured.", file=sys.stderr)
        return 1
    return output.returncode


def _asv(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "asv", *arguments], check=False).returncode


def _launch() -> list[str]:
    """Apple's frameworks cannot be used after a fork."""
    return ["--launch-method", "spawn"] if sys.platform == "darwin" else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
