"""The facts that passes ask for: shape, dtype, shared storage, who reads and writes it.

They are learned by running a graph once on meta tensors, which hold no data.
Shapes, strides and shared storage are read off the results; writes and randomness are read
off the schemas of the ATen operators that each node runs. What only another call of a node shows
is known by names: to return its input, to drop dimensions.

To ask for a fact that is not known is to be refused (`Refused`), so a rewrite whose safety
argument needs it does not fire and the report says why.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental import _config
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.core import ops
from optimizer.core.context import forked_rng
from optimizer.core.copy import on_storage
from optimizer.core.errors import Refused, require
from optimizer.core.guards import GUARDS, chooses_a_branch, key_of
from optimizer.core.inputs import hides_tensors, map_tensors, storages_in
from optimizer.core.node import (
    KNOWN_HOMES,
    attribute_of,
    called_on,
    callee,
    describe,
    has_plain_tensors,
    home_of,
    is_plain,
    module_of,
    name_of_call,
    tensors_of,
)

# Without data, `v[mask]` has as many rows as under a mask of True: an example as good as any.
EVERY_MASK_IS_FULL = _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]

_TRAINED = ("batch_norm", "dropout", "instance_norm", "rrelu")  # they draw or write if told to


class Effects(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collect the storages that are written, and whether numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes, self.random = set[int](), False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it, torch imports it first, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        self.writes |= storages_in(written_by(func, args, kwargs))
        with forked_rng() if self.random else nullcontext():  # some draw on meta tensors too
            return func(*args, **kwargs)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes."""
    parameters = func._schema.arguments
    arguments = {**dict(zip((p.name for p in parameters), args, strict=False)), **kwargs}
    written = [each.name for each in parameters if each.alias_info and each.alias_info.is_write]
    if arguments.get("training"):  # native_batch_norm updates these, and its schema keeps quiet
        written += ["running_mean", "running_var"]
    return [arguments[name] for name in written if name in arguments]


_KNOWN_BUILTINS = (abs, bool, divmod, float, getattr, int, len, max, min, pow, round, sum)


def runs_known_code(node: fx.Node) -> bool:
    """Return whether a node is known to have no effects but those that ATen operators have."""
    if node.op == "call_module" and not _is_plain_within(module_of(node)):
        return False
    calls_code = node.op in ("call_function", "call_module")
    return not calls_code or node.target in _KNOWN_BUILTINS or home_of(node) in KNOWN_HOMES


def _is_plain_within(module: nn.Module) -> bool:
    return all(map(is_plain, module.modules()))


def devices_named_by(node: fx.Node) -> set[torch.device]:
    """Return the devices that a call names, or, of a factory that names none, the default."""
    named = set[torch.device]()
    for leaf in (*node.args, *node.kwargs.values()):
        if isinstance(leaf, str | torch.device):
            with suppress(RuntimeError):  # another word
                named.add(torch.device(leaf))
    if node.op == "call_method" and node.target in ("cpu", "cuda"):
        named.add(torch.device(str(node.target)))
    if node.op == "call_function" and node.target in ops.FACTORIES and "device" not in node.kwargs:
        named.add(torch.get_default_device())
    return named


_LAID_OUT_BY_ARGUMENTS = frozenset((
    operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul,
    torch.conv1d, torch.conv2d, torch.conv3d, F.linear, F.layer_norm, F.group_norm, F.gelu,
))  # fmt: skip
_LITERALS = frozenset((bool, int, float, str, tuple, torch.Size, type(None)))
_MOST_LAYOUTS = 1 << 14
_layouts: dict[Any, tuple[Any, ...]] = {}  # of the new tensor that calls of a form yield


def _as_new(value: Any, module: Any, operands: Any, form: Any) -> Any:
    """Return what a call yields that does nothing else; keep the layout of a new tensor."""
    if isinstance(module, _NormBase) and operands and operands[0].is_contiguous():
        value = value.new_empty(value.shape)  # of single elements, its kernel keeps no strides
    new = form and isinstance(value, torch.Tensor) and len(_layouts) < _MOST_LAYOUTS
    if new and storages_in(value).isdisjoint(storages_in(operands)):
        _layouts[form] = outline(value)
    return value


