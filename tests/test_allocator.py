"""A process keeps what a lowered call frees, instead of faulting it in again."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest
import torch

from optimizer.lowering import _allocator
from optimizer.lowering._allocator import Allocations, keep_freed_memory

_SCRIPT = """
import ctypes, resource, sys, torch
from optimizer import optimize

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.argtypes = [ctypes.c_size_t]

def is_of_its_own(size):
    before = libc.mallinfo2().hblks
    for _ in range(5):  # what the heap has free may hold the first
        libc.malloc(size * 2**20)  # not freed: that would be the lesson itself
    return int(libc.mallinfo2().hblks > before)

def faults(x):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fast(x)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(is_of_its_own(20))
channels, size = map(int, sys.argv[1:])
x = torch.randn(1, 1, 1024, 1024)
fast = optimize(torch.nn.Conv2d(1, channels, 1).eval(), x, level=2, check=None)
with torch.no_grad():
    # Until the heap is large enough, a small block may lie where a large one was.
    found = min(faults(x) for _ in range(6))
print(int(found > 5000), is_of_its_own(size))
"""
ON_GLIBC = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="only glibc since 2.33 tells how it holds a block",
)


@ON_GLIBC
@pytest.mark.parametrize(
    ("channels", "size", "chosen", "found"),
    [
        (1, 20, {}, ["1", "0", "0"]),
        (20, 79, {}, ["1", "0", "0"]),
        (20, 20, {"MALLOC_TRIM_THRESHOLD_": "131072"}, ["1", "1", "1"]),
        (20, 20, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, ["1", "1", "1"]),
        (20, 20, {"MALLOC_MMAP_THRESHOLD_": "131072"}, ["1", "1", "1"]),
    ],
    ids=["4 MiB", "80 MiB", "a chosen threshold", "a chosen tunable", "another"],
)
def test_what_a_lowered_call_takes_is_kept(
    channels: int, size: int, chosen: dict[str, str], found: list[str]
) -> None:
    """No call faults it in again; a block that is mapped alone goes back as soon as it is freed."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(channels), str(size)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | chosen,
    )

    assert done.stdout.split() == found


def test_what_is_held_at_once_is_counted_without_views() -> None:
    with Allocations() as taken:
        x = torch.zeros(1000)
        y = x + 1
        del x
        z = y.view(10, 100).t() * 2
        del y, z
        torch.zeros(500).add_(1)

    assert (taken.largest, taken.most) == (4000, 8000)


def test_what_another_device_holds_is_not_counted() -> None:
    with Allocations() as taken:
        torch.zeros(1000, device="meta")

    assert (taken.largest, taken.most) == (0, 0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the C library is told: a parameter and a size."""
    calls: list[tuple[int, int]] = []

    class Library:
        def __init__(self, name: None) -> None:
            self.mallopt = lambda *call: calls.append(call)

    for name in _allocator._CHOSEN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_allocator, "_thresholds", dict(_allocator._thresholds))
    monkeypatch.setattr(ctypes, "CDLL", Library)
    return calls


def taken(largest: int, most: int) -> Allocations:
    found = Allocations()
    found.largest, found.most = largest, most
    return found


def test_thresholds_only_rise_to_what_the_library_takes(told: list[tuple[int, int]]) -> None:
    for largest, most in ((10, 20), (2**26, 2**28), (2**25, 2**27), (2**40, 2**41)):
        keep_freed_memory(taken(largest, most))

    assert told[:2] == [(-1, 2**29), (-3, 2**26 + 4096)]
    assert told[2:] == [(-1, 2**31 - 1), (-3, 2**31 - 1)]


def test_another_c_library_is_left_alone(
    told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[None] = []
    monkeypatch.setattr(ctypes, "CDLL", asked.append)  # of None, there is no mallopt
    keep_freed_memory(taken(2**26, 2**28))

    assert asked == [None, None]
    assert not told
