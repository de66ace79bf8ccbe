"""Decide whether the code of a model may be recorded by calling it with stand-ins.

The code of each forward and of the functions that it names is read, never data. What is not listed
here is an obstacle, for it may keep state, ask for what changes, or enter a mode.
"""

from __future__ import annotations

import builtins
import dis
import enum
import inspect
import logging
import operator
import re
import sys
import types
from abc import ABCMeta
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from functools import lru_cache, partial, partialmethod
from types import CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils._pytree import LeafSpec, TreeSpec

from optimizer.core.inputs import is_record
from optimizer.core.node import HOOKS, NOT_USER_CODE, is_plain, is_user_code

_INSTRUCTION = re.compile(
    r"(BUILD|UNARY|BINARY|JUMP|POP|LOAD_FAST|STORE_FAST|DELETE_FAST|FORMAT|CONVERT|CALL|UNPACK"
    r"|LIST|MAP|DICT|COPY|MAKE|END_FOR|LOAD_SUPER|RETURN)(_\w+)?"
    r"|SET_(ADD|UPDATE|FUNCTION_ATTRIBUTE)|COMPARE_OP|IS_OP|CONTAINS_OP|GET_LEN|GET_ITER|FOR_ITER"
    r"|LOAD_(CONST|SMALL_INT|COMMON_CONSTANT|GLOBAL|DEREF|CLOSURE|ATTR|METHOD|ASSERTION_ERROR)"
    r"|LOAD_CLASSDEREF|STORE_(SUBSCR|SLICE|DEREF)|YIELD_VALUE|RERAISE|RAISE_VARARGS|RESUME|SWAP"
    r"|BEFORE_WITH|LOAD_SPECIAL|WITH_EXCEPT_START|PUSH_NULL|PRECALL|KW_NAMES"
    r"|NOP|CACHE|EXTENDED_ARG|TO_BOOL|NOT_TAKEN"
)
_REASONS = {
    "STORE_ATTR": "it sets the attribute '{}'",
    "DELETE_ATTR": "it deletes the attribute '{}'",
    "STORE_GLOBAL": "it sets the global '{}'",
    "STORE_DEREF": "it sets '{}' of an enclosing function",
    "IMPORT_NAME": "it imports {}",
    "PUSH_EXC_INFO": "it has a try statement",
    "CHECK_EXC_MATCH": "it has a try statement",
}
_BUILTINS = frozenset((
    "Ellipsis", "NotImplemented", "abs", "all", "any", "bool", "callable", "complex", "dict",
    "divmod", "enumerate", "filter", "float", "frozenset", "getattr", "hasattr", "int",
    "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next", "pow",
    "range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "super", "tuple", "type",
    "zip", *(name for name, each in vars(builtins).items()
             if isinstance(each, type) and issubclass(each, BaseException)),
))  # fmt: skip
_TYPES = {FunctionType, MethodType, *map(vars(builtins).get, _BUILTINS)}
# Functions of these packages compute with what they are given.
_PURE = frozenset((
    "_functools", "_operator", "_warnings", "functools", "itertools", "math", "numbers", "numpy",
    "operator", "torch", "types", "typing", "warnings",
))  # fmt: skip
_CATCHES = ("PUSH_EXC_INFO", "CHECK_EXC_MATCH")
_HARMLESS = frozenset(("LOAD_GLOBAL AttributeError", "WITH_EXCEPT_START "))  # beside a catch
_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_LOADS_NAME = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF")
_ASK_FOR_AUTOCAST = ("AttributeError", "TypeError", "amp", "torch")
_OF_CLASSES = frozenset(("__class__", "__init__", "__module__", "__name__", "__qualname__"))
_NOT_IMPLICIT = ("__init__", "__init_subclass__", "__repr__", "__setstate__")  # no forward runs it
_OPERATORS = vars(operator).keys() - {"__call__"}
# Of torch's: what asks the process or changes it. A guard holds calls to the autocast of a model.
_ASKS_THE_PROCESS = re.compile(
    r"_?(get|are|current|memory|max_memory|set|use)_(?!autocast|device$)|(?!.*autocast).*_enabled$"
    r"|(initial_|manual_)?seed(_all)?$|fork_rng|enable_|inference_mode|attrgetter|methodcaller"
    r"|(load|save)(txt|z)?$|fromfile|memmap|geterr|seterr|errstate|.*filter(s|warnings)?$|catch_"
)
_IMMUTABLE = (
    int, float, complex, bool, str, bytes, type(None), range, slice, types.EllipsisType,
    types.NotImplementedType, torch.dtype, torch.device, torch.Size, torch.layout,
    torch.memory_format, types.GetSetDescriptorType, types.MemberDescriptorType, ReferenceType,
    TreeSpec, LeafSpec,
    type(vars(namedtuple("_", "a"))["a"]),
)  # fmt: skip
OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "_reversed_padding_repeated_twice"))
# Of a module, only this may be asked; the other names are of tensors as well.
_ASKED = frozenset((
    "bfloat16", "buffers", "children", "cpu", "cuda", "double", "extra_repr", "float", "forward",
    "get_buffer", "get_parameter", "get_submodule", "half", "modules", "named_buffers",
    "named_children", "named_modules", "named_parameters", "parameters", "to", "training", "type",
    "_modules",
))  # fmt: skip
_OF_MODULES = (OF_EVERY_MODULE | vars(nn.Module).keys()) - _ASKED
MUTABLE = (list, dict, set, OrderedDict)
_CONTAINERS = (*MUTABLE, tuple, frozenset, MappingProxyType, immutable_dict, immutable_list)
_OF_PYTHON = frozenset(("abc", "builtins", "collections", "enum", "optimizer"))
_OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_OF_C = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
    types.ClassMethodDescriptorType, *_OPERATIONS,
)  # fmt: skip
MISSING = object()
_MOST = 1000  # values that are looked at in one container


