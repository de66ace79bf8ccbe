"""The name that results are filed under, and what asv is told of this machine.

The tox command, plain `asv run`, `compare` and the peers ask here, so that one machine has one
name. It is of what numbers depend on and of nothing that changes by itself: a virtual machine has
another host name each time, and the same processor.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

_PROCESSORS = Path("/proc/cpuinfo")
# What tells processors apart: on x86, and on Arm.
_FIELDS = (("cpu family", "model", "stepping"), ("CPU implementer", "CPU part", "CPU revision"))


def machine_name() -> str:
    """BENCHMARK_MACHINE, or processor, number of cores and GPU, such as x86_64-6-143-8-2core."""
    return os.environ.get("BENCHMARK_MACHINE") or _fingerprint()


def register() -> str:
    """Make asv file under that name, also where its command names no machine; return the name.

    Each difference in what describes a machine starts new series, so the system is without its
    release and memory is rounded.
    """
    from asv.machine import Machine, MachineCollection

    name, description = machine_name(), Machine.get_defaults()
    gigabytes = round(int(description["ram"] or 0) / 1e9)
    description |= {"machine": name, "os": platform.system(), "ram": f"{gigabytes} GB"}
    Machine.hardcoded_machine_name = name
    MachineCollection.save(name, description)
    return name


def _fingerprint() -> str:
    parts = [platform.machine(), *_processor(), f"{os.cpu_count()}core", gpu()]
    return re.sub(r"[^\w.-]+", "-", "-".join(filter(None, parts)))


def _processor() -> list[str]:
    """The numbers of the first processor on Linux; a name elsewhere, and nothing if there is none.

    A virtual machine may call every processor alike, but tells its numbers.
    """
    text = _PROCESSORS.read_text() if _PROCESSORS.exists() else ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    found = {key.strip(): value.strip() for key, _, value in lines}
    for fields in _FIELDS:
        if found.keys() >= set(fields):
            return [found[field] for field in fields]
    return [_told("sysctl", "-n", "machdep.cpu.brand_string")]  # macOS: such as Apple M2


def gpu() -> str:
    """What NVIDIA's driver calls the first GPU, such as NVIDIA H100 80GB HBM3; "" without one."""
    return _told("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def _told(*command: str) -> str:
    """The first line that a command says; "" where it is not here, or fails."""
    try:
        said = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said.strip().partition("\n")[0]