def _form(target: Any, args: tuple[Any, ...]) -> Any:
    """Return all that the layout of a result depends on, or None where that is not known."""
    if not all(type(each) in _LITERALS or isinstance(each, torch.Tensor) for each in args):
        return None
    layouts = (*map(outline, args), torch.get_default_dtype())
    if not isinstance(target, nn.Module):
        return (target, layouts) if target in _LAID_OUT_BY_ARGUMENTS else None
    kind = type(target)
    ours = kind.__module__.startswith(("torch.nn.modules.", "optimizer."))
    if not (ours and isinstance(target, ops.RETURN_A_TENSOR)) or has_plain_tensors(target):
        return None
    names = ("training", "_reversed_padding_repeated_twice", *getattr(kind, "__constants__", ()))
    settings = [getattr(target, name, None) for name in names]
    weights = tuple((k, outline(t)) for k, t in (target._parameters | target._buffers).items())
    return kind, repr(settings), weights, layouts


def outline(value: Any) -> Any:
    """Return a key of a tensor, but for its data and device, or of what else a call is given."""
    is_tensor = isinstance(value, torch.Tensor)
    return (value.shape, value.stride(), value.dtype) if is_tensor else key_of(value)


@dataclass(frozen=True)
class Fact:
    """What one node yields and does. `error` tells why nothing is known of it."""

    value: Any = None
    storages: frozenset[int] = frozenset()  # that its value may be a view of
    writes: frozenset[int] = frozenset()  # those that it may write
    random: bool = False
    rank_varies: bool = False  # with sizes: a squeeze came before, say
    inputs: frozenset[fx.Node] = frozenset()  # the placeholders that it depends on
    error: str = ""


