"""The circumstances in which a graph is worked on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def undisturbed() -> Iterator[None]:
    """Make tensors that outlive inference mode, and do not look for garbage meanwhile.

    A graph is one large cycle: searching it again and again takes a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        if enabled:
            gc.enable()
