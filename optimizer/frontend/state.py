"""The state that a forward reaches: of its modules in Python, and outside the model.

Followed are the names in the code: globals, closures, attributes of classes, defaults, imports.
A value that no call can change is immaterial. Others are watched: where a recording changes them,
their module is not recorded. A function of C that is not known to compute with its arguments
alone, or a value that cannot be looked into, may answer otherwise in each call.
"""

from __future__ import annotations

import builtins
import dis
import io
import os
import pickle
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache, partial, partialmethod
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    EllipsisType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    NotImplementedType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from optimizer.core.guards import key_of
from optimizer.core.node import NOT_USER_CODE

_CONTINUE = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "STORE_ATTR", "DELETE_ATTR")
_BEGIN = {
    "LOAD_GLOBAL": "global", "STORE_GLOBAL": "global", "LOAD_NAME": "global",
    "LOAD_DEREF": "free", "STORE_DEREF": "free", "LOAD_CLASSDEREF": "free",
    "IMPORT_NAME": "import",
}  # fmt: skip


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


@lru_cache(maxsize=4096)
def scan(code: CodeType) -> tuple[frozenset[tuple[Any, ...]], frozenset[str]]:
    """The chains `a.b.c` that begin with a global, a free variable or an import; other names."""
    chains: set[tuple[Any, ...]] = set()
    names: set[str] = set()
    chain: tuple[Any, ...] = ()
    for each in dis.get_instructions(code):
        if each.opname in _CONTINUE and chain:
            chain = (*chain, each.argval)
            continue
        chains.add(chain)
        chain = ((_BEGIN[each.opname], each.argval),) if each.opname in _BEGIN else ()
        if each.opname in _CONTINUE:
            names.add(each.argval)
    return frozenset(chains - {()}), frozenset(names)


_IMMUTABLE = (
    int, float, complex, bool, str, bytes, type(None), range, slice, EllipsisType,
    NotImplementedType, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
    GetSetDescriptorType, MemberDescriptorType,
)  # fmt: skip
_BY_IDENTITY = (
    torch.Tensor, nn.Module, ModuleType, fx.Proxy, fx.Graph, fx.Node,
)  # fmt: skip
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
MISSING = object()
UNSEEN = b""  # the fingerprint of what cannot be looked into


class Place(NamedTuple):
    """Where a value is held: a dict, or an object, and a name."""

    space: Any
    name: str

    def value(self) -> Any:
        """What is held there now."""
        if isinstance(self.space, type | ModuleType):
            return vars(self.space).get(self.name, MISSING)
        if isinstance(self.space, dict):
            return self.space.get(self.name, MISSING)
        return getattr(self.space, self.name, MISSING)

    def put(self, value: Any) -> None:
        """Let it hold a value again, or nothing."""
        if self.value() is value:
            return
        if isinstance(self.space, dict):
            self.space[self.name] = value
        else:
            setattr(self.space, self.name, value)
        if value is MISSING:
            (self.space if isinstance(self.space, dict) else vars(self.space)).pop(self.name)


def is_of_torch(kind: type) -> bool:
    """Whether a class is torch's own."""
    return kind.__module__.partition(".")[0] == "torch" or kind is object


def is_immutable(value: Any) -> bool:
    """Whether no call can change a value."""
    kind = type(value)
    return kind in _IMMUTABLE or (kind in (tuple, frozenset) and all(map(is_immutable, value)))


def fingerprint(value: Any, met: list[Any] | None = None) -> bytes:
    """All that a value holds, as bytes; `UNSEEN` where it does not say.

    That is what pickling asks objects for, those of C among them. Tensors, modules, classes and
    functions count by identity. `met` takes the classes and functions that were come across.
    """
    file = io.BytesIO()
    try:
        _Printer(file, [] if met is None else met).dump(value)
    except Exception:  # generators, locks, handles: whatever does not pickle
        return UNSEEN
    return file.getvalue()


class _Printer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, met: list[Any]) -> None:
        super().__init__(file, protocol=4)
        self.met = met

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Generator:
            return bytes(value.get_state().tolist())
        if isinstance(value, type | FunctionType):
            self.met.append(value)
        elif not (isinstance(value, _BY_IDENTITY) or value is MISSING):
            seen = not is_of_torch(kind) or kind in _IMMUTABLE
            return None if seen else id(value)
        return id(value)


def python_state(model: nn.Module, *besides: str) -> dict[str, Any]:
    """What each module holds, by name, fit for comparison: tensors count by identity.

    Args:
        model: the root of the modules.
        besides: names of attributes that are left out.
    """
    modules = model.named_modules()
    scripted = torch.jit.ScriptModule
    return {name: _state_of(m, besides) for name, m in modules if not isinstance(m, scripted)}


def held(module: nn.Module) -> list[Any]:
    """The objects that a module holds, to be compared by identity: a cheap look at its state."""
    if isinstance(module, torch.jit.ScriptModule):
        return []  # its state is not Python's; asked for it, it makes new objects
    tables = (vars(module), module._parameters, module._buffers, module._modules)
    return [value for table in tables for value in table.values()]


