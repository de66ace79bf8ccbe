"""Where in the user's code an operation was written."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch

NOT_USER_CODE = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))


def is_user_code(path: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not path.startswith((*NOT_USER_CODE, "<"))


def user_line() -> str:
    """The innermost line that is neither torch's nor ours, as `file.py:line`; may be empty."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if is_user_code(name):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_in(stack: str) -> str:
    """The innermost line of a printed stack that is neither torch's nor ours, likewise."""
    lines = re.findall(r'File "(.+)", line (\d+)', stack)
    theirs = [(path, line) for path, line in lines if is_user_code(path)]
    return f"{Path(theirs[-1][0]).name}:{theirs[-1][1]}" if theirs else ""
