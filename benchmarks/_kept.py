"""What one process made, kept in a folder for the processes that ask later."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")


def kept(folder: Path, name: str, make: Callable[[], Made]) -> Made:
    """What `make` returns or raises: the first that asks for `name` calls it, all others read."""
    file = folder / f"{name}.pickle"
    if not file.exists():
        beside = folder / f"{name}.{os.getpid()}.new"
        beside.write_bytes(pickle.dumps(or_why_not(make)))
        beside.replace(file)  # whole, or not there: a process may end in between
    return required(pickle.loads(file.read_bytes()))


def or_why_not(make: Callable[[], Made]) -> Made | Exception:
    """What it returns; or what it raises, as an exception that any process can read."""
    try:
        return make()
    except NotImplementedError as error:
        return NotImplementedError(str(error))
    except Exception as error:
        return RuntimeError(f"{type(error).__name__}: {error}")


def required(found: Made | Exception) -> Made:
    """What was found.

    Raises:
        NotImplementedError: it is n/a; the message says why.
        RuntimeError: it failed; the message says how.
    """
    if isinstance(found, Exception):
        raise found
    return found
