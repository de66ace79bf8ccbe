"""Typed access to fx nodes: what a node calls, its arguments, its module, its line of code."""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from traceback import format_tb
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import module as _all_modules

from optimizer.core.errors import CaptureError, Refused

_SHORT = {"torch": "torch", "operator": "operator", "torch.nn.functional": "F", "torch._C._nn": "F"}
KNOWN_HOMES = frozenset(("torch", "torchvision", "_operator", "math", "collections", "optimizer"))
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_ALL = [vars(_all_modules)[f"_global{name}"] for name in HOOKS]


def arg(node: fx.Node, index: int, default: Any = None) -> Any:
    """Return the positional argument at `index`, or `default` where there is none."""
    return node.args[index] if index < len(node.args) else default


def named_arguments(node: fx.Node, parameters: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of a node by name, with the defaults in a mapping of parameters."""
    defaults = dict(parameters) if isinstance(parameters, Mapping) else {}
    return defaults | dict(zip(parameters, node.args, strict=False)) | node.kwargs


def owner(node: fx.Node) -> fx.GraphModule:
    """Return the GraphModule that a node's targets are looked up in."""
    module = node.graph.owning_module
    assert module is not None, "the graph belongs to no module"
    return module


def attribute(root: nn.Module, path: str) -> Any:
    """Return the value at the dotted `path` in `root`."""
    return attrgetter(path)(root)


def attribute_of(node: Any) -> Any:
    """Return the tensor or module of the model that a node reads or calls."""
    return attribute(owner(node), str(node.target))


def is_attribute(value: object) -> bool:
    """Return whether a value is a node that reads a tensor of the model."""
    return isinstance(value, fx.Node) and value.op == "get_attr"


def module_of(node: fx.Node) -> Any:
    """Return the module that a node calls (typed Any: a pattern has fixed its class)."""
    assert node.op == "call_module", node.op
    module: Any = owner(node)
    for name in str(node.target).split("."):
        module = module._modules[name]
    return module


def callee(node: fx.Node) -> Any:
    """Return the function, the name of the method or the plain module's class called, or None."""
    if node.op in ("call_function", "call_method"):
        return node.target
    if node.op != "call_module":
        return None
    module = module_of(node)
    return type(module) if is_plain(module) else None


def name_of_call(node: Any) -> str:
    """Return the name of the function, overload, method or, in lower case, class; "" of no node."""
    if not isinstance(node, fx.Node):
        return ""
    if node.op == "call_module":
        return type(module_of(node)).__name__.lower()
    target: Any = node.target
    return str(getattr(target, "_opname", None) or getattr(target, "__name__", target))


def home_of(node: fx.Node) -> str:
    """Return the package whose code a node calls; empty where the call does not tell.

    A decorator names itself after what it wraps: where one is another's than that, the other's.
    """
    code: Any = type(module_of(node)) if node.op == "call_module" else node.target
    homes = [""]
    while code is not None:
        inside = code.__globals__.get("__name__") if isinstance(code, FunctionType) else None
        names = (getattr(code, "__module__", None), inside)
        homes += [str(name).partition(".")[0] for name in names if name]
        code = getattr(code, "__dict__", {}).get("__wrapped__")
    return next((home for home in homes if home and home not in KNOWN_HOMES), homes[-1])


def called_on(node: fx.Node, module: Any, args: Any, kwargs: Any) -> Any:
    """Return what a node yields of some arguments, with `module` for the one that it calls."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function: Any = module if node.op == "call_module" else node.target
    return function(*args, **kwargs)


def run_nodes(
    nodes: Iterable[fx.Node],
    given: Mapping[fx.Node, Any],
    find: Callable[[fx.Node], Any] = attribute_of,
) -> Iterator[tuple[fx.Node, Any]]:
    """Run nodes in order, and yield each with its value, which is freed after its last reader.

    Some values are `given`; `find` returns the tensor that a node reads or the module that it
    calls. (`fx.Interpreter` shows a progress bar, which leaves a thread where there is tqdm.)
    """
    values, nodes = dict(given), list(nodes)
    last = {read: node for node in nodes for read in node.all_input_nodes}
    for node in nodes:
        if node not in values:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            found = find(node) if node.op in ("get_attr", "call_module") else (*args, None)[0]
            values[node] = called_on(node, found, args, kwargs) if node.op[:4] == "call" else found
        yield node, values[node]
        for read in node.all_input_nodes:
            if last[read] is node:
                del values[read]


def computation(last: fx.Node, accepts: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return all nodes that a value is computed from, in order, or none unless all are accepted."""
    nodes: set[fx.Node] = set()
    pending = [last]
    while pending:
        node = pending.pop()
        if not accepts(node):
            return []
        nodes.add(node)
        pending += [each for each in node.all_input_nodes if each not in nodes]
    return sorted(nodes)


def describe(node: fx.Node) -> str:
    """Return what a node calls, or the input or attribute that it reads, as text."""
    if node.op == "call_module":
        return type(module_of(node)).__name__
    if node.op != "call_function":
        return f".{node.target}" if node.op == "call_method" else str(node.target)
    home, _, name = node._pretty_print_target(node.target).rpartition(".")
    return f"{_SHORT[home]}.{name}" if home in _SHORT else name


def shape_text(node: fx.Node) -> str:
    """Return the shape of a node's value, as `2x3`; empty where it is not known or no tensor."""
    value = getattr(node.meta.get("fact"), "value", None)
    if not isinstance(value, torch.Tensor):
        return ""
    return "x".join(map(str, value.shape)) or "scalar"


def is_plain(module: nn.Module) -> bool:
    """Return whether calling `module` runs the forward of its class and nothing else.

    Hooks and parametrizations run code of their own, and so does a forward that was set on
    the instance or a `__call__` of the class: none may be matched as the class they decorate.
    """
    attributes = vars(module)
    hooked = any(map(attributes.get, HOOKS)) or has_global_hooks()
    parametrized = "parametrizations" in module._modules
    return not (hooked or parametrized or "forward" in attributes or overrides_call(type(module)))


def hold(root: nn.Module, name: str, value: Any) -> None:
    """Register a module, a parameter or, of another tensor, a buffer."""
    if isinstance(value, torch.Tensor | None) and not isinstance(value, nn.Parameter):
        root.register_buffer(name, value)
    else:
        setattr(root, name, value)


def has_global_hooks() -> bool:
    """Return whether there are hooks on all modules, which see each call and may change it."""
    return any(_HOOKS_OF_ALL)


def overrides_call(kind: type[nn.Module]) -> bool:
    """Return whether a class that is not torch's has a `__call__` of its own."""
    return kind.__call__ is not nn.Module.__call__ and any(
        "__call__" in vars(base) and not base.__module__.startswith("torch.")
        for base in kind.__mro__
        if issubclass(base, nn.Module)
    )


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return every parameter and buffer of a module, once."""
    tables = (table for each in module.modules() for table in (each._parameters, each._buffers))
    return list({id(t): t for table in tables for t in table.values() if t is not None}.values())


def has_plain_tensors(module: nn.Module) -> bool:
    """Return whether a module holds a tensor that is neither a parameter nor a buffer."""
    return any(isinstance(each, torch.Tensor) for each in vars(module).values())


def source_of(node: fx.Node) -> str:
    """Return where the user's code made this node, as `file.py:line`; empty where unknown."""
    return str(node.meta.get("source", ""))


def adopt(graph: fx.Graph, stem: str, value: Any) -> str:
    """Let a graph's module hold a value by a free name without dots, close to `stem`; return it."""
    root, name = graph.owning_module, (stem := stem.replace(".", "_"))
    assert root is not None, "the graph belongs to no module"
    if hasattr(root, stem):
        numbers = range(1 << 20)  # a layer may be replaced ten thousand times: bisect
        free = bisect_left(numbers, True, 1, key=lambda each: not hasattr(root, f"{stem}_{each}"))
        name = f"{stem}_{free}"
    hold(root, name, value)
    return name


def clean(module: fx.GraphModule) -> None:
    """Check the graph and generate its code."""
    module.graph.lint()
    module.recompile()


NOT_USER_CODE = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


@lru_cache(1024)  # a stack has the same few files for each node
def is_user_code(path: str) -> bool:
    """Return whether a file is neither torch's nor ours."""
    return not path.startswith((*NOT_USER_CODE, "<"))  # generated code has such names


def user_line() -> str:
    """Return the innermost line of the user's code, as `file.py:line`, or an empty text."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        if is_user_code(frame.f_code.co_filename):
            return _place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def line_of(stack: BaseException | str) -> str:
    """Return the same of the stack of an error, or of a printed one."""
    text = stack if isinstance(stack, str) else "".join(format_tb(stack.__traceback__))
    lines = re.findall(r'File "(.+)", line (\d+)', text)
    return next((_place(path, line) for path, line in reversed(lines) if is_user_code(path)), "")


def reason_of(error: Exception) -> str:
    """Return why a forward cannot be recorded, and where."""
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    if not isinstance(error, CaptureError | Refused):
        reason = f"its forward cannot be recorded: {reason}"
    line = line_of(error)
    return f"{reason}, at {line}" if line else reason


def _place(path: str, line: object) -> str:
    return f"{path.rpartition(os.sep)[2]}:{line}"