class Facts:
    """The facts of one graph, kept up to date as passes add nodes."""

    def __init__(self) -> None:
        self.failures, self.devices = list[fx.Node](), set[torch.device]()
        self.external: set[int] = set()  # storages that outlive a call: inputs and attributes
        self.holders: dict[int, set[fx.Node]] = {}  # of each storage
        self.writers: dict[int, set[fx.Node]] = {}
        self.calls: dict[Any, fx.Node] = {}  # by what each called when it was looked at last
        self.guards: set[tuple[str, fx.Node]] = set()  # the rank or dtype of an input, relied on
        self.pending_guards: set[tuple[str, fx.Node]] = set()  # asked by the rewrite under way
        self._meta, self._alive = dict[int, Any](), list[Any]()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def writers_of(self, storages: Iterable[int]) -> Iterator[fx.Node]:
        """Return the nodes of the graph that write one of some storages, or may do so."""
        writers = (node for each in storages for node in self.writers.get(each, ()))
        return (node for node in writers if not node._erased)

    def to_meta(self, value: Any) -> Any:
        """Return a copy of a tensor, a module or a pytree of them whose tensors hold no data."""
        if isinstance(value, nn.Module):
            for tensor in tensors_of(value):
                self._to_meta(tensor)
            return copy.deepcopy(value, self._meta)
        return map_tensors(self._to_meta, value)

    def _to_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._meta:
            return self._meta[id(tensor)]  # type: ignore[no-any-return]
        real = tensor.untyped_storage()
        if real._cdata not in self._storages:
            empty = torch.UntypedStorage(real.nbytes(), device="meta")  # type: ignore[no-untyped-call]
            self._storages[real._cdata] = empty
            self.external.add(empty._cdata)
        meta = on_storage(tensor, self._storages[real._cdata])
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, tensor.requires_grad)
        self._meta[id(tensor)] = meta
        self._alive += [tensor, real]  # which the tensor may leave, and others find its address
        self.devices.add(tensor.device)
        return meta

    def input(self, node: fx.Node, example: Any) -> None:
        """Record the example that a placeholder is given."""
        require(not hides_tensors(example), "an input is an object that may hold tensors")
        fact = self._learned(node, self.to_meta(example), Effects())
        self.record(node, replace(fact, rank_varies=False, inputs=frozenset({node})))

    def evaluate(self, node: fx.Node) -> None:
        """Run one node on meta tensors and record what it yields and does."""
        self.devices |= devices_named_by(node)
        try:
            fact = self._learned(node, *self._outcome(node))
        except Exception as error:  # an operator that needs data, or a bug of the model
            self.failures.append(node)
            reason = str(error).split("\n")[0] or type(error).__name__
            reach = self._within_reach(node)
            fact = Fact(storages=reach, writes=reach, error=reason)
        self.record(node, fact)

    def _learned(self, node: fx.Node, yielded: Any, effects: Effects) -> Fact:
        """Return what is known of a node from what a run of it yielded and did."""
        facts: list[Fact] = [each.meta["fact"] for each in node.all_input_nodes]
        value = map_tensors(lambda t: t.detach().to("meta"), yielded)  # its shape may change
        lasting = {each for each in effects.writes if each in self.holders or each in self.external}
        words, known = name_of_call(node).split("_"), runs_known_code(node)
        counted = any(isinstance(each.value, int) for each in facts)  # by a number that is computed
        some_sizes = words[0] == "getitem" and isinstance(value, tuple)
        varies = counted and (some_sizes or words[0] in ("flatten", "tensordot"))
        return Fact(
            value,
            _as_inputs_hold(storages_in(value), facts) | self._hidden_in(node, value, facts),
            _as_inputs_hold(lasting, facts),
            effects.random or _may_draw_for_more(node, facts),
            varies or not known or "squeeze" in words or any(each.rank_varies for each in facts),
            frozenset().union(*(each.inputs for each in facts)),
        )

    def _within_reach(self, node: fx.Node) -> frozenset[int]:
        """Return the storages of a node's inputs and, of unknown code, of its weights."""
        is_known = node.op != "call_module" or runs_known_code(node)
        weights = [] if is_known else tensors_of(module_of(node))
        held = (each.meta["fact"].storages for each in node.all_input_nodes)
        return frozenset(storages_in(self.to_meta(weights))).union(*held)

    def _hidden_in(self, node: fx.Node, value: Any, facts: list[Fact]) -> frozenset[int]:
        """Return the storages that a result may hold unseen, or share where a call copies none."""
        if not runs_known_code(node) or hides_tensors(value):
            return self._within_reach(node)
        name, others = name_of_call(node), (each.value for each in facts[1:] if each.inputs)
        numbers = {getattr(each, "dtype", torch.bool) for each in others} - {torch.bool}
        shares = name in ops.MAY_COPY or "dropout" in name or (name == "getitem" and numbers)
        return facts[0].storages if facts and shares else frozenset()

    def _outcome(self, node: fx.Node) -> tuple[Any, Effects]:
        """Return what a node yields and does, remembered or by running it."""
        effects = Effects()
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), _value)
        if node.op in ("get_attr", "output"):
            return self.to_meta(attribute_of(node)) if node.op == "get_attr" else args, effects
        module = module_of(node) if node.op == "call_module" else None
        plain = module is None or _is_plain_within(module)
        require(plain, "it has hooks or parametrizations, which are left alone")
        form = None if kwargs else _form(module or node.target, args)
        if form in _layouts:
            shape, strides, dtype = _layouts[form]
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta"), effects
        value = self.run(node, effects)
        if not (effects.writes or effects.random):
            value = _as_new(value, module, args, form)
        return value, effects

    def run(self, node: fx.Node, effects: Effects) -> Any:
        """Call what a node calls on meta tensors, and collect what its operators do."""
        trains = any(each in name_of_call(node) for each in _TRAINED)
        given = node.args, dict(node.kwargs)
        args, kwargs = fx.node.map_arg(given, lambda each: _value(each, trains=trains))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        devices = torch.device | str if node.target == "to" else torch.device
        operands = ["meta" if isinstance(each, devices) else each for each in args]
        module = self.to_meta(module_of(node)) if node.op == "call_module" else None
        with torch.no_grad(), torch.device("meta"), EVERY_MASK_IS_FULL, effects:
            return called_on(node, module, operands, kwargs)

    def identify(self, node: fx.Node, replaced: fx.Node) -> None:
        """Record that a value and what it replaces, which may be returned, share storages."""
        both: frozenset[int] = node.meta["fact"].storages | replaced.meta["fact"].storages
        seen = self._users_of(both) if any(self.writers_of(both)) else {node.graph.output_node()}
        self._move({node, *seen}, both, both)

    def rename_after(self, node: fx.Node, replaced: fx.Node) -> None:
        """Record that nodes after `node` hold or write its value instead of `replaced`'s."""
        old, new = (each.meta["fact"].storages for each in (replaced, node))
        later = {each for each in self._users_of(old) if not each._erased and node < each}
        self._move(later, old, new)

    def _users_of(self, storages: frozenset[int]) -> set[fx.Node]:
        """Return the nodes that hold or write some storages."""
        return set().union(*(t.get(s, ()) for t in (self.holders, self.writers) for s in storages))

    def _move(self, nodes: set[fx.Node], old: frozenset[int], new: frozenset[int]) -> None:
        """Record that nodes that hold or write some old storages do so to the new ones instead."""
        for storage, table in product(old, (self.holders, self.writers)):
            table.get(storage, set()).difference_update(nodes)
        for node in nodes:
            fact: Fact = node.meta["fact"]
            sets = fact.storages, fact.writes
            storages, writes = (each - old | new if old & each else each for each in sets)
            self.record(node, replace(fact, storages=storages, writes=writes))

    def __deepcopy__(self, memo: Any) -> None:
        """Start a copy of a graph without facts: they speak of the nodes of this one."""

    def record(self, node: fx.Node, fact: Fact) -> None:
        """Keep what is known of a node."""
        node.meta["fact"] = fact
        for storage in fact.writes:
            self.writers.setdefault(storage, set()).add(node)
        for storage in fact.storages:
            self.holders.setdefault(storage, set()).add(node)


