"""The circumstances in which a graph is worked on, and that they are the caller's afterwards."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import torch
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as fx_tracing

from optimizer.core.node import has_global_hooks

Result = TypeVar("Result")


def put_back(restore: Callable[[], object], run: Callable[[], Result]) -> Result:
    """`run()`, then `restore()`, whatever happens.

    A Ctrl-C may come at any line, the first of a `finally` or of an `__exit__` included. So it
    is done twice, and `restore` must allow that: one interrupt cannot hit both.
    """
    try:
        try:
            return run()
        finally:
            restore()
    finally:
        restore()


@contextmanager
def ignoring(message: str, category: type[Warning]) -> Iterator[None]:
    """Ignore some warnings in the block, as `warnings.filterwarnings` does.

    `warnings.catch_warnings` puts back the list of filters that it found: in two threads at once,
    it leaves those of one behind for good. Here one filter comes and goes.
    """
    mark = f"(?#{next(_MARKS)})"  # equal filters are merged
    warnings.filterwarnings("ignore", message + mark, category)
    filters: Any = warnings.filters
    own = next(each for each in filters if each[1] and each[1].pattern.endswith(mark))
    try:
        yield
    finally:
        for each in (filters, warnings.filters):  # another may have been put in its place
            while own in each:
                cast(Any, each).remove(own)


def undisturbed(run: Callable[[], Result]) -> Result:
    """`run()`, whose tensors outlive inference mode, and no search for garbage meanwhile.

    A graph is one large cycle: searching it again and again takes a third of the time.
    """
    collecting, recording, leave_modes = gc.isenabled(), torch.is_grad_enabled(), _modes()

    def restore() -> None:
        """Also what a context manager of torch would have, had it not been interrupted."""
        leave_modes()
        torch._C._set_grad_enabled(recording)
        if collecting:
            gc.enable()

    def quietly() -> Result:
        gc.disable()
        with torch.inference_mode(False), torch.no_grad():
            return run()

    return put_back(restore, quietly)


def alone_and_unpatched(run: Callable[[], Result]) -> Result:
    """`run()`, which traces by fx, and afterwards nothing in the process is patched.

    Two at once would undo each other's patches in the wrong order.
    """
    with _TRACING:
        return put_back(_what_fx_patches(), run)


def _what_fx_patches() -> Callable[[], None]:
    """What undoes all that fx patches from now on, should its own undoing be interrupted."""
    patcher, tracing = fx_tracing.CURRENT_PATCHER, is_tracing()
    leave_modes = _modes()

    def undo() -> None:
        leave_modes()
        while (current := fx_tracing.CURRENT_PATCHER) is not patcher and current is not None:
            for patch in reversed(current.patches_made):
                with suppress(KeyError):  # undone already
                    patch.revert()
            fx_tracing.CURRENT_PATCHER = patcher
        _set_tracing(tracing)

    return undo


def is_tracing() -> bool:
    """Whether fx traces: a mark of the process, and of each thread from torch 2.15 on."""
    ask = getattr(fx_tracing, "_get_is_fx_tracing", None)
    return ask() if ask else fx_tracing._is_fx_tracing_flag


def is_watched() -> bool:
    """Whether operators or modules of a call are looked at, or made to do something else."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack()
        or _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or has_global_hooks()
    )


def _set_tracing(value: bool) -> None:
    if hasattr(fx_tracing, "_set_is_fx_tracing"):
        fx_tracing._set_is_fx_tracing(value)
    else:
        fx_tracing._is_fx_tracing_flag = value


def _modes() -> Callable[[], None]:
    """What leaves the modes of torch that are entered from now on."""
    functions, dispatchers = _FUNCTION_MODES(), _DISPATCH_MODES()

    def leave() -> None:
        while functions < _FUNCTION_MODES():
            torch._C._pop_torch_function_stack()
        while dispatchers < _DISPATCH_MODES():
            torch._C._pop_torch_dispatch_stack(None)

    return leave


_TRACING = threading.RLock()
_MARKS = itertools.count()
_FUNCTION_MODES = torch._C._len_torch_function_stack
_DISPATCH_MODES = torch._C._len_torch_dispatch_stack
