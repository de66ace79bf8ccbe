"""Recording a forward as a graph, with nothing of torch run and nothing of it baked in.

`torch.fx` leaves gaps that change answers: item assignment is a TypeError, `x += y` is
recorded as `x = x + y`, a random tensor or a buffer's value at trace time is baked in as a
constant, an optional argument is always taken to be given. This tracer records the first
three as what they are and binds the last to the example's value, behind a guard.

A traced value is no torch.Tensor, so `isinstance(x, torch.Tensor)` would trace a branch that
eager never takes. A `__class__` that says otherwise is no way out: the argument parser of torch
believes it and crashes. So the names are shadowed where the code looks them up.

A traced value is never None. Where a forward asks `mask is None`, the branch that is recorded
is right for what was given, and an argument that is None in a later call must not take it.
"""

from __future__ import annotations

import dis
import inspect
import operator
import re
import sys
import threading
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial, partialmethod
from types import FrameType
from typing import Any

import torch
from torch import fx, nn, overrides
from torch.fx import _symbolic_trace as fx_tracing
from torch.fx.immutable_collections import immutable_dict
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from optimizer.core import ops
from optimizer.core.errors import CaptureError, require
from optimizer.core.guards import chooses_a_branch, expect_value
from optimizer.core.inputs import Call, opened
from optimizer.core.node import is_plain, is_user_code, overrides_call, user_line
from optimizer.frontend.names import NUMBERS, is_literal, literal
from optimizer.frontend.traceable import Code, is_of_torch, numbers_of_numpy

_OF_AUTOGRAD = ("grad", "grad_fn", "names")
_CHANGED_BY_TO = ("device", "dtype", "is_cuda")


def _refusing(reason: str) -> Any:
    def method(self: Any, *operands: Any) -> Any:
        raise CaptureError(reason)

    return method


class Value(fx.Proxy):
    """A traced value that also records item assignment and in-place operators."""

    tracer: Any
    __array_priority__ = torch.Tensor.__array_priority__  # numpy's numbers leave products to it

    def _record(self, function: Callable[..., Any], *operands: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *operands), {})

    def __getattr__(self, name: str) -> Member:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _OF_AUTOGRAD or not hasattr(torch.Tensor, name):
            raise CaptureError(f"it asks a value for its attribute '{name}'")
        return Member(self, name)

    __hash__ = _refusing("it looks a traced value up in a set or dict")
    __len__ = _refusing("it takes the len() of a traced value")
    __index__ = _refusing("it needs a traced value as a number")
    __int__ = __float__ = __complex__ = __index__

    def __str__(self) -> str:
        if is_user_code(sys._getframe(1).f_code.co_filename):
            raise CaptureError("it writes a traced value as text")
        return super().__str__()

    def __format__(self, specification: str) -> str:
        if _is_message(sys._getframe(1)):  # which is read where something is wrong
            return super().__str__()
        raise CaptureError("it writes a traced value as text")


_TEXTS = ("BUILD_STRING", "FORMAT", "CONVERT", "LOAD", "BINARY", "PRECALL", "KW_NAMES")
_TELLS = re.compile(r"_?(assert|check|warn|log|debug|info|error|print)")


def _is_message(frame: FrameType) -> bool:
    """Return whether a text goes to a call whose result is raised, or whose name says it tells."""
    code: Any = [*dis.get_instructions(frame.f_code)]
    rest = (each for each in code if each.offset > frame.f_lasti)
    call = next((each for each in rest if not each.opname.startswith(_TEXTS)), code[-1])
    begin = (each.argval for each in code if each.positions[::2] == call.positions[::2])
    name = ["", *(each for each in begin if isinstance(each, str))][-1]  # of what is called
    then = call.opname.startswith("CALL") and next(rest).opname
    return then == "RAISE_VARARGS" or (then == "POP_TOP" and bool(_TELLS.match(name)))


def _is_asserted(frame: FrameType) -> bool:
    """Return whether an assertion fails where what a jump asks for its truth is false."""
    code = [each for each in dis.get_instructions(frame.f_code) if each.offset >= frame.f_lasti]
    jump, after = [each for each in code if each.opname not in ("TO_BOOL", "NOT_TAKEN")][:2]
    if "IF_FALSE" in jump.opname:
        after = next(each for each in code if each.offset == jump.argval)
    return "ASSERTION_ERROR" in after.opname or after.argrepr == "AssertionError"


_function: Any
for _function in (operator.setitem, *ops.INPLACE_OPERATORS):
    setattr(Value, f"__{_function.__name__}__", partialmethod(Value._record, _function))


class Member(Value, fx.proxy.Attribute):
    """An attribute of a traced value: a method if it is called, else recorded when it is used."""