def is_of_torch(kind: type) -> bool:
    """Return whether a class is torch's own."""
    return kind.__module__.partition(".")[0] == "torch" or kind is object


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code and the codes of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@lru_cache(maxsize=4096)
def _scan(code: CodeType) -> tuple[str, tuple[tuple[str, ...], ...], frozenset[str]]:
    """Return the reason against a code, the chains `a.b.c` that begin outside, all attributes."""
    instructions = [*dis.get_instructions(code)]
    # Of a chain too: what it begins with may be chosen by a jump.
    attributes = {each.argval for each in instructions if each.opname in _LOADS_ATTRIBUTE}
    reason = next(_obstacles_in(code, instructions), "")
    return reason, tuple(dict.fromkeys(_chains(instructions))), frozenset(attributes)


def _obstacles_in(code: CodeType, instructions: list[dis.Instruction]) -> Iterator[str]:
    """Yield why instructions may not run with stand-ins."""
    # A code that does nothing but ask for autocast may catch: no value of a tensor raises there.
    asks = all("autocast" in name or name in _ASK_FOR_AUTOCAST for name in code.co_names)
    texts = [f"{each.opname} {each.argrepr}" for each in instructions]
    for before, each, after in zip(["", *texts], instructions, [*texts[1:], ""], strict=False):
        kind, name = each.opname, each.argval
        may_catch = asks or not _HARMLESS.isdisjoint((before, after))
        is_listed = may_catch if kind in _CATCHES else _INSTRUCTION.fullmatch(kind)
        if not is_listed or (kind == "STORE_DEREF" and name not in code.co_cellvars):
            yield _REASONS.get(kind, f"its code has {kind}").format(name)
        hidden = kind in _LOADS_ATTRIBUTE and (name.startswith("__") or name in _OF_MODULES)
        if hidden and name not in _OF_CLASSES | _OPERATORS:
            yield f"it uses '{name}'"


