"""Every pass there is: it registers itself by being in a file of `passes/`.

What enters is a match of its pattern; what leaves is the node that takes its place, or the reason
why not. An installed package adds its own under the entry point group `optimizer.passes`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from optimizer.core.errors import InputError, OptimizerWarning, PassError
from optimizer.rewrite.contract import PHASES, REDUCED, Pass


@cache
def all_passes() -> tuple[Pass, ...]:
    """Return all passes, in the order in which they run."""
    names = [f"{__name__}.{entry.name}" for entry in pkgutil.iter_modules(__path__)]
    modules = map(importlib.import_module, names)
    passes = [p for module in modules for p in vars(module).values() if isinstance(p, Pass)]
    for entry in entry_points(group="optimizer.passes"):
        try:  # one that cannot be loaded must not cost the user a model
            loaded = entry.load()
        except Exception as error:  # whatever an import may raise
            loaded = error
        if isinstance(loaded, Pass):
            passes.append(loaded)
        else:
            remark = f"'{entry.value}' gives no pass, and is left out: {loaded}"
            warnings.warn(remark, OptimizerWarning, stacklevel=2)
    return _in_order(passes)


def _in_order(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    return tuple(sorted(passes, key=lambda each: (PHASES.index(each.phase), each.name)))


def explain(name: str) -> str:
    """Return what a pass rewrites, its equation, when it does so, and why that is safe.

    Raises:
        PassError: there is no such pass; the message names the nearest.
    """
    match = _by_name(name)
    text = inspect.cleandoc(match.apply.__doc__ or "")
    level = 0 if match.numerics == "exact" else 1
    settings = f"numerics: {match.numerics}   phase: {match.phase}   from level: {level}"
    return f"{name}\n{'=' * len(name)}\n{text}\n\n{settings}"


def select(
    level: int, only: Iterable[str | Pass] | None, disable: Iterable[str]
) -> tuple[Pass, ...]:
    """Return the passes that `optimize` runs, or raise InputError or PassError of what is none."""
    if type(level) is not int or level not in range(REDUCED + 1):
        kinds = "0 (the same bits), 1 (up to rounding), 2 (kernels) or 3 (lower precision)"
        raise InputError(f"level {level!r} does not exist: use {kinds}.")
    listed = all_passes() if only is None else _listed("only", only)
    selected = [each if isinstance(each, Pass) else _by_name(each) for each in listed]
    disabled = {_by_name(name).name for name in _listed("disable", disable)}
    permitted = {each.name: each for each in selected if level or each.numerics == "exact"}
    return _in_order(each for name, each in permitted.items() if name not in disabled)


def _listed(argument: str, names: Any) -> list[Any]:
    """Return a list of several names, or of one."""
    if isinstance(names, str | Pass):
        return [names]
    if not isinstance(names, Iterable):
        raise InputError(f"{argument} is {names!r}: pass a list of names of passes.")
    return list(names)


def _by_name(name: object) -> Pass:
    passes = {each.name: each for each in all_passes()}
    if not isinstance(name, str) or name not in passes:
        near = difflib.get_close_matches(str(name), passes, n=2) or sorted(passes)
        raise PassError(f"there is no pass named {name!r}: try {' or '.join(near)}.")
    return passes[name]
