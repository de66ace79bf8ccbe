"""Compilers and runtimes that others keep, for regions on the CPU: one file each.

What enters is a region and example inputs; what leaves is a program that takes such inputs. An
engine says what it is called, what pip installs it by, whether it is here, and compiles. Nothing
else in the package knows one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from typing import TypeAlias

from optimizer.core.errors import InputError
from optimizer.lowering.engines.compiled import Compiled, Engine
from optimizer.lowering.engines.onnxruntime import OnnxRuntime
from optimizer.lowering.engines.openvino import OpenVino

__all__ = [
    "AUTOMATIC", "Compiled", "Engine", "Engines", "engines_here", "engines_named",
]  # fmt: skip
Engines: TypeAlias = str | Iterable[str]
ENGINES: dict[str, Engine] = {each.name: each for each in (OpenVino(), OnnxRuntime())}
AUTOMATIC = ("openvino",)  # ONNX Runtime takes 3 to 15 seconds to prepare


def engines_named(names: Engines) -> tuple[str, ...]:
    """What a caller asks for; "auto" is what is installed and quickly prepared.

    Raises:
        InputError: there is no such engine, or it cannot be used.
    """
    if names == "auto":
        return tuple(name for name in AUTOMATIC if _is_installed(ENGINES[name]))
    asked = [names] if isinstance(names, str) else names
    listed = list(asked) if isinstance(asked, Iterable) else [None]
    for name in listed:
        if not isinstance(name, str) or name not in ENGINES:
            known = " and ".join(map(repr, ENGINES))
            raise InputError(f"engines: there is no {name!r}, but there are {known}, and 'auto'.")
        if not _is_installed(ENGINES[name]):
            advice = f"run python -m pip install '.[{name}]' in the clone"
            raise InputError(f"engine {name!r} is not installed: {advice}.")
    return tuple(map(str, listed))


def _is_installed(engine: Engine) -> bool:
    return importlib.util.find_spec(engine.module) is not None


def engines_here(names: Iterable[str]) -> dict[str, Engine]:
    """The engines of these names that can be used, by title and version."""
    known = [each for name, each in ENGINES.items() if name in names]
    here = [each for each in known if _is_installed(each)]
    return {f"{each.title} {importlib.metadata.version(each.module)}": each for each in here}