def _value(node: fx.Node, *, trains: bool = False) -> Any:
    fact: Fact = node.meta["fact"]
    require(not fact.error, fact.error)
    return True if trains and isinstance(fact.value, bool) else fact.value  # as it may be later


def _as_inputs_hold(storages: Set[int], facts: list[Fact]) -> frozenset[int]:
    """Return storages that a run met, and what else inputs that hold them may be views of."""
    held = set(storages)
    for each in facts:
        met = storages_in(each.value)
        held |= frozenset() if met.isdisjoint(storages) else each.storages - met
    return frozenset(held)


def _may_draw_for_more(node: fx.Node, facts: list[Fact]) -> bool:
    """Return whether a call may draw random numbers, though none for a tensor without elements."""
    name, training = name_of_call(node), node.op == "call_module" and module_of(node).training
    empty = any(isinstance(f.value, torch.Tensor) and not f.value.numel() for f in facts)
    return empty and (training or "dropout" in name or "attention" in name)


def facts_of(graph: fx.Graph) -> Facts | None:
    """Return the facts of a graph, or None where it was captured without example inputs."""
    return graph.owning_module.meta.get("facts") if graph.owning_module is not None else None


def fact(node: fx.Node) -> Fact:
    """Return all that is known of a node."""
    result: Fact | None = node.meta.get("fact")
    if result is None:
        raise Refused("the graph was captured without example inputs")
    require(not result.error, f"'{node.name}' has no known shape: {result.error}")
    return result


def tensor(node: fx.Node) -> torch.Tensor:
    """Return a meta tensor with the shape, dtype and strides of a node's value."""
    value = fact(node).value
    if not isinstance(value, torch.Tensor):
        raise Refused(f"'{node.name}' is not a tensor")
    return value


def rank(node: fx.Node) -> int:
    """Return the number of dimensions of a node's value; a rewrite that asks is guarded by it."""
    return _guarded(node, "rank").dim()


def dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype of a node's value; a rewrite that asks is guarded by it."""
    return _guarded(node, "dtype").dtype


def _guarded(node: fx.Node, kind: str) -> torch.Tensor:
    value, facts = tensor(node), facts_of(node.graph)
    assert facts is not None
    for source in fact(node).inputs:
        example = source.meta["fact"].value
        if isinstance(example, torch.Tensor):
            # Of several, one without dimensions promotes nothing, and a mask indexes more of them.
            kinds = ("rank", "dtype") if len(fact(node).inputs) > 1 else (kind,)
            facts.pending_guards |= {(each, source) for each in kinds}
        elif not chooses_a_branch(example):
            raise Refused(f"its {kind} rests on the input '{source.name}', which is no tensor")
    require(kind != "rank" or not fact(node).rank_varies, "its rank depends on sizes")
    return value


