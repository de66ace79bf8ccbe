"""Set up the process to work on a graph, and leave it to the caller as it was."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pickle import dumps, loads
from typing import Any

import torch
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as fx_tracing

from optimizer.core.node import has_global_hooks


@contextmanager
def undisturbed() -> Iterator[None]:
    """Make tensors that outlive inference mode, without gradients or a search for garbage."""
    collecting = gc.isenabled()  # a graph is one large cycle, which is long to search
    gc.disable()
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        (gc.enable if collecting else gc.disable)()


def release_freed_memory() -> None:
    """Give the memory of young garbage, and what glibc keeps of freed memory, to the system."""
    gc.collect(0)
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


@contextmanager
def forked_rng() -> Iterator[Callable[[], bool]]:
    """Draw the same numbers in each such block, and put back all generators of the process.

    What another thread draws meanwhile, it draws again. Yield a test of whether any was drawn.
    """
    before = [(get, put, get()) for get, put in _generators()]

    def changed() -> bool:
        return any(not _same(get(), was) for get, _, was in before)

    try:
        yield changed
    finally:
        for get, put, was in before:
            if not _same(get(), was):
                put(was)


def _generators() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Yield for each generator a function that reads its state, and one that writes it."""
    yield random.getstate, random.setstate
    for each in (torch.default_generator, *torch.cuda.default_generators):
        yield each.get_state, each.set_state
    if torch.backends.mps.is_available():
        yield torch.mps.get_rng_state, torch.mps.set_rng_state
    if numpy := getattr(sys.modules.get("numpy"), "random", None):
        # As bytes: equality of its arrays is another array.
        yield lambda: dumps(numpy.get_state()), lambda state: numpy.set_state(loads(state))


def _same(new: Any, old: Any) -> bool:
    return torch.equal(new, old) if isinstance(new, torch.Tensor) else bool(new == old)


def is_tracing() -> bool:
    """Return whether fx traces: a mark of the process, and of each thread from torch 2.15 on."""
    ask = getattr(fx_tracing, "_get_is_fx_tracing", None)
    return ask() if ask else fx_tracing._is_fx_tracing_flag


def is_watched() -> bool:
    """Return whether a dispatch mode, a transform or a hook sees what a call runs or calls."""
    return bool(
        sees_calls()
        or torch._C._is_tracing()
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack()
        or _functorch.peek_interpreter_stack() is not None
    )


def sees_calls() -> bool:
    """Return whether a compiler, forward-mode gradients or hooks of all modules see a call."""
    compiling, in_forward_ad = torch.compiler.is_compiling(), forward_ad._current_level >= 0
    return compiling or in_forward_ad or has_global_hooks()
