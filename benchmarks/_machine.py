"""The name that results are filed under."""

from __future__ import annotations

import os
import platform


def machine_name() -> str:
    """BENCHMARK_MACHINE, or the machine's architecture and number of cores."""
    return os.environ.get("BENCHMARK_MACHINE") or f"{platform.machine()}-{os.cpu_count()}core"