def _state_of(module: nn.Module, besides: tuple[str, ...]) -> Any:
    values = {
        name: value
        for name, value in vars(module).items()
        if (name not in OF_EVERY_MODULE or value or value is False)
        and not (name.startswith("_tensor_constant") or name in besides)
    }
    if not is_of_torch(type(module)):
        whole = fingerprint(values)
        return whole or {name: fingerprint(value) or id(value) for name, value in values.items()}
    inside = [*values.values()]
    for table in [each for each in inside if isinstance(each, dict)]:
        inside += table.values()
    return [key_of(value) if is_immutable(value) else id(value) for value in inside]


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

    def __init__(
        self, module: nn.Module, kinds: Iterable[type], members: Set[int], *, packages: bool = True
    ) -> None:
        self.functions: list[FunctionType] = []
        self.places: list[Place] = []
        self.unknown = ""
        self.keeps_state = False
        self._members, self._packages = members, packages
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
        elif self._packages or not _is_installed(function):
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


def _is_installed(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and f"{os.sep}site-packages{os.sep}" in code.co_filename


def _is_implicit(name: str) -> bool:
    """Whether Python calls a method of this name, of objects that a forward works with."""
    return name[:2] == "__" == name[-2:] and name not in _NOT_OF_A_FORWARD


def _package(name: str | None) -> str:
    return (name or "").partition(".")[0]


_WITH_ITEMS = (list, deque)


class Outside:
    """What the forwards of a model reach outside it.

    Args:
        model: the model.
        packages: whether the code of packages that are installed is looked through as well.

    Attributes:
        reaches: that of each module whose code is not torch's, by name.
        unknown: why a module cannot be recorded because of what it reaches, by name.
        keeps_state: whether one reaches a value that can be changed.
    """

    def __init__(self, model: nn.Module, *, packages: bool = True) -> None:
        users = {name: module for name, module in model.named_modules() if _is_users(module)}
        if not packages:
            users = {k: m for k, m in users.items() if not _is_installed(type(m).forward)}
        kinds = {base: None for module in users.values() for base in type(module).__mro__}
        own = [base for base in kinds if not is_of_torch(base)]
        members = set(map(id, model.modules()))
        known: dict[Any, Reach] = {}
        self.reaches: dict[str, Reach] = {}
        for name, module in users.items():
            key = (type(module), *map(id, _held_objects(module)))
            self.reaches[name] = known[key] = known.get(key) or Reach(
                module, own, members, packages=packages
            )
        self.unknown = {name: each.unknown for name, each in self.reaches.items() if each.unknown}
        self.keeps_state = any(each.keeps_state for each in known.values())
        self._places = {id(each): each.places for each in known.values()}

    def state(self) -> dict[str, bytes]:
        """What each module reaches now, by name, fit for comparison."""
        prints = {
            key: fingerprint([place.value() for place in places])
            for key, places in self._places.items()
        }
        return {name: prints[id(reach)] for name, reach in self.reaches.items()}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put back what a block of code changes."""
        places = [place for each in self._places.values() for place in each]
        before = self.state() if self.keeps_state or places else None
        seen: set[int] = set()
        undo = [step for place in places for step in _steps_back(place, seen)]
        try:
            yield
        finally:
            if before is not None and self.state() != before:
                for step in undo:
                    with suppress(Exception):  # a frozen one refuses
                        step()


def _is_users(module: nn.Module) -> bool:
    written = isinstance(module, fx.GraphModule) or not is_of_torch(type(module))
    return written and not isinstance(module, torch.jit.ScriptModule)


def _held_objects(module: nn.Module) -> list[Any]:
    """What a module holds of which more can be reached."""
    held = (value for name, value in vars(module).items() if name not in OF_EVERY_MODULE)
    return [value for value in held if not is_immutable(value)]


def _steps_back(place: Place, seen: set[int]) -> Iterator[Callable[[], object]]:
    """How to put back a value, and what is in it."""
    value = place.value()
    yield partial(place.put, value)
    yield from _contents_back(value, seen)


def _contents_back(value: Any, seen: set[int]) -> Iterator[Callable[[], object]]:
    known = is_immutable(value) or isinstance(value, torch.Tensor | nn.Module | type)
    if known or id(value) in seen:
        return
    seen.add(id(value))
    step: Callable[[], object] | None = None
    parts: Iterable[Any] = ()
    with suppress(Exception):  # what draws from the system has no state; a user's class may raise
        parts = _parts_of(value)
        step = _contents_of(value)
    if step is not None:
        yield step
    for part in parts:
        yield from _contents_back(part, seen)


def _parts_of(value: Any) -> Iterable[Any]:
    inside = vars(value) if hasattr(value, "__dict__") else value
    parts = inside.values() if isinstance(inside, dict) else inside
    return [*parts] if isinstance(inside, (dict, tuple, *_WITH_ITEMS)) else ()


def _contents_of(value: Any) -> Callable[[], object] | None:
    """How to put back what a container holds, or where a generator of numbers is."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, dict | set):
        return partial(_refill, value, value.copy(), "update")
    if isinstance(value, (bytearray, *_WITH_ITEMS)):
        return partial(_refill, value, value.copy(), "extend")
    if numpy and isinstance(value, numpy.ndarray):
        return partial(numpy.copyto, value, value.copy())
    if numpy and isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if numpy and isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return _attributes_of(value)


def _attributes_of(value: Any) -> Callable[[], object] | None:
    if hasattr(value, "__dict__"):
        return partial(_refill, vars(value), dict(vars(value)), "update")
    slots = {n for kind in type(value).__mro__ for n in vars(kind).get("__slots__", ())}
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return partial(_set_all, value, held) if held else None


def _set_all(value: Any, attributes: dict[str, Any]) -> None:
    for name, held in attributes.items():
        setattr(value, name, held)


def _refill(container: Any, contents: Any, how: str) -> None:
    container.clear()
    getattr(container, how)(contents)
