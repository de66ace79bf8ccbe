"""What the code of a forward can reach outside its module: functions, and values that they keep.

Followed are the names in the code: globals, closures, attributes of classes, defaults, imports.
A value that no call can change is immaterial. Others are watched: where a recording changes them,
their module is not recorded. A function of C that is not known to compute with its arguments
alone, or a value that cannot be looked into, may answer otherwise in each call.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterable, Set
from functools import cached_property, lru_cache, partial, partialmethod
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn

from optimizer._names import codes, scan
from optimizer._source import NOT_USER_CODE
from optimizer._state import MISSING, UNSEEN, Place, fingerprint, is_immutable, is_of_torch

# What these packages do depends on what they are given; of random numbers, on a state seen here.
# pytest is in every assert of a test.
_KNOWN = frozenset((
    "_collections", "_functools", "_operator", "_pytest", "_random", "_sre", "_warnings", "abc",
    "builtins", "cmath", "collections", "contextlib", "copy", "copyreg", "dataclasses", "decimal",
    "enum", "fractions", "functools", "inspect", "itertools", "logging", "math", "numbers", "numpy",
    "operator", "optimizer", "random", "re", "statistics", "string", "threading", "torch", "types",
    "typing", "typing_extensions", "warnings",
))  # fmt: skip
_UNKNOWN = frozenset((builtins.eval, builtins.exec, builtins.open, builtins.input))
# Autocast is not among them: a model is optimized under the autocast that it is called under.
_ASKS_THE_PROCESS = re.compile(
    r"(get|are|current|memory|max_memory)_(?!autocast|device$)|is_(?!autocast).*_enabled$"
    r"|(initial_)?seed$"
)
_NOT_OF_A_FORWARD = frozenset((
    "__repr__", "__str__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__",
))  # fmt: skip
_OF_C = (
    BuiltinFunctionType, MethodWrapperType, WrapperDescriptorType, MethodDescriptorType,
    ClassMethodDescriptorType,
)  # fmt: skip
_CACHED = type(lru_cache(len))  # a traced value would stay there
_WRAPPERS = (
    MethodType, staticmethod, classmethod, property, cached_property, partial, partialmethod,
)  # fmt: skip
_WRAPPED = ("__func__", "__self__", "fget", "func", "args", "keywords")


class Reach:
    """What a forward reaches.

    Attributes:
        functions: the user's functions that it may run.
        places: where it, or they, find values that are not the module's own.
        unknown: what may answer otherwise in another call; empty if nothing does.
        keeps_state: whether one of these values can be changed, and not only replaced.
    """

    def __init__(self, module: nn.Module, kinds: Iterable[type], members: Set[int]) -> None:
        self.functions: list[FunctionType] = []
        self.places: list[Place] = []
        self.unknown = ""
        self.keeps_state = False
        self._members = members
        self._names: set[str] = set()
        self._spaces: list[Any] = []
        self._seen: set[int] = set()
        self._pending: list[FunctionType] = []
        for kind in kinds:
            self._add_space(kind)
        self._add_space(module)
        self._visit(getattr(type(module), "forward", None), "forward")
        while self._pending:
            self._follow(self._pending.pop())

    def _follow(self, function: FunctionType) -> None:
        self.functions.append(function)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            self._visit(getattr(function, name), function.__name__, Place(function, name))
        for code in codes(function.__code__):
            chains, names = scan(code)
            for (kind, first), *rest in chains:
                if kind == "import":
                    self._resolve(Place(sys.modules, first), rest)
                elif kind == "free" and first in cells:
                    self._resolve(Place(cells[first], "cell_contents"), rest)
                elif kind == "global":
                    self._resolve_global(function, first, rest)
            self._add_names(names)

    def _resolve_global(self, function: FunctionType, first: str, rest: list[str]) -> None:
        if first in function.__globals__ or not hasattr(builtins, first):
            self._resolve(Place(function.__globals__, first), rest)
        elif getattr(builtins, first) in _UNKNOWN:
            self._doubt(first)

    def _resolve(self, place: Place, rest: list[str]) -> None:
        """Follow `a.b.c` as far as it names modules and classes."""
        value = place.value()
        while rest and isinstance(value, ModuleType | type) and rest[0] in vars(value):
            place, rest = Place(value, rest[0]), rest[1:]
            value = place.value()
        self._visit(value, place.name, place)
        self._add_names(rest)

    def _visit(self, value: Any, name: str, place: Place | None = None) -> None:
        if place is not None and not isinstance(value, FunctionType | ModuleType | type):
            self.places.append(place)
        if value is MISSING or is_immutable(value) or isinstance(value, torch.Tensor):
            return
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._visit_once(value, name)

    def _visit_once(self, value: Any, name: str) -> None:
        if isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, ModuleType):
            self._visit_namespace(value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, _OF_C):
            self._visit_builtin(value)
        elif isinstance(value, nn.Module):
            if id(value) not in self._members:
                self._visit(vars(value), name, Place(value, "__dict__"))
        else:
            self._look_into(value, name)

    def _visit_namespace(self, module: ModuleType) -> None:
        unknown = _package(module.__name__) in sys.stdlib_module_names - _KNOWN
        if unknown or module.__name__.startswith("torch.backends"):
            self._doubt(module.__name__)
        self._add_space(module)

    def _visit_function(self, function: FunctionType) -> None:
        package = _package(function.__module__)
        if function.__code__.co_filename.startswith(NOT_USER_CODE) or package in _KNOWN:
            if package in ("torch", "threading") and _ASKS_THE_PROCESS.match(function.__name__):
                self._doubt(f"{package}.{function.__name__}")
        elif package in sys.stdlib_module_names:
            self._doubt(f"{function.__module__}.{function.__name__}")
        else:
            self._pending.append(function)

    def _visit_builtin(self, function: Any) -> None:
        owner = getattr(function, "__self__", None)
        if owner is None or isinstance(owner, ModuleType | type):
            owner = owner or getattr(function, "__objclass__", None)
            homes = (getattr(function, "__module__", ""), getattr(owner, "__module__", ""))
            home = str(homes[0] or homes[1] or getattr(owner, "__name__", "torch"))
            asks = home.startswith("torch") and _ASKS_THE_PROCESS.match(function.__name__)
            if asks or _package(home) not in _KNOWN:
                self._doubt(f"{home.replace('torch._C', 'torch')}.{function.__name__}")
        else:
            self._visit(owner, function.__name__, Place(function, "__self__"))

    def _visit_class(self, kind: type) -> None:
        if kind.__module__ and _package(kind.__module__) in sys.stdlib_module_names - _KNOWN:
            self._doubt(f"{kind.__module__}.{kind.__name__}")
        for base in kind.__mro__:
            if _package(base.__module__) not in _KNOWN:
                self._add_space(base)
                functions = (
                    n for n, value in vars(base).items() if isinstance(value, FunctionType)
                )
                self._add_names(name for name in functions if _is_implicit(name))

    def _look_into(self, value: Any, name: str) -> None:
        """Watch a value as a whole, and follow the functions and the classes inside it."""
        if isinstance(value, _CACHED):
            self._doubt(f"{name}, a function whose results are kept")
        elif isinstance(value, _WRAPPERS):
            for part in filter(partial(hasattr, value), _WRAPPED):
                self._visit(getattr(value, part), name, Place(value, part))
        elif not is_of_torch(type(value)) or isinstance(value, torch.Generator):
            self._watch(value, name)

    def _watch(self, value: Any, name: str) -> None:
        met: list[Any] = []
        if fingerprint(value, met) == UNSEEN:
            self._doubt(f"{name}, of type {type(value).__name__}")
        self.keeps_state |= not (isinstance(value, dict) and not value)
        for each in met:
            self._visit(each, name)

    def _add_space(self, space: Any) -> None:
        self._spaces.append(space)
        if isinstance(space, type):
            self._seen.add(id(space))
        for name in [*self._names]:
            self._look_up(space, name)

    def _add_names(self, names: Iterable[str]) -> None:
        new = set(names) - self._names
        self._names |= new
        for space in [*self._spaces]:
            for name in new:
                self._look_up(space, name)

    def _look_up(self, space: Any, name: str) -> None:
        if name in vars(space):
            own = isinstance(space, nn.Module)
            self._visit(vars(space)[name], name, None if own else Place(space, name))

    def _doubt(self, name: str) -> None:
        self.unknown = self.unknown or f"it reaches {name}, which may answer otherwise each time"


def _is_implicit(name: str) -> bool:
    """Whether Python calls a method of this name, of objects that a forward works with."""
    return name[:2] == "__" == name[-2:] and name not in _NOT_OF_A_FORWARD


def _package(name: str | None) -> str:
    return (name or "").partition(".")[0]
