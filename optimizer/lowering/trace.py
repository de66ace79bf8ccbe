"""One call as straight-line code: the operators of ATen that it runs, with sizes as numbers.

The call is made for real, in inference mode, where a dispatch mode sees composite operators as
they were called. What depends on no input is a constant. An operator that writes what nothing
else reads is written down as the one that returns a new tensor. Any other write stays one, and all
that lies in the memory that it writes, or that the caller gets by two names, is *aliased*: it is
computed by the very operators that were written down.
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
from optimizer.core.inputs import Call, is_size, storages_in, tensors_in
from optimizer.core.node import name_of_call
from optimizer.core.ops import READS_DATA
from optimizer.facts.facts import written_by
from optimizer.frontend.names import is_literal
from optimizer.lowering.partition import KNOWN, arguments_of
from optimizer.verify.equivalence import Answer

_WHOLE = KNOWN | {"gru", "lstm", "max_pool1d", "rnn_relu", "rnn_tanh"}
_LIKE = frozenset(("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"))
LITERALS = frozenset((bool, int, float, str, type(None), torch.Size))  # leaves besides tensors
_ATEN: Any = torch.ops.aten
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_COMPOSITE: Any = torch._C.DispatchKey.CompositeImplicitAutograd
_SAME = frozenset(("alias", "detach", "lift_fresh"))  # as their argument


@dataclass(frozen=True)
class StraightLine:
    """A recorded call."""

    module: fx.GraphModule  # takes the call's tensors in order, returns such outputs as a tuple
    inputs: tuple[torch.Tensor, ...]  # copies of the call's tensors, as they were before it
    answer: Answer  # the tensors that it returned for them, each once, and left in them
    rebuild: Callable[[Sequence[torch.Tensor]], Any]  # makes the call's output of such tensors
    is_open: bool  # whether it writes an input, or returns memory that the caller knows already


def straight_line(
    run: Callable[..., Any], weights: Sequence[torch.Tensor], call: Call
) -> StraightLine:
    """Record one call of `run`, which may read the tensors `weights`.

    Raises:
        Refused: it does something that no fixed sequence of operators repeats.
    """
    copied = call.copied()
    inputs = tuple(tensors_in(copied))
    dense = all(a.stride() == b.stride() for a, b in zip(tensors_in(call), inputs, strict=True))
    require(dense, "an input has gaps or overlaps in memory")
    recorder = Recorder(inputs, weights, _WHOLE)
    with torch.inference_mode(), _Reads(), recorder:
        output = run(*copied.args, **copied.kwargs)
    outputs = _distinct(output)
    require(all(map(is_ordinary, outputs)), "an output is more than its storage and shape")
    module, aliased = recorder.finished(outputs), recorder.aliased
    read, returned = storages_in(inputs), storages_in(outputs)
    is_open = not read.isdisjoint(aliased | returned) or not returned.isdisjoint(aliased)
    before = tuple(tensors_in(call.copied())) if is_open else inputs
    return StraightLine(module, before, Answer(outputs, (inputs, {})), _rebuild(output), is_open)


def _distinct(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple({id(each): each for each in tensors_in(value)}.values())


def _rebuild(output: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Return a function that makes an output of the same structure of its distinct tensors."""
    if isinstance(output, torch.Tensor):
        return operator.itemgetter(0)
    leaves, spec = pytree.tree_flatten(output, is_size)
    places = {id(each): place for place, each in enumerate(_distinct(output))}
    sources = [(places.get(id(leaf)), None if id(leaf) in places else leaf) for leaf in leaves]
    require({type(leaf) for _, leaf in sources} <= LITERALS, "it returns an object of its own")

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        leaves = [leaf if place is None else tensors[place] for place, leaf in sources]
        return pytree.tree_unflatten(leaves, spec)

    return rebuild


