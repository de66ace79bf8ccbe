"""One call as straight-line code: every torch function it makes, with sizes as numbers.

What runs on one device for one set of sizes needs no size arithmetic and no Python. The call is
made for real, under a function mode that writes down each torch function whose arguments depend
on the inputs; whatever does not depend on them is a constant. An in-place function on a value that
nobody else holds is written down as the function that returns a new tensor.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from optimizer.core.copy import is_ordinary
from optimizer.core.guards import GUARDS
from optimizer.core.inputs import Call, storages_in, tensors_in
from optimizer.core.literals import literal
from optimizer.core.node import named_arguments
from optimizer.facts.effects import Effects
from optimizer.lowering.partition import name_of

_IN_PLACE_OPERATORS = frozenset(
    ("iadd", "isub", "imul", "itruediv", "idiv", "ipow", "iand", "ior", "ixor", "imod")
)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written. Of one made in inference mode, nobody knows."""
    return 0 if tensor.is_inference() else tensor._version


def written_tensor(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that a torch function writes, or None."""
    name = getattr(func, "__name__", "")
    if kwargs.get("out") is not None:
        return kwargs["out"]
    in_place = name.endswith("_") and not name.endswith("__")
    operator_form = name.startswith("__i") and name[2:-2] in _IN_PLACE_OPERATORS
    if in_place or operator_form or name == "__setitem__":
        return args[0]
    return args[0] if any(_in_place_flags(func, args, kwargs)) else None


def _in_place_flags(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[bool]:
    yield bool(kwargs.get("inplace", False))
    if inspect.isfunction(func) and func.__module__ == F.__name__:
        names = list(inspect.signature(func).parameters)
        yield any(bool(a) for n, a in zip(names, args, strict=False) if n == "inplace")


def returning_new(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any] | None:
    """The call that returns what `func` writes, for a `func` that writes; None if there is none."""
    name = getattr(func, "__name__", "")
    if "out" in kwargs:
        return func, args, {key: value for key, value in kwargs.items() if key != "out"}
    if any(_in_place_flags(func, args, kwargs)):
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.arguments["inplace"] = False
        return func, bound.args, bound.kwargs
    pure = f"__{name[3:]}" if name.startswith("__i") else name[:-1]
    owners = (torch.Tensor, torch, F)
    found: Any = next((getattr(owner, pure) for owner in owners if hasattr(owner, pure)), None)
    return None if found is None or name == "__setitem__" else (found, args, kwargs)


def see_through(function: Any) -> Any:
    """A function written in Python, so that a mode sees what it calls and not the function."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    code, closure = function.__code__, function.__closure__
    made = types.FunctionType(code, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_DROPOUT = {"input": None, "p": 0.5, "training": True}
_PAD = {"input": None, "pad": None}


def skip_idle(made: Mapping[fx.Node, set[int]], returned: set[int]) -> None:
    """Let what reads an idle call read what that is given.

    Not where a caller gets its memory, one of the storages `returned`: padding by nothing is a
    copy, which may be written. `made` has the storages of each idle call's result.
    """
    for node, storages in made.items():
        if storages.isdisjoint(returned):
            node.replace_all_uses_with(node.all_input_nodes[0])


def _is_idle(node: fx.Node) -> bool:
    """Whether it is a dropout that drops nothing, or pads by nothing."""
    if name_of(node) == "dropout":
        return not named_arguments(node, _DROPOUT)["training"]
    return name_of(node) == "pad" and not any(named_arguments(node, _PAD)["pad"])


class NotStraightLineError(Exception):
    """A call does something that no fixed sequence of torch functions repeats."""


@dataclass(frozen=True)
class StraightLine:
    """What one call did.

    Attributes:
        module: takes the call's tensors in order, returns the output's tensors as a tuple.
        inputs: copies of the call's tensors.
        outputs: what it returned for them.
        rebuild: makes the call's output of the tensors that `module` returns.
    """

    module: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    rebuild: Callable[[Sequence[torch.Tensor]], Any]


def straight_line(
    run: Callable[..., Any], held: Sequence[torch.Tensor], call: Call
) -> StraightLine:
    """Make one call of `run` and write it down; `held` is what it may read besides its arguments.

    Raises:
        NotStraightLineError: with the reason.
    """
    own = call.copied()
    inputs = tuple(tensors_in(own))
    dense = all(a.stride() == b.stride() for a, b in zip(tensors_in(call), inputs, strict=True))
    require(dense, "an input has gaps or overlaps in memory")
    recorder, effects = _Recorder(inputs, held), Effects()
    with torch.no_grad(), effects, recorder:
        output = run(*own.args, **own.kwargs)
    require(not effects.counts, "a size depends on values")
    outputs = tensors_in(output)
    require(all(map(is_ordinary, outputs)), "an output is more than its storage and shape")
    _require_own_storages(outputs, inputs)
    module = recorder.finished(outputs)
    return StraightLine(module, inputs, tuple(outputs), _rebuild(output))


def _rebuild(output: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    """A function from the tensors in an output to an output of the same structure."""
    if isinstance(output, torch.Tensor):
        return operator.itemgetter(0)
    leaves, spec = pytree.tree_flatten(output)
    kept = [_PLACE if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    kinds = {type(leaf) for leaf in kept if leaf is not _PLACE}
    require(kinds <= {bool, int, float, str, type(None)}, "it returns an object of its own")

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        given = iter(tensors)
        return pytree.tree_unflatten([next(given) if k is _PLACE else k for k in kept], spec)

    return rebuild


def _require_own_storages(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    storages = [storages_in(tensor) for tensor in (*inputs, *outputs)]
    distinct = len(set[int]().union(*storages)) == len(storages)
    require(distinct, "an output shares memory with an input or another output")


class _Recorder(TorchFunctionMode):
    def __init__(self, inputs: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.graph, self.root = fx.Graph(), nn.Module()
        self.nodes = WeakIdKeyDictionary()
        self.constants = WeakIdKeyDictionary()
        self.used: list[tuple[torch.Tensor, int]] = []
        self.made: dict[fx.Node, set[int]] = {}  # where the result of each that is idle lies
        self.stale = WeakIdKeyDictionary()  # what was written by another name
        self.inputs = storages_in(inputs)
        for place, tensor in enumerate(inputs):
            self.nodes[tensor] = self.graph.placeholder(f"input_{place}")
        for tensor in held:
            self.constants[tensor] = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        kinds: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, owner = getattr(func, "__name__", ""), str(getattr(func, "__module__", ""))
        dependent = any(tensor in self.nodes for tensor in tensors_in((args, kwargs)))
        if not dependent or name in _LIKE:
            return self._constant(func(*args, **kwargs))
        if func in GUARDS:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward or owner.startswith("optimizer."):
            with self:
                return see_through(func)(*args, **kwargs)
        if name == "__get__":
            return self._attribute(func, args[0])
        if name in _OF_GEOMETRY:
            return func(*args, **kwargs)
        target = written_tensor(func, args, kwargs)
        if target is None:
            return self._record(func, args, kwargs)
        return self._write(func, args, kwargs, target)

    def _constant(self, result: Any) -> Any:
        for tensor in tensors_in(result):
            if tensor not in self.nodes and tensor not in self.constants:
                self.constants[tensor] = None
        return result

    def _attribute(self, func: Any, owner: torch.Tensor) -> Any:
        value = func(owner)
        if not isinstance(value, torch.Tensor):
            return value
        name = func.__self__.__name__
        require(name in ("T", "mT", "H", "mH", "real", "imag"), f"it reads .{name} of a tensor")
        self.nodes[value] = self.graph.call_function(getattr, (self._node(owner), name))
        return value

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", str(func))
        require(name != "max_pool1d", "max_pool1d has other strides while it is written down")
        read = [(tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs))]
        result = func(*args, **kwargs)
        unchanged = all(version_of(tensor) == version for tensor, version in read)
        require(unchanged, f"'{name}' writes a tensor")
        tensors = [result] if isinstance(result, torch.Tensor) else result
        sequence = isinstance(tensors, tuple | list) and tensors
        require(bool(sequence), f"what '{name}' returns depends on values")
        node, held = self._call(func, args, kwargs), storages_in(result)
        new = held - storages_in((args, kwargs))  # it may lie where something lay that is gone
        self.made = {idle: storages - new for idle, storages in self.made.items()}
        if tensors[0] is result:
            self.nodes[result] = node
            self.made |= {node: held} if _is_idle(node) else {}
            return result
        for place, tensor in enumerate(tensors):
            require(isinstance(tensor, torch.Tensor), f"'{name}' returns no tensors only")
            self.nodes[tensor] = self.graph.call_function(operator.getitem, (node, place))
        return result

    def _write(self, func: Any, args: Any, kwargs: Any, target: torch.Tensor) -> Any:
        """Record the function that makes a new tensor; whoever reads `target` then reads that.

        What shares memory with it is not to be read again.
        """
        own = target in self.nodes and storages_in(target).isdisjoint(self.inputs)
        require(own, "it writes a tensor that is read elsewhere")
        found = returning_new(func, args, kwargs)
        if found is None:
            raise NotStraightLineError(f"it writes a tensor by '{getattr(func, '__name__', func)}'")
        pure, given, options = found
        made = pure(*given, **options)
        same = made.dtype == target.dtype and made.shape == target.shape
        require(same, "it writes a tensor of another dtype or shape")
        node = self._call(pure, given, options)
        storages = storages_in(target)
        self.stale.update((o, None) for o in self.nodes if storages & storages_in(o))
        func(*args, **kwargs)
        del self.stale[target]
        self.nodes[target] = node
        return target

    def _call(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        own = pytree.tree_map_only(torch.Tensor, self._node, (tuple(args), kwargs))
        try:
            own_args, own_kwargs = literal(own)
        except TypeError as error:
            raise NotStraightLineError(str(error)) from error
        name = getattr(func, "__name__", "")
        for method in (name, f"__{name}__"):  # `Tensor.__pow__` calls itself pow
            if getattr(torch.Tensor, method, None) is func:
                return self.graph.call_method(method, own_args, own_kwargs)
        return self.graph.call_function(func, own_args, own_kwargs)

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        require(tensor not in self.stale, "it reads a tensor that was written by another name")
        if tensor in self.nodes:
            return self.nodes[tensor]  # type: ignore[no-any-return]
        require(tensor in self.constants, "a tensor comes from code that cannot be followed")
        if self.constants[tensor] is None:
            name = f"constant_{len(self.used)}"
            self.used.append((tensor, version_of(tensor)))
            self.root.register_buffer(name, tensor.detach())
            self.constants[tensor] = self.graph.get_attr(name)
        return self.constants[tensor]  # type: ignore[no-any-return]

    def finished(self, outputs: Sequence[torch.Tensor]) -> fx.GraphModule:
        """The graph that returns `outputs`."""
        same = all(version_of(tensor) == version for tensor, version in self.used)
        require(same, "it writes a constant after reading it")
        # Else every call would return the very same tensor, and a caller may write it.
        require(all(each in self.nodes for each in outputs), "an output depends on no input")
        self.graph.output(tuple(map(self._node, outputs)))
        skip_idle(self.made, storages_in(outputs))
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self.root, self.graph)


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotStraightLineError(reason)


_PLACE = object()
_LIKE = frozenset(("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"))
_OF_GEOMETRY = frozenset((
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "element_size", "get_device", "__len__",
    "result_type", "is_tensor",
))  # fmt: skip
