"""One call as straight-line code: the operators of ATen that it runs, with sizes as numbers.

The call is made for real, in inference mode, where a dispatch mode sees composite operators as
they were called. What depends on no input is a constant. An operator that writes what nothing
else reads is written down as the one that returns a new tensor. Any other write stays one, and all
that lies in the memory that it writes, or that the caller gets by two names, is *bound*: it has to
be computed by the very operators that were written down.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from optimizer.core.copy import is_ordinary, on_storage
from optimizer.core.errors import require
from optimizer.core.inputs import Call, storages_in, tensors_in
from optimizer.core.node import name_of_call
from optimizer.core.ops import READS_DATA
from optimizer.facts.facts import is_sized_by_values, written_by
from optimizer.lowering.partition import KNOWN, arguments_of

_WHOLE = KNOWN | {"gru", "lstm", "max_pool1d", "rnn_relu", "rnn_tanh"}
_LIKE = frozenset(("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"))
_SAME = frozenset(("alias", "detach", "lift_fresh"))  # as what they are given


@dataclass(frozen=True)
class StraightLine:
    """What one call did.

    Attributes:
        module: takes the call's tensors in order, returns such outputs as a tuple.
        inputs: copies of the call's tensors, as they were before it.
        after: the same after it.
        outputs: the tensors that it returned for them, each once.
        rebuild: makes the call's output of the tensors that `module` returns.
        binds: whether some of the code is bound.
        is_open: whether it writes an input, or returns memory that the caller knows already.
    """

    module: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    after: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    rebuild: Callable[[Sequence[torch.Tensor]], Any]
    binds: bool
    is_open: bool


def straight_line(
    run: Callable[..., Any], held: Sequence[torch.Tensor], call: Call
) -> StraightLine:
    """Write down one call of `run`, which may read the tensors `held`.

    Raises:
        Refused: it does something that no fixed sequence of operators repeats.
    """
    own = call.copied()
    inputs = tuple(tensors_in(own))
    dense = all(a.stride() == b.stride() for a, b in zip(tensors_in(call), inputs, strict=True))
    require(dense, "an input has gaps or overlaps in memory")
    recorder = Recorder(inputs, held, _WHOLE)
    with torch.inference_mode(), _Reads(), recorder:
        output = run(*own.args, **own.kwargs)
    outputs = _distinct(output)
    require(all(map(is_ordinary, outputs)), "an output is more than its storage and shape")
    module, bound = recorder.finished(outputs), recorder.bound
    known, returned = storages_in(inputs), storages_in(outputs)
    is_open = not known.isdisjoint(bound | returned) or not returned.isdisjoint(bound)
    before = tuple(tensors_in(call.copied())) if is_open else inputs
    rebuild, binds = _rebuild(output), bool(bound)
    return StraightLine(module, before, inputs, outputs, rebuild, binds, is_open)


def _distinct(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple({id(each): each for each in tensors_in(value)}.values())


def _rebuild(output: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    """A function from the distinct tensors in an output to an output of the same structure."""
    if isinstance(output, torch.Tensor):
        return operator.itemgetter(0)
    leaves, spec = pytree.tree_flatten(output)
    places = {id(each): place for place, each in enumerate(_distinct(output))}
    kept = [(places.get(id(leaf)), None if id(leaf) in places else leaf) for leaf in leaves]
    kinds = {type(leaf) for _, leaf in kept}
    require(kinds <= {bool, int, float, str, type(None)}, "it returns an object of its own")

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        made = [leaf if place is None else tensors[place] for place, leaf in kept]
        return pytree.tree_unflatten(made, spec)

    return rebuild


class _Reads(TorchFunctionMode):
    """Refuse what hands data to Python; a layer that sees a mode takes no fast path of its own."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        require(name not in READS_DATA, f"what '{name}' returns depends on values")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Write down, as a graph, what is computed of some inputs while this mode is on.

    Args:
        inputs: the placeholders of the graph, in order.
        held: tensors that may be read besides.
        whole: composite operators that are written down as they are called, by name; others are
            looked into.
    """

    def __init__(
        self, inputs: Sequence[torch.Tensor], held: Iterable[torch.Tensor], whole: Set[str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root, self.whole = fx.Graph(), nn.Module(), whole
        self.nodes, self.constants = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.memory: dict[fx.Node, set[int]] = {}  # where the result of each lies
        self.lifetimes: dict[int, StorageWeakRef] = {}  # so that no address is given twice
        self.bound = set[int]()
        self.inputs, self.held = inputs, storages_in(held := list(held))
        self.constants.update(dict.fromkeys(held))
        for place, tensor in enumerate(inputs):
            self._note(self.graph.placeholder(f"input_{place}"), tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, str(func._opname)
        if name not in self.whole:
            with self:
                inside = func.decompose(*args, **kwargs)
            if inside is not NotImplemented:
                return inside
        if name in _LIKE or not any(tensor in self.nodes for tensor in tensors_in((args, kwargs))):
            return self._constant(func, args, kwargs)
        if written := tensors_in(written_by(func, args, kwargs)):
            return self._write(func, args, kwargs, written)
        require(not is_sized_by_values(func, args), "a size depends on values")
        result = func(*args, **kwargs)
        tensors = tensors_in(result)
        require(bool(tensors), f"what '{name}' returns depends on values")
        if name in _SAME:
            self.nodes[result] = self._node(args[0])
        elif tensors[0] not in self.nodes:  # else it returns what it is given
            self._note(self._call(func, args, kwargs), result)
        return result

    def _constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = storages_in(written_by(func, args, kwargs))
        require(written.isdisjoint(self.held), "it writes a weight")
        if func._opname not in (*_LIKE, *_SAME):  # numbers of Python's come by `lift_fresh`
            self._require_known((args, kwargs))
        result = func(*args, **kwargs)
        made, known = tensors_in(result), self.constants if written else ()
        made += [each for each in known if not written.isdisjoint(storages_in(each))]
        self._keep(made)
        self.constants.update(dict.fromkeys(made))  # those that are written are other ones
        return result

    def _write(self, func: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> Any:
        """Record a write: as what makes a new tensor where nothing else reads the memory."""
        self._require_known((args, kwargs))
        for tensor in written:
            if tensor not in self.nodes:
                self._thaw(tensor)
        memory = storages_in(written)
        readers = [each for each in self.nodes if not memory.isdisjoint(storages_in(each))]
        alone = len(readers) == 1 and memory.isdisjoint(self.bound | storages_in(self.inputs))
        new = self._as_new(func, args, kwargs) if alone else None
        if new is None:
            self.bound |= memory
            self.memory[self._call(func, args, kwargs)] = memory
        result = func(*args, **kwargs)
        require(storages_in(written) == memory, "it gives a tensor other memory")
        if new is not None:
            self.memory[new] |= memory
            self.nodes[written[0]] = new
        return result

    def _as_new(self, func: Any, args: Any, kwargs: Any) -> fx.Node | None:
        """The call of the same operator that returns a tensor of its own, if that is alike."""
        operators = getattr(torch.ops, func.namespace)
        pure = getattr(operators, func._opname.removesuffix("_"), None)
        if pure is None:
            return None
        target = kwargs.get("out", args[0])
        with self:
            made = pure(*args, **{key: value for key, value in kwargs.items() if key != "out"})
        alike = isinstance(made, torch.Tensor) and layout_of(made) == layout_of(target)
        return self.nodes[made] if alike and made is not target else None

    def _thaw(self, constant: torch.Tensor) -> None:
        """Take a copy of a constant that is written, or returned, anew in each call."""
        memory, storage = storages_in(constant), constant.untyped_storage()
        require(memory.isdisjoint(self.held), "it writes, or returns, a weight")
        names = [each for each in self.constants if storages_in(each) == memory]
        one = {each.dtype for each in names} == {constant.dtype}
        require(one, "it writes a constant of two dtypes")
        flat = torch.empty(0, dtype=constant.dtype, device=constant.device).set_(storage)
        self.constants[flat] = None
        copy = self._call(torch.ops.aten.clone.default, (flat,), {})
        self.memory[copy] = memory
        for each in names:
            del self.constants[each]
            place = (each.shape, each.stride(), each.storage_offset())
            call = self.graph.call_function(torch.ops.aten.as_strided.default, (copy, *place))
            self._note(call, each)
        self.bound |= memory

    def _note(self, node: fx.Node, result: Any) -> None:
        """Remember what a node stands for, and its geometry under "val"."""
        self.memory[node] = self._keep(result)
        if isinstance(result, torch.Tensor):
            node.meta["val"] = _without_data(result)
            self.nodes[result] = node
            return
        for place, each in enumerate(result):
            require(isinstance(each, torch.Tensor), f"'{node.name}' returns no tensors only")
            self._note(self.graph.call_function(operator.getitem, (node, place)), each)

    def _keep(self, value: Any) -> set[int]:
        for tensor in tensors_in(value):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.lifetimes:
                self.lifetimes[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return storages_in(value)

    def _call(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        if func is torch.ops.aten.cat.default:
            # Those without elements, as of a new cache, change nothing.
            filled = [each for each in args[0] if each.numel()]
            one = filled and len({each.dtype for each in args[0]}) == 1
            args = (filled if one else args[0], *args[1:])
        own = pytree.tree_map_only(torch.Tensor, self._node, (tuple(args), kwargs))
        node = self.graph.call_function(func, *own)
        self.memory[node] = set()
        return node

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        self._require_known(tensor)
        if tensor in self.nodes:
            return self.nodes[tensor]  # type: ignore[no-any-return]
        if self.constants[tensor] is None:
            name, held = f"constant_{len(self.root._buffers)}", storages_in(tensor) <= self.held
            with torch.inference_mode(False), torch.no_grad():
                kept = tensor.detach() if held else exact_copy(tensor)
            self.root.register_buffer(name, kept)
            node = self.constants[tensor] = self.graph.get_attr(name)
            node.meta["val"], self.memory[node] = _without_data(kept), self._keep(tensor)
        return self.constants[tensor]  # type: ignore[no-any-return]

    def _require_known(self, value: Any) -> None:
        tensors = tensors_in(value)
        known = all(each in self.nodes or each in self.constants for each in tensors)
        require(known, "a tensor comes from code that cannot be followed")

    def finished(self, outputs: Sequence[torch.Tensor]) -> fx.GraphModule:
        """The graph that returns `outputs`; of those that are constants, each call's own copy."""
        self._require_known(outputs)
        for each in outputs:
            if each not in self.nodes:
                self._thaw(each)
        self.graph.output(tuple(map(self._node, outputs)))
        distinct = _distinct([*self.inputs, *outputs])
        names = Counter(storage for each in distinct for storage in storages_in(each))
        self.bound |= {storage for storage, count in names.items() if count > 1}
        for node in self.graph.nodes:
            memory = self.memory.get(node, set[int]())
            node.meta["bound"] = not memory.isdisjoint(self.bound)
            read = memory.union(*(self.memory[each] for each in node.all_input_nodes))
            if _is_copy(node) and read.isdisjoint(self.bound | storages_in(outputs)):
                node.replace_all_uses_with(node.all_input_nodes[0])
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self.root, self.graph)


def _is_copy(node: fx.Node) -> bool:
    """Whether a node returns values as it gets them, and as they lie."""
    if name_of_call(node) not in ("cat", "clone", "pad") or len(node.all_input_nodes) > 1:
        return False
    same = not any(arguments_of(node).get("pad", ())) and "val" in node.meta
    read = node.all_input_nodes[0].meta["val"]
    return same and layout_of(node.meta["val"]) == layout_of(read)


def exact_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the very strides, gaps included; what is to be negated in reading is by then."""
    tensor = tensor.resolve_neg()
    return on_storage(tensor, tensor.untyped_storage().clone())  # type: ignore[no-untyped-call]


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The shape, dtype and strides of a tensor, but those of single elements, which say nothing."""
    strides = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    return tensor.shape, strides, tensor.dtype


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    strided = tensor.layout is torch.strided and not tensor.is_quantized
    require(strided, "a value is more than its storage and shape")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