def _chains(instructions: list[dis.Instruction]) -> Iterator[tuple[str, ...]]:
    """Yield each `a.b.c` whose first name is a global or of an enclosing function."""
    chain: tuple[str, ...] = ()
    for each in instructions:
        if chain and each.opname in _LOADS_ATTRIBUTE:
            chain = (*chain, each.argval)
            continue
        if chain and not chain[0].startswith("@"):  # not by pytest
            yield chain
        chain = (each.argval,) if each.opname in _LOADS_NAME else ()


class Code:
    """The code that the forwards of a model may run."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.functions: list[FunctionType] = []  # those of the user's that were looked at so far
        self.places: list[tuple[Any, str]] = []  # where they may find values: namespaces and cells
        self.objects: list[Any] = []  # what may change there: containers, and what is not known
        self.names: set[str] = set()
        self._members = set(map(id, self.modules))
        self._spaces: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._classes: set[type] = set()
        self._pending: list[FunctionType] = []

    def obstacles(self) -> Iterator[str]:
        """Yield each reason why the model may not be recorded with stand-ins."""
        modules = [m for m in self.modules if not isinstance(m, torch.jit.ScriptModule)]
        for module in modules:
            hooks = (each for name in HOOKS for each in vars(module)[name].values())
            own = (each for each in hooks if not is_of_torch(type(each)))
            yield from self._visit((*own, vars(module).get("forward")), "a hook")
            if is_of_torch(type(module)) and not isinstance(module, fx.GraphModule):
                yield from self._look_up([module], vars(module).keys())
                continue
            self._spaces.append(module)
            yield from self._look_up([module], self.names)
            yield from self._visit_class(type(module))
            yield from self._visit(type(module).forward, "forward")
        while self._pending:
            yield from self._follow(self._pending.pop())
        of_functions = {id(own) for f in self.functions for own in (vars(f), f.__kwdefaults__)}
        if not (of_functions.issuperset(map(id, self.objects)) or all(map(is_plain, modules))):
            yield "a hook or parametrization may change what its code finds"

    def codes(self) -> Iterator[CodeType]:
        """Yield the code of each function that was looked at, and of those in it."""
        return (each for function in self.functions for each in _codes(function.__code__))

    def is_new(self, value: Any, name: str) -> bool:
        """Return whether the value under a name may run code that was not looked at."""
        value = getattr(value, "__func__", value)
        is_known = is_immutable(value) or isinstance(value, nn.Module) or id(value) in self._seen
        if name in _OF_MODULES or is_known:
            return not is_known
        return _is_of_a_user(value) if isinstance(value, FunctionType) else not _is_known(value)

    def _follow(self, function: FunctionType) -> Iterator[str]:
        self.functions.append(function)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        within = {name: (cell, "cell_contents") for name, cell in cells}
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            yield from self._visit(self._value_at(function, name), function.__name__)
        for code in _codes(function.__code__):
            unlisted, chains, names = _scan(code)
            reasons = [unlisted] * bool(unlisted)
            for first, *rest in chains:
                place = within.get(first, (function.__globals__, first))
                reasons += self._resolve(place, first, rest)
            new = names - self.names
            self.names |= new
            reasons += self._look_up(self._spaces, new)
            file, line = code.co_filename.rpartition("/")[2], code.co_firstlineno
            yield from (f"{each} ({file}:{line})" for each in reasons)

    def _resolve(self, place: tuple[Any, str], path: str, rest: list[str]) -> Iterator[str]:
        """Follow `a.b.c` as far as it names modules and classes."""
        value = self._value_at(*place)
        if value is MISSING and path in vars(builtins).keys() - _BUILTINS:
            yield f"it uses {path}()"
        for name in rest:
            if not isinstance(value, ModuleType | type):
                break
            if _is_of_the_process(value):
                yield f"it asks the process for {path}"
            if isinstance(value, type):
                yield from self._visit(value, path)
            value, path = self._value_at(value, name), f"{path}.{name}"
        yield from self._visit(value, path)

    def _value_at(self, space: Any, name: str) -> Any:
        value = member(space, name)
        if not (_is_listed(space) or isinstance(value, FunctionType | ModuleType | type)):
            self.places.append((space, name))
        return value

    def _visit(self, value: Any, name: str) -> Iterator[str]:
        if value is MISSING or is_immutable(value) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            yield from self._visit_function(value)
        elif type(value) in _CONTAINERS:
            self.objects += [value] * (type(value) in MUTABLE)
            if len(value) > _MOST:
                yield f"it reaches {name}, which holds {len(value)} values"
            held = [*value, *value.values()] if isinstance(value, Mapping) else value
            for each in held if len(value) <= _MOST else ():
                yield from self._visit(each, name)
        else:
            yield from self._visit_object(value, name)

    def _visit_object(self, value: Any, name: str) -> Iterator[str]:
        contents: list[Any] = []
        if type(value) in (property, staticmethod, classmethod, partial, MethodType):
            parts = "fget", "__func__", "__self__", "func", "args", "keywords"
            contents = [getattr(value, part, None) for part in parts]
        elif isinstance(value, nn.Module):
            if id(value) not in self._members:
                yield f"it reaches a module outside the model, {name}"
                yield from self._look_into(vars(value), name)
        elif not _is_known(value):
            yield f"it reaches {name}, a {type(value).__name__}"
            yield from self._look_into(value, name)
        elif isinstance(value, type):
            yield from self._visit_class(value)
            is_of_model = any(value in type(module).__mro__ for module in self.modules)
            contents = [] if is_of_model else _constructors(value)
        elif isinstance(value, tuple | enum.Enum | torch.Tensor):
            items = value if isinstance(value, tuple) else ()
            contents = [type(value), *items, *attributes(value).values()]
        for each in contents:
            yield from self._visit(each, name)

    def _visit_function(self, function: FunctionType) -> Iterator[str]:
        home = str(function.__globals__.get("__name__"))  # a decorator names itself otherwise
        if _package(home) in _PURE and (_asks(function) or home.startswith("torch.backends")):
            yield f"it asks the process for {function.__name__}()"
        if not function.__code__.co_filename.startswith(NOT_USER_CODE):
            if _package(home) not in _PURE | _OF_PYTHON:
                self._pending.append(function)
            return
        for inside in (member(cell, "cell_contents") for cell in function.__closure__ or ()):
            if _is_of_a_user(inside):
                yield f"{inside.__name__}() is decorated by {function.__name__}()"

    def _look_into(self, value: Any, name: str) -> Iterator[str]:
        """Follow what an object that is not known holds: it may be changed."""
        self.objects.append(value)
        yield from self._visit_class(type(value))
        contents = value if isinstance(value, dict) else attributes(value)
        for each in dict.values(contents):  # its own may import what is not there
            yield from self._visit(each, name)

    def _visit_class(self, kind: type) -> Iterator[str]:
        for base in kind.__mro__:
            if _package(base.__module__) in _PURE | _OF_PYTHON or base in self._classes:
                continue
            self._classes.add(base)
            if type(base) not in (type, ABCMeta, enum.EnumMeta):
                yield f"{base.__name__} has a metaclass"
            self._spaces.append(base)
            yield from self._look_up([base], self.names)
            for name, method in vars(base).items():
                implicit = name[:2] == "__" == name[-2:] and name not in _NOT_IMPLICIT
                if implicit and isinstance(method, FunctionType | classmethod | partialmethod):
                    yield from self._visit(method, name)

    def _look_up(self, spaces: list[Any], names: Set[str]) -> Iterator[str]:
        for space in spaces:
            is_module = isinstance(space, nn.Module)
            at = vars(space).get if is_module else partial(self._value_at, space)
            for name in sorted(names & (vars(space).keys() - OF_EVERY_MODULE)):
                value = at(name)
                is_own = is_module and is_record(value) and not is_immutable(value)  # it is copied
                yield from (self._look_into if is_own else self._visit)(value, name)


def _constructors(kind: type) -> list[Any]:
    """Return what runs where an instance is made: all instances of an enum are there already."""
    bases = [] if issubclass(kind, enum.Enum) else kind.__mro__
    own = [vars(base) for base in bases if "_fields" not in vars(base)]  # not those of namedtuple
    methods = [each.get(name) for each in own for name in ("__init__", "__new__")]
    return [each for each in methods if isinstance(each, FunctionType | staticmethod)]


def is_immutable(value: Any) -> bool:
    """Return whether no call can change a value."""
    kind = type(value)
    return kind in _IMMUTABLE or (kind in (tuple, frozenset) and all(map(is_immutable, value)))


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, of its slots too; none of Python's modules."""
    if isinstance(value, ModuleType) and value.__name__ in sys.stdlib_module_names:
        return {}
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    values: dict[str, Any] = {}
    with suppress(Exception):  # a user's class may raise
        values |= {name: getattr(value, name) for name in names if hasattr(value, name)}
        values |= vars(value)
    return values


