"""Where in the user's code an operation was written."""

from __future__ import annotations

import os
import re
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from optimizer._errors import CaptureError

NOT_USER_CODE = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))

_NOT_A_USERS = (*NOT_USER_CODE, "<")  # generated code has such names


@lru_cache(1024)  # a stack has the same few files for each node
def is_user_code(path: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not path.startswith(_NOT_A_USERS)


def user_line() -> str:
    """The innermost line that is neither torch's nor ours, as `file.py:line`; may be empty."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        if is_user_code(frame.f_code.co_filename):
            return _told(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def line_in(stack: str) -> str:
    """The innermost line of a printed stack that is neither torch's nor ours, likewise."""
    return _innermost(re.findall(r'File "(.+)", line (\d+)', stack))


def line_of(error: BaseException) -> str:
    """The innermost line that an error went through and is neither torch's nor ours, likewise."""
    walked = traceback.walk_tb(error.__traceback__)
    return _innermost([(frame.f_code.co_filename, line) for frame, line in walked])


def reason_of(error: Exception) -> str:
    """Why a forward cannot be recorded, and where."""
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    if not isinstance(error, CaptureError):
        reason = f"its forward cannot be recorded: {reason}"
    line = line_of(error)
    return f"{reason}, at {line}" if line else reason


def _innermost(lines: list[tuple[str, Any]]) -> str:
    theirs = [_told(path, line) for path, line in lines if is_user_code(path)]
    return theirs[-1] if theirs else ""


def _told(path: str, line: object) -> str:
    return f"{path.rpartition(os.sep)[2]}:{line}"
