"""The parent's end of a worker: start it, ask it, and say why it does not answer."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

_ROOT = Path(__file__).parents[2]


class PeerError(Exception):
    """A peer failed, and this is why."""


class Worker:
    """A process that answers lines of JSON, and everything that it starts; closed, they are gone.

    Each answer may take `limit` seconds.
    """

    def __init__(self, command: list[str], limit: float, threads: int = 1) -> None:
        self.limit, self.open = limit, True
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.errors = Path(self.folder.name, "stderr")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                env=_environment(self.folder.name, threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # a group, to be ended as one; not reached by Ctrl-C
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, once: afterwards its number may be another's."""
        if not self.open:
            return
        self.open = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.folder.cleanup()

    def ask(self, **question: Any) -> dict[str, Any]:
        """What it answers; raises PeerError."""
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            print(json.dumps(question), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Its next answer; raises PeerError."""
        if not select.select([self.process.stdout], [], [], self.limit)[0]:
            raise PeerError(f"no answer in {self.limit:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise PeerError(self._last_words())
        answer = json.loads(line)
        if "reason" in answer:
            raise PeerError(answer["reason"])
        return answer

    def _last_words(self) -> str:
        status = self.process.wait()
        ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        lines = self.errors.read_text(errors="replace").split("\n")
        return ": ".join([ended, *[line.strip() for line in lines if line.strip()][-1:]])


def worker(task: dict[str, Any], limit: float) -> Worker:
    """The process of `benchmarks.peers._worker` for a task."""
    asked = json.dumps({**task, "project": _project()})
    command = [sys.executable, "-P", "-m", f"{__package__}._worker", asked]
    return Worker(command, limit, task["threads"])


def _environment(folder: str, threads: int) -> dict[str, str]:
    """This process's, but with the suite on the path, so many threads, and empty caches."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    places = dict.fromkeys(("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), folder)
    counts = dict.fromkeys(names, str(threads))
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **counts, **places, "PYTHONPATH": path}


def _project() -> str:
    """Where the packages are that are measured: for asv, a checkout that is not this one."""
    found = importlib.util.find_spec("optimizer")
    return str(Path(found.origin).parents[1]) if found and found.origin else str(_ROOT)