class Weight(Value):
    """A parameter or buffer. Its shape is the model's own and may steer control flow."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self.tensor, self.shape, self.ndim = tensor, tensor.shape, tensor.dim()
        self.dim, self.size = tensor.dim, tensor.size


def answer_for_traced(code: Code, patcher: Any) -> None:
    """Let a patcher of fx answer what the user's functions ask of traced values and by name."""
    overrides._get_tensor_methods()  # torch keeps these lists: not with a shadow in them
    shadows = {
        "isinstance": _is_instance, "getattr": partial(_get, code),
        "hasattr": partial(_of_no_value, hasattr, "it asks what a value has"),
        "type": partial(_of_no_value, type, "it asks for the type of a value"),
    }  # fmt: skip
    for space in {id(each.__globals__): each.__globals__ for each in code.functions}.values():
        for name in shadows.keys() - space.keys():
            patcher.patch(space, name, shadows[name])
    patcher.patch_method(torch, "is_tensor", lambda value: _is_instance(value, torch.Tensor))


def _is_instance(value: Any, kinds: Any) -> bool:
    if not isinstance(value, Value) or isinstance(value, kinds):
        return isinstance(value, kinds)
    if isinstance(value, Weight):
        return isinstance(value.tensor, kinds)
    classes = kinds if isinstance(kinds, tuple) else (kinds,)
    if value.tracer.is_tensor(value.node) and all(map(_is_clear, classes)):
        return issubclass(torch.Tensor, kinds)
    raise CaptureError("it asks for the type of an intermediate value")


def _is_clear(kind: Any) -> bool:
    """Return whether all tensors are instances of a class, or none is, whatever their dtype."""
    plain = type(kind) in (type, ABCMeta) and not issubclass(kind, torch.Tensor)
    return kind is torch.Tensor or plain


def _of_no_value(function: Callable[..., Any], reason: str, value: Any, *rest: Any) -> Any:
    require(not isinstance(value, Value), reason)
    return function(value, *rest)


def _get(code: Code, owner: Any, name: str, *default: Any) -> Any:
    if isinstance(owner, Value) and (default or name.startswith("_")):
        raise CaptureError("it asks what a value has")
    value = getattr(owner, name, *default)
    if not isinstance(value, fx.Proxy) and code.is_new(value, name):
        raise CaptureError(f"it finds '{name}' by getattr()")
    return value


_TESTS = frozenset(
    code for name, code in dis.opmap.items() if name.endswith(("IS_OP", "_IF_NONE", "_IF_NOT_NONE"))
)


def sees_how_it_is_called(forward: Callable[..., Any]) -> bool:
    """Return whether a forward can tell what is passed by name: one with `*args, **kwargs` can."""
    outer, inner = inspect.signature(forward, follow_wrapped=False), inspect.signature(forward)
    stars = any("VAR_" in parameter.kind.name for parameter in outer.parameters.values())
    return stars or list(outer.parameters) != list(inner.parameters)