def aliases(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the other nodes whose values share storage with this one's, or may do so."""
    facts = facts_of(node.graph)
    for storage in fact(node).storages:
        for holder in facts.holders[storage] if facts else ():
            if holder is not node and not holder._erased and holder.op != "output":
                yield holder


def is_external(node: fx.Node) -> bool:
    """Return whether a value is an input, a parameter or a buffer, or a view of one."""
    facts = facts_of(node.graph)
    return facts is None or not facts.external.isdisjoint(fact(node).storages)


def is_fresh(node: fx.Node) -> bool:
    """Return whether a value was made here: it is no view, no input and no part of the model."""
    out = node.kwargs.get("out")  # the result is that very tensor
    if isinstance(out, fx.Node):
        return is_fresh(out)
    return not is_external(node) and all(node < alias for alias in aliases(node))


def is_unchanged(node: fx.Node, since: fx.Node, until: fx.Node | None = None) -> bool:
    """Return whether no node after `since` and before `until`, or the end, writes a value."""
    end = until or node.graph.output_node()
    facts, storages = facts_of(node.graph), fact(node).storages
    assert facts is not None
    if is_external(node):  # two inputs may be one tensor
        storages |= facts.external & facts.writers.keys()
    return not any(since < each < end for each in facts.writers_of(storages))


def is_exposed(graph: fx.Graph, storages: Set[int]) -> bool:
    """Return whether a node writes some storages, or a caller gets them and they outlive a call."""
    facts, output = facts_of(graph), graph.output_node().meta["fact"]
    assert facts is not None
    returned = facts.external & output.storages
    return any(facts.writers_of(storages)) or not returned.isdisjoint(storages)


def is_returned(node: fx.Node) -> bool:
    """Return whether a call returns a node's value, or a view of it."""
    output: Fact = node.graph.output_node().meta["fact"]
    return not fact(node).storages.isdisjoint(output.storages)


def weights_exposed(node: fx.Node) -> bool:
    """Return whether a node or a caller may write the tensors of the module that this one calls."""
    if has_plain_tensors(module_of(node)):  # of those nothing is known
        return True
    facts, tensors = facts_of(node.graph), tensors_of(module_of(node))
    if facts is None:
        known = all(map(runs_known_code, node.graph.nodes))  # else another node may write anything
        read = storages_in([attribute_of(n) for n in node.graph.find_nodes(op="get_attr")])
        return not known or not read.isdisjoint(storages_in(tensors))
    return is_exposed(node.graph, storages_in(facts.to_meta(tensors)))


def is_read_only(node: fx.Node) -> bool:
    """Return whether no node writes a value or its storage, nor may a caller, who gets it."""
    if facts_of(node.graph) is not None:
        return not is_exposed(node.graph, fact(node).storages)
    readers = F.linear, F.conv1d, F.conv2d, F.conv3d
    return all(user.target in readers for user in node.users)


def is_pure(node: fx.Node) -> bool:
    """Return whether a node only yields its value, so that it may go when no node reads it."""
    result: Fact | None = node.meta.get("fact")
    if result is None:
        return callee(node) in (*ops.PERMUTATIONS, *ops.LINEAR_LAYERS, nn.Identity)
    nothing = result.value is None  # a guard, for one; what is not known may write all it is given
    if result.writes or result.random or nothing:
        return False
    if node.op == "call_method":  # of a list or a dict may change it, and no ATen operator tells
        receiver = node.args[0].meta["fact"].value if isinstance(node.args[0], fx.Node) else None
        return isinstance(receiver, torch.Tensor)
    kinds = ("get_attr", "call_module", "call_function")
    return node.op in kinds and runs_known_code(node) and node.target not in ops.INPLACE_OPERATORS


def obstacle(graph: fx.Graph) -> str:
    """Return why a graph must run as it is, or an empty text."""
    facts = facts_of(graph)
    if facts is None:
        return "nothing is known of the graph"
    inputs = [fact(node).storages for node in graph.find_nodes(op="placeholder")]
    attributes = facts.external.difference(*inputs)
    for node in graph.nodes:
        if not node.op.startswith("call") or node.target in GUARDS:
            continue
        result: Fact | None = node.meta.get("fact")
        if result is None or result.error:
            return f"nothing is known of what '{node.name}' does"
        if result.random:
            return f"'{node.name}' draws random numbers"
        if not attributes.isdisjoint(result.writes):
            return f"'{node.name}' writes an attribute"
        if not runs_known_code(node):
            return f"'{node.name}' runs code that may do more ({describe(node)})"
    return ""
