"""A process keeps what a lowered call frees, instead of faulting it in again."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

_SCRIPT = """
import ctypes, torch
from optimizer import optimize

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks rest".split()]
    _fields_ += [("more", ctypes.c_size_t * 5)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.argtypes = [ctypes.c_size_t]

def blocks_of_their_own():
    before = libc.mallinfo2().hblks
    libc.malloc(20 * 2**20)  # not freed: that would be the lesson itself
    return libc.mallinfo2().hblks - before

print(blocks_of_their_own())
optimize(torch.nn.Conv2d(3, 4, 3).eval(), torch.randn(1, 3, 8, 8), level=2)
print(blocks_of_their_own())
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="only glibc since 2.33 tells how it holds a block",
)
def test_after_lowering_a_block_of_20_mib_comes_from_the_heap() -> None:
    """A block that is mapped alone goes back to the system as soon as it is freed."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == ["1", "0"]