def member(space: Any, name: str) -> Any:
    """Return the value under a name in a namespace, a cell or a function, or `MISSING`."""
    if isinstance(space, dict):
        return space.get(name, MISSING)
    if isinstance(space, type) and _package(space.__module__) not in _PURE:
        return inspect.getattr_static(space, name, MISSING)
    try:
        is_namespace = isinstance(space, ModuleType | type | FunctionType | CellType)
        return getattr(space, name, MISSING) if is_namespace else MISSING
    except (ValueError, RuntimeError):  # an empty cell; a name of torch.classes that is not there
        return MISSING


def _is_listed(value: Any) -> bool:
    """Return whether a value is a listed package, or a class of one."""
    home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(value, ModuleType | type) and _package(home) in _PURE


def _is_of_the_process(value: Any) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else ""
    return name.startswith(("torch.backends", "numpy.random"))


def _is_known(value: Any) -> bool:
    """Return whether a value, but for Python's functions, depends on its arguments alone."""
    if isinstance(value, ModuleType):
        return _is_listed(value) and not _is_of_the_process(value)
    if isinstance(value, _OF_C) or type(value).__name__ == "ufunc":
        return _is_pure(value)
    if type(value).__module__ == "typing":
        return _package(getattr(value, "__origin__", int).__module__) in _OF_PYTHON
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, enum.Enum) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return True
    if kind is not value:
        return isinstance(value, (torch.Tensor, logging.Logger, *numbers_of_numpy()))
    is_listed = value in _TYPES or _is_listed(value) or _package(value.__module__) == "collections"
    return (is_listed or issubclass(value, nn.Module | BaseException)) and not _asks(value)


def _is_pure(function: Any) -> bool:
    """Return whether a function of C is torch's or of a listed package."""
    if isinstance(function, _OPERATIONS):
        return str(function).startswith(("aten.", "prims.", "torchvision."))
    owner = getattr(function, "__self__", None)
    if not (owner is None or isinstance(owner, ModuleType | type)):
        return False  # a method of a list, say
    homes = [getattr(part, "__module__", None) for part in (function, owner)]
    home = homes[0] or homes[1] or getattr(owner, "__name__", "torch")
    listed = _package(str(home)) in _PURE and not str(home).startswith("numpy.random")
    return listed and not _asks(function)


def numbers_of_numpy() -> tuple[Any, ...]:
    """Return the class of numpy's numbers, where it is imported."""
    numpy = sys.modules.get("numpy")
    return (numpy.generic,) if numpy else ()


def _asks(function: Any) -> bool:
    return bool(_ASKS_THE_PROCESS.match(getattr(function, "__name__", "")))


def _is_of_a_user(value: Any) -> bool:
    function = getattr(value, "__func__", value)
    return isinstance(function, FunctionType) and is_user_code(function.__code__.co_filename)


def _package(name: str | None) -> str:
    return (name or "").partition(".")[0]
