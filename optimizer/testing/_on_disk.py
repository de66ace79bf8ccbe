"""What is being tried, on disk: a crash of the process loses nothing but the process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "FUZZ_CRASHES"  # the environment variable that names it; nothing is written without


@contextmanager
def on_disk(test: Callable[[], str]) -> Iterator[None]:
    """Keep the text of a test in a file while the block runs; it stays if the process dies."""
    folder = os.environ.get(FOLDER)
    if not folder:
        yield
        return
    path = Path(folder) / f"test_crash_{os.getpid()}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(test(), encoding="utf-8")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
