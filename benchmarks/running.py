"""Runs asv as a process that ends with this one, and passes on what it says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

TOLD = "BENCHMARK_TOLD"  # names the file
TOO_LONG = 124
_PATIENCE = 10.0  # seconds that asv has to end what it started


def _say(line: str) -> None:
    print(line, flush=True)


def asv(
    *arguments: str,
    told: Path | None = None,
    limit: float | None = None,
    hear: Callable[[str], None] = _say,
) -> int:
    """Run asv and return its exit status.

    Args:
        arguments: of asv.
        told: the file in which it writes each cell as it begins.
        limit: seconds after which it is ended, and TOO_LONG is returned.
        hear: what is done with each line that it says, but for what is n/a; it is printed.
    """
    environment = os.environ | ({TOLD: str(told)} if told else {})
    command = [sys.executable, "-m", "benchmarks._asv", *arguments]
    with _started(command, environment) as process:
        speaker = threading.Thread(target=_pass_on, args=(process, hear), daemon=True)
        speaker.start()
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return TOO_LONG
        speaker.join(_PATIENCE)  # what was said last is often why
        return status


@contextlib.contextmanager
def _started(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, so that Ctrl-C reaches us and we end the whole of it."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Ask asv to end what it started, and end what is left.

    A server that was just starting is not looked after yet, and in a group of its own.
    """
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE)
    for pid in _of_session(process.pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _of_session(leader: int) -> Iterator[int]:
    listed = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]  # Linux
    if not listed:
        listed = list(map(int, subprocess.check_output(["ps", "-Ao", "pid="], text=True).split()))
    for pid in listed:
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader:
                yield pid


def _pass_on(process: subprocess.Popen[str], hear: Callable[[str], None]) -> None:
    """Hear line by line; the tables of asv have a line for each cell that was not asked for."""
    assert process.stdout is not None
    for line in process.stdout:
        if not line.rstrip().endswith("n/a") and line.strip():
            hear(line.rstrip())


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM is as Ctrl-C while this is entered: what was started is ended, what is kept told."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def launch() -> list[str]:
    """What `asv run` needs here: Apple's frameworks cannot be used after a fork."""
    return ["--launch-method", "spawn"] if sys.platform == "darwin" else []
