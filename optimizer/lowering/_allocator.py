"""Memory that one call frees and the next takes again."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from typing import Any

import torch

from optimizer._effects import Effects
from optimizer._trees import tensors_in

_BLOCK = 31 * 2**20  # bytes; of blocks of 32 MiB and more glibc learns nothing
_SLACK = 4096  # that it takes beside a block
_MOST = 2**31 - 1  # that mallopt takes
_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_thresholds = {_TRIM: 2 * _BLOCK, _MMAP: _BLOCK}  # of this process, once it kept anything


class Allocations(Effects):  # type: ignore[no-untyped-call]
    """Besides, the memory that results take: the largest, and the most at once, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.most = self._held = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if all(each.alias_info is None for each in func._schema.returns):
            for tensor in tensors_in(result):
                self._note(tensor)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size() if tensor.device.type == "cpu" else 0
        self._held += size
        self.largest, self.most = max(self.largest, size), max(self.most, self._held)
        weakref.finalize(tensor, self._forget, size).atexit = False

    def _forget(self, size: int) -> None:
        self._held -= size


def keep_freed_memory(taken: Allocations) -> None:
    """Let the C library keep twice what a call takes of what is freed, for the whole process.

    glibc gives the free end of its heap back where it exceeds twice the largest block that was
    ever freed alone (mallopt(3): the threshold is dynamic), and takes it again with a page fault
    for each 4 KiB: 2,600 of them, an eighth of its time, in each call of densenet121. One large
    block tells it otherwise, which is never touched and so takes no memory. It learns of blocks
    up to 32 MiB, and gives larger ones back at once: of those it is told, unless its environment
    chooses its thresholds. Other libraries are not affected.
    """
    torch.empty(_BLOCK, dtype=torch.uint8, device="cpu")
    if any(name in os.environ for name in _CHOSEN):
        return
    for threshold, size in ((_TRIM, 2 * taken.most), (_MMAP, taken.largest + _SLACK)):
        if size > _thresholds[threshold]:
            _thresholds[threshold] = size
            with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
                ctypes.CDLL(None).mallopt(threshold, min(size, _MOST))