class RecordConstants(TorchFunctionMode):
    """While it is active, a tracer records also calls without a traced argument."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, name = tree_leaves((args, kwargs)), getattr(func, "__name__", "")
        asked = name == "__get__" and getattr(func.__self__, "__name__", "")
        if asked in _CHANGED_BY_TO:
            return getattr(self.tracer.getattr("", args[0], {}), asked)
        traced = any(isinstance(leaf, fx.Proxy) for leaf in leaves)
        constant = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if func in ops.FACTORIES:
            constant, traced = traced or self.tracer.record_factories or func in ops.RANDOM, False
        constant |= isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
        of_another_kind = isinstance(func, torch._C.ScriptMethod | torch._ops.HigherOrderOperator)
        if of_another_kind or not (traced or (constant and name not in ops.METADATA)):
            return func(*args, **kwargs)
        require(traced or name not in ops.READS_DATA, "it reads the value of a tensor")
        # fx asks torch whether it is a method, which swaps the filters of warnings each time.
        if func in overrides._get_tensor_methods() or name == "__get__":
            return self.tracer.create_proxy("call_method", name, args, kwargs)
        return self.tracer.create_proxy("call_function", func, args, kwargs)


ALONE = threading.RLock()  # two at once would undo each other's patches in the wrong order


class Tracer(fx.Tracer):
    """Trace a module whose code may be recorded."""

    proxy_buffer_attributes = True

    def __init__(
        self, call: Call | None = None, code: Code | None = None, *, record_factories: bool = True
    ) -> None:
        super().__init__(autowrap_functions=tuple(ops.FACTORIES))
        # The example inputs decide optional arguments and flags; without them, defaults do.
        self.call, self.code = call or Call((), {}), code
        # Whether tensors that are made of nothing are recorded, as random ones are, or made now.
        self.record_factories = record_factories
        self._thread = threading.get_ident()
        self._tensors: set[fx.Node] = set()
        self.tests_for_none = any(  # or asks for a type
            not _TESTS.isdisjoint(each.co_code[::2])
            or not {"isinstance", "is_tensor"}.isdisjoint(each.co_names)
            for each in (code.codes() if code else ())
        )

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        self._names = {id(t): name for name, t in (*root.named_buffers(), *root.named_parameters())}
        self._modes = _modes()
        with ALONE, RecordConstants(self):
            graph = super().trace(root, concrete_args)
        for node in graph.nodes:
            if node.target in ops.FACTORIES:
                node.meta.pop("is_wrapped", None)  # or the code would mark torch's own for fx
        return graph

    iter = _refusing("it iterates over a traced value")
    keys = _refusing("it asks a traced value for its keys")

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Record what an assertion demands; no other branch may depend on a traced value."""
        require(_is_asserted(sys._getframe(2)), "its control flow depends on a traced value")
        self.create_proxy("call_function", torch._assert, (obj, f"assertion at {user_line()}"), {})
        return True

    def is_foreign_thread(self) -> bool:
        """Return whether a thread is not to notice that tracing patches nn.Module for all."""
        return threading.get_ident() != self._thread

    def is_tensor(self, node: fx.Node) -> bool:
        """Return whether a traced value is sure to be a tensor."""
        if node.op == "call_module":
            return isinstance(self.root.get_submodule(str(node.target)), ops.RETURN_A_TENSOR)
        return node.op == "get_attr" or node in self._tensors

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if kind == "call_method" and target in ops.CHANGES_SHAPE:
            raise CaptureError(f"it changes the shape of a tensor in place ({target})")
        if target in (torch.autograd.grad, "backward", "requires_grad_"):
            raise CaptureError("it uses autograd")
        require(_modes() == self._modes, "it enters autocast or a gradient mode inside its forward")
        node = super().create_node(kind, target, *args, **kwargs)
        node.meta["source"] = user_line()
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Generator):  # fx would keep it as an attribute of the model
            raise CaptureError("it draws by a generator of its own")
        if isinstance(a, dict) and type(a) not in (dict, immutable_dict):
            if type(a) is not OrderedDict:
                raise CaptureError(f"it makes a {type(a).__name__}, which a graph cannot hold")
            items = [(key, self.create_arg(value)) for key, value in a.items()]
            return self.create_node("call_function", type(a), (items,), {})
        is_number = isinstance(a, NUMBERS) or type(a).__module__ == "numpy"
        return literal(a) if is_number else super().create_arg(a)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        name = self._names.get(id(attr_val)) if isinstance(attr_val, torch.Tensor) else None
        if name is None or self.is_foreign_thread():
            return attr_val
        if name not in parameter_proxy_cache:
            node = self.create_node("get_attr", name, (), {})
            parameter_proxy_cache[name] = Weight(node, self, attr_val)
        return parameter_proxy_cache[name]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = type(m).__module__.startswith("optimizer.passes.")
        foreign = isinstance(m, torch.jit.ScriptModule) or not is_plain(m)
        return ours or foreign or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        known = self.submodule_paths or {}  # the forward may make others, as self.layers[:2]
        is_other = self.is_foreign_thread() or (is_of_torch(type(m)) and m not in known)
        if overrides_call(type(m)) and not is_other:
            raise CaptureError("it calls a module whose class has a __call__ of its own")
        if is_other or not self.is_leaf_module(m, name := self.path_of_module(m)):
            return forward(*args, **kwargs)
        return self.create_proxy("call_module", name, args, kwargs)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        signature = inspect.signature(root_fn)
        args, kwargs = self.call
        bound = signature.bind_partial(self.root, *args, **kwargs)
        _, *parameters = signature.parameters.values()
        for each in parameters:
            bound.arguments[each.name] = self._argument(each, bound.arguments)
        return partial(self._call_root, partial(root_fn, *bound.args, **bound.kwargs)), []

    def _argument(self, parameter: inspect.Parameter, arguments: Mapping[str, Any]) -> Any:
        name, default = parameter.name, parameter.default
        optional = default is not parameter.empty
        unwritable = optional and not is_literal(default)
        if unwritable and (name in arguments or isinstance(default, torch.Tensor)):
            raise CaptureError(f"the default of '{name}' has no literal")
        written: Any = ... if unwritable else default
        node = self.create_node("placeholder", name, (written,) if optional else (), {})
        if unwritable:  # as it is, in a call that gives no other
            self.create_proxy("call_function", expect_value, (self.proxy(node), ..., name), {})
            return default
        return self._input(node, arguments.get(name, default if optional else 0.0))

    def _input(self, node: fx.Node, value: Any) -> Any:
        proxy, name = self.proxy(node), str(node.target)
        if chooses_a_branch(value):
            self.create_proxy("call_function", expect_value, (proxy, value, name), {})
            return value
        node.meta["tested"] = self.tests_for_none
        if isinstance(value, torch.Tensor):
            self._tensors.add(node)
        elif any(map(chooses_a_branch, tree_leaves(opened(value)))):
            raise CaptureError(f"'{name}' holds what may choose a branch")
        return proxy

    def _call_root(self, root: Callable[[], Any]) -> Any:
        patcher: Any = fx_tracing.CURRENT_PATCHER
        for factory in ops.FACTORIES:  # torch.zeros(n) for a traced n; fx would search all of torch
            patcher.patch(vars(torch), factory.__name__, fx_tracing._create_wrapped_func(factory))
        if self.code:
            answer_for_traced(self.code, patcher)
        output = root()
        for leaf in tree_leaves(opened(output)):
            if isinstance(leaf, numbers_of_numpy()):
                raise CaptureError(f"it returns a {type(leaf).__name__}, which code cannot name")
        return output


def _modes() -> tuple[bool, ...]:
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *modes, *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
