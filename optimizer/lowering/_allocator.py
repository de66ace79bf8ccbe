"""Memory that one call frees and the next takes again."""

from __future__ import annotations

import torch

_BLOCK = 31 * 2**20  # bytes; of blocks of 32 MiB and more glibc learns nothing


def keep_freed_memory() -> None:
    """Let the C library keep up to 62 MiB of what is freed, for the whole process.

    glibc gives the free end of its heap back where it exceeds twice the largest block that was
    ever freed alone (mallopt(3): the threshold is dynamic), and takes it again with a page fault
    for each 4 KiB: 2,600 of them, an eighth of its time, in each call of densenet121. One large
    block tells it otherwise, which is never touched and so takes no memory. Other libraries are
    not affected.
    """
    torch.empty(_BLOCK, dtype=torch.uint8, device="cpu")
