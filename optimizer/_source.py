"""Where in the user's code an operation was written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

NOT_USER_CODE = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))


def user_line() -> str:
    """The innermost line that is neither torch's nor ours, as `file.py:line`; may be empty."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*NOT_USER_CODE, "<")):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