class _Reads(TorchFunctionMode):
    """Refuse what hands data to Python; below a mode, layers take no fast path of their own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        require(name not in READS_DATA, f"what '{name}' returns depends on values")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record, as a graph, what is computed of some inputs while this mode is on.

    Args:
        inputs: the placeholders of the graph, in order.
        weights: tensors that may be read besides.
        whole: the names of composite operators to record whole; others are decomposed.
    """

    def __init__(
        self, inputs: Sequence[torch.Tensor], weights: Iterable[torch.Tensor], whole: Set[str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root, self.whole = fx.Graph(), nn.Module(), whole
        self.nodes, self.constants = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self.memory: dict[fx.Node, set[int]] = {}  # where the result of each lies
        self.lifetimes: dict[int, StorageWeakRef] = {}  # so that no address is given twice
        self.aliased = set[int]()
        self.inputs, self.weights = inputs, storages_in(weights := list(weights))
        self.constants.update(dict.fromkeys(weights))
        for place, tensor in enumerate(inputs):
            self._note(self.graph.placeholder(f"input_{place}"), tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func._opname)
        if name not in self.whole and _has_kernel(func.name(), _COMPOSITE):
            with self:  # in C++, as eager does: in torch's Python of it, an idle dropout copies
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        if name in _LIKE or not any(tensor in self.nodes for tensor in tensors_in((args, kwargs))):
            return self._constant(func, args, kwargs)
        if written := tensors_in(written_by(func, args, kwargs)):
            return self._write(func, args, kwargs, written)
        require(not _is_sized_by_values(func, args), "a size depends on values")
        result = func(*args, **kwargs)
        tensors = tensors_in(result)
        require(bool(tensors), f"what '{name}' returns depends on values")
        if name in _SAME:
            self.nodes[result] = self._node(args[0])
        elif tensors[0] not in self.nodes:  # else it returns its argument
            self._note(self._call(func, args, kwargs), result)
        return result

    def _constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = storages_in(written_by(func, args, kwargs))
        require(written.isdisjoint(self.weights), "it writes a weight")
        if func._opname not in (*_LIKE, *_SAME):  # numbers of Python's come by `lift_fresh`
            self._require_traced((args, kwargs))
        result = func(*args, **kwargs)
        constants, earlier = tensors_in(result), self.constants if written else ()
        constants += [each for each in earlier if not written.isdisjoint(storages_in(each))]
        self._keep(constants)
        self.constants.update(dict.fromkeys(constants))  # those that are written are other ones
        return result

    def _write(self, func: Any, args: Any, kwargs: Any, written: Sequence[torch.Tensor]) -> Any:
        """Record a write: as what makes a new tensor where nothing else reads the memory."""
        self._require_traced((args, kwargs))
        for tensor in written:
            if tensor not in self.nodes:
                self._thaw(tensor)
        memory = storages_in(written)
        readers = [each for each in self.nodes if not memory.isdisjoint(storages_in(each))]
        alone = len(readers) == 1 and memory.isdisjoint(self.aliased | storages_in(self.inputs))
        new = self._as_new(func, args, kwargs) if alone else None
        if new is None:
            self.aliased |= memory
            self.memory[self._call(func, args, kwargs)] = memory
        result = func(*args, **kwargs)
        require(storages_in(written) == memory, "it gives a tensor other memory")
        if new is not None:
            self.memory[new] |= memory
            self.nodes[written[0]] = new
        return result

    def _as_new(self, func: Any, args: Any, kwargs: Any) -> fx.Node | None:
        """Return the call of the functional form of an operator, if its result lies alike."""
        pure = getattr(getattr(torch.ops, func.namespace), func._opname.removesuffix("_"), None)
        if pure is None:
            return None
        names = (each.name for each in func._schema.arguments)
        named = dict(zip(names, args, strict=False)) | kwargs  # polygamma_(x, n) is polygamma(n, x)
        target = named.pop("out", args[0])
        with self:
            result = pure(**named)
        alike = isinstance(result, torch.Tensor) and layout_of(result) == layout_of(target)
        return self.nodes[result] if alike and result is not target else None

    def _thaw(self, constant: torch.Tensor) -> None:
        """Record that each call copies a constant that it writes or returns."""
        memory, storage = storages_in(constant), constant.untyped_storage()
        require(memory.isdisjoint(self.weights), "it writes, or returns, a weight")
        views = [each for each in self.constants if storages_in(each) == memory]
        dtypes = {each.dtype for each in views}
        require(dtypes == {constant.dtype}, "it writes a constant of two dtypes")
        flat = torch.empty(0, dtype=constant.dtype, device=constant.device).set_(storage)
        self.constants[flat] = None
        copy = self._call(_ATEN.clone.default, (flat,), {})
        self.memory[copy] = memory
        for each in views:
            del self.constants[each]
            place = (each.shape, each.stride(), each.storage_offset())
            call = self.graph.call_function(_ATEN.as_strided.default, (copy, *place))
            self._note(call, each)
        self.aliased |= memory

    def _note(self, node: fx.Node, result: Any) -> None:
        """Record which tensors are the result of a node, and their geometry under "val"."""
        self.memory[node] = self._keep(result)
        if isinstance(result, torch.Tensor):
            node.meta["val"] = without_data(result)
            self.nodes[result] = node
            return
        for place, each in enumerate(result):
            require(isinstance(each, torch.Tensor), f"'{node.name}' returns no tensors only")
            self._note(self.graph.call_function(operator.getitem, (node, place)), each)

    def _keep(self, value: Any) -> set[int]:
        for tensor in tensors_in(value):
            strided = tensor.layout is torch.strided and not tensor.is_quantized
            require(strided, "a value is more than its storage and shape")
            storage = tensor.untyped_storage()
            if storage._cdata not in self.lifetimes:
                self.lifetimes[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return storages_in(value)

    def _call(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        if func is _ATEN.cat.default:
            # Those without elements, as of a new cache, change nothing.
            filled = [each for each in args[0] if each.numel()]
            alike = filled and len({each.dtype for each in args[0]}) == 1
            args = (filled if alike else args[0], *args[1:])
        operands = fx.node.map_aggregate(
            (tuple(args), kwargs),
            lambda each: self._node(each) if isinstance(each, torch.Tensor) else each,
        )
        require(is_literal(operands), f"code cannot name what '{func._opname}' is given")
        node = self.graph.call_function(func, *operands)
        self.memory[node] = set()
        return node

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        self._require_traced(tensor)
        if tensor in self.nodes:
            return self.nodes[tensor]  # type: ignore[no-any-return]
        if self.constants[tensor] is None:
            name = f"constant_{len(self.root._buffers)}"
            shared = storages_in(tensor) <= self.weights
            with torch.inference_mode(False), torch.no_grad():
                constant = tensor.detach() if shared else exact_copy(tensor)
            self.root.register_buffer(name, constant)
            node = self.constants[tensor] = self.graph.get_attr(name)
            self.memory[node], node.meta["val"] = self._keep(tensor), without_data(constant)
        return self.constants[tensor]  # type: ignore[no-any-return]

    def _require_traced(self, value: Any) -> None:
        traced = all(each in self.nodes or each in self.constants for each in tensors_in(value))
        require(traced, "a tensor comes from code that cannot be followed")

    def finished(self, outputs: Sequence[torch.Tensor]) -> fx.GraphModule:
        """Return the graph that returns `outputs`, and new copies of those that are constants."""
        self._require_traced(outputs)
        for each in outputs:
            if each not in self.nodes:
                self._thaw(each)
        self.graph.output(tuple(map(self._node, outputs)))
        counts = Counter(s for t in _distinct([*self.inputs, *outputs]) for s in storages_in(t))
        self.aliased |= {storage for storage, count in counts.items() if count > 1}
        writes = self.graph.find_nodes(op="call_function", target=_ATEN.index_copy_.default)
        values = set[int]().union(*map(self._written_last, writes))
        found, seen = dict[str, fx.Node](), self.aliased | storages_in(outputs)
        for node in self.graph.nodes:
            memory = self.memory.get(node, set[int]())
            node.meta["aliased"] = node in writes or not memory.isdisjoint(self.aliased - values)
            read = memory.union(*(self.memory[each] for each in node.all_input_nodes))
            if read.isdisjoint(seen):
                same = node.all_input_nodes[0] if _is_copy(node) else node
                node.replace_all_uses_with(found.setdefault(self._value_of(same), same))
        self.graph.eliminate_dead_code()
        return fx.GraphModule(self.root, self.graph)

    def _value_of(self, node: fx.Node) -> str:
        """Return one text for all nodes that compute the same, as the place in each cache is."""
        constant = self.root._buffers.get(str(node.target))
        if constant is not None and constant.numel() == 1:
            return f"{constant.dtype} {constant.tolist()}"
        return f"{node.target} {node.args} {node.kwargs}"

    def _written_last(self, write: Any) -> set[int]:
        """Write one place, as of a cache, when all is computed; return the memory, or none.

        What reads the tensor after the write reads `where(elsewhere, tensor, source)`: so one
        region holds what is written and what reads it. Not so where views from before, or other
        writes, lie in the memory, a view is returned, or what is written may change until the end.
        """
        tensor, _, index, source = write.args
        memory, output = self.memory[write], self.graph.output_node()
        inside = [n for n in self.graph.nodes if not memory.isdisjoint(self.memory.get(n, ()))]
        views = [n for n in inside[2:] if "val" in n.meta and output not in n.users]
        kept = self.aliased.isdisjoint(self.memory[index] | self.memory[source])
        is_one = index.meta["val"].numel() == 1 and tensor.meta["val"].dim() > 0
        if not kept or not is_one or inside[2:] != views:
            return set()
        value, after = self._with_place(write), [n for n in tensor.users if n > write]
        tensor.replace_all_uses_with(value, lambda n: n in after and n.op != "output")
        output.prepend(write)
        return memory

    def _with_place(self, write: Any) -> fx.Node:
        """Return a new tensor, as a call before the write of one place leaves the tensor."""

        def made(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            node = self.graph.call_function(target, args, kwargs)
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
            self.memory[node] = set()
            return node

        tensor, dim, index, source = write.args
        size, *inner = tensor.meta["val"].shape[dim:]
        with self.graph.inserting_before(write):
            elsewhere = made(_ATEN.new_ones.default, index, [size], dtype=torch.bool)
            here = made(_ATEN.new_zeros.default, index, [1], dtype=torch.bool)
            elsewhere = made(_ATEN.index_copy.default, elsewhere, 0, index, here)  # none below 0
            lined_up = made(_ATEN.view.default, elsewhere, [size, *(1 for _ in inner)])
            return made(_ATEN.where.self, lined_up, tensor, source)  # laid out as the first


def _is_sized_by_values(func: Any, args: Sequence[Any]) -> bool:
    """Return whether the size of what an operator returns depends on values."""
    if func is _ATEN.index.Tensor:  # v[i] has as many elements as there are numbers in i
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


def _is_copy(node: fx.Node) -> bool:
    """Return whether a node only copies a value, without a change of its layout."""
    if name_of_call(node) not in ("cat", "clone", "pad") or len(node.all_input_nodes) > 1:
        return False
    same = not any(arguments_of(node).get("pad", ())) and "val" in node.meta
    return same and layout_of(node.meta["val"]) == layout_of(node.all_input_nodes[0].meta["val"])


def exact_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides and gaps; a lazy negation is done first."""
    tensor = tensor.resolve_neg()
    return on_storage(tensor, tensor.untyped_storage().clone())  # type: ignore[no-untyped-call]


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the shape, dtype and strides of a tensor, without those of dimensions of size 1."""
    strides = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    return tensor.shape, strides, tensor.dtype


def without_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape, strides and dtype on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
