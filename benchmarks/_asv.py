"""asv as our commands run it: `python -m benchmarks._asv run ...`.

It writes down each cell as it begins, in the file that BENCHMARK_TOLD names, because asv itself
speaks only when the last cell of a benchmark is done. It replaces files as a whole, because asv
writes over them, and a full disk would cut off what was measured before. What fails is a sentence.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asv import main as asv
from asv import runner, util

from .running import TOLD


def main() -> None:
    """Run asv on this command's arguments."""
    if os.environ.get(TOLD):
        begin = runner._run_benchmark_single_param
        runner._run_benchmark_single_param = _telling(begin, Path(os.environ[TOLD]))
    util.write_json = _whole(util.write_json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # asv then ends what it started
    try:
        asv.main()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:  # of asv's many ways to fail, each is told alike
        sys.exit(_sentence(error))


def _telling(begin: Callable[..., Any], file: Path) -> Callable[..., Any]:
    @functools.wraps(begin)
    def told(benchmark: dict[str, Any], spawner: Any, index: int, **options: Any) -> Any:
        with file.open("a") as lines:
            lines.write(f"{cell_name(benchmark, index)}\n")
        return begin(benchmark, spawner, index, **options)

    return told


def cell_name(benchmark: dict[str, Any], index: int) -> str:
    """A benchmark with one choice of its parameters, as `--bench` looks for it."""
    if not benchmark["params"]:
        return benchmark["name"]
    choices = itertools.product(*benchmark["params"])
    return f"{benchmark['name']}({', '.join(next(itertools.islice(choices, index, None)))})"


def _whole(write: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(write)
    def written(path: str | Path, *content: Any, **options: Any) -> None:
        beside = Path(f"{path}.partial")
        try:
            write(str(beside), *content, **options)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        beside.replace(path)

    return written


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"asv stopped: {error.strerror}{where}. What was kept before is as it was."
    return f"asv stopped: {type(error).__name__}: {error}. What was kept before is as it was."


if __name__ == "__main__":
    main()
