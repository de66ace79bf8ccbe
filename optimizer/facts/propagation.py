"""Learning the facts of a graph by running it once on meta tensors, which hold no data.

Shapes, strides and shared storage are read off the results; writes and randomness are read
off the schemas of the ATen operators that each node runs. Nothing is guessed from a name.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import fx, nn

from optimizer.core.copy import on_storage
from optimizer.core.inputs import hides_tensors, map_tensors, storages_in
from optimizer.core.node import attribute_of, is_plain, module_of, tensors_of
from optimizer.core.ops import MAY_COPY
from optimizer.facts.effects import (
    EVERY_MASK_IS_FULL,
    NOTHING,
    Effect,
    Effects,
    devices_named_by,
    is_users_module,
    may_do_anything,
    may_draw,
    may_vary_rank,
    name_of_call,
)
from optimizer.facts.known_results import known_outcome


class Unobserved(Exception):  # noqa: N818 - becomes the `error` of a Fact, is never seen
    """A node is not run on meta tensors; the message says why."""


@dataclass(frozen=True)
class Fact:
    """What one node yields and does. `error` tells why nothing is known of it."""

    value: Any = None
    storages: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    random: bool = False
    rank_varies: bool = False  # with sizes: a squeeze came before
    inputs: frozenset[fx.Node] = frozenset()  # the placeholders that it depends on
    error: str = ""


class Facts:
    """The facts of one graph, kept up to date as passes add nodes."""

    def __init__(self) -> None:
        self.failures: list[fx.Node] = []
        self.devices: set[torch.device] = set()
        self.external: set[int] = set()  # storages that outlive a call: inputs and attributes
        self.holders: dict[int, list[fx.Node]] = {}
        self.calls: dict[Any, fx.Node] = {}  # by what each called when it was looked at last
        self.writers: dict[int, list[fx.Node]] = {}
        self._shared: dict[int, frozenset[int]] = {}  # what a copy may share in another call
        self.asked: set[tuple[str, fx.Node]] = set()  # by the rewrite under way: kind, input
        self.relied: set[tuple[str, fx.Node]] = set()  # what the rewrites that fired rest on
        self._meta: dict[int, Any] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._alive: list[torch.Tensor] = []

    def any_written(self, storages: Iterable[int]) -> bool:
        """Whether a node of the graph writes one of some storages."""
        return any(not node._erased for each in storages for node in self.writers.get(each, ()))

    def to_meta(self, value: Any) -> Any:
        """A copy of a tensor, a module or a pytree of them whose tensors hold no data."""
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
        self._alive.append(tensor)
        self.devices.add(tensor.device)
        return meta

    def input(self, node: fx.Node, example: Any) -> None:
        """Record the example that a placeholder is given."""
        self._record(node, Fact(*_snapshot(self.to_meta(example)), inputs=frozenset({node})))

    def evaluate(self, node: fx.Node) -> None:
        """Run one node on meta tensors and record what it yields and does."""
        self.devices |= devices_named_by(node)
        try:
            value, effect = self._outcome(node)
        except Exception as error:  # an operator that needs data, or a bug of the model
            self.failures.append(node)
            reason = str(error).split("\n")[0] or type(error).__name__
            # It may write all that it is given and, if it is a user's own code, all that it holds.
            held = tensors_of(module_of(node)) if is_users_module(node) else []
            writes = _given(node) | frozenset(storages_in(self.to_meta(held)))
            self._record(node, Fact(writes=writes, error=reason))
            return
        lasting_writes = {s for s in effect.writes if s in self.holders or s in self.external}
        given: list[Fact] = [each.meta["fact"] for each in node.all_input_nodes]
        varies = may_vary_rank(node) or any(each.rank_varies for each in given)
        inputs = frozenset[fx.Node]().union(*(each.inputs for each in given))
        kept, storages = _snapshot(value)
        storages |= _given(node) if hides_tensors(value) else frozenset()
        sources = self._may_be_part_of_result(node, given)
        self._shared |= dict.fromkeys(storages - sources, sources) if sources else {}
        storages, writes = self._with_shared(storages), self._with_shared(lasting_writes)
        training = node.op == "call_module" and module_of(node).training
        values = (each.value for each in given)  # torch draws nothing for no elements
        hides = any(isinstance(each, torch.Tensor) and not each.numel() for each in values)
        drawn = effect.random or (hides and may_draw(name_of_call(node), training))
        self._record(node, Fact(kept, storages, writes, drawn, varies, inputs))

    def _may_be_part_of_result(self, node: fx.Node, given: list[Fact]) -> frozenset[int]:
        """What a call that made a copy may share in another call, which needs none."""
        if may_do_anything(node):  # it may reshape what it is given or holds
            held = tensors_of(module_of(node)) if node.op == "call_module" else []
            return _given(node) | frozenset(storages_in(self.to_meta(held)))
        name, others = name_of_call(node), (each.value for each in given[1:] if each.inputs)
        numbers = {getattr(each, "dtype", torch.bool) for each in others} - {torch.bool}
        may = name in MAY_COPY or (name == "getitem" and numbers)  # of no dimension: a view
        return given[0].storages if given and may else frozenset()

    def _with_shared(self, storages: Iterable[int]) -> frozenset[int]:
        """Some storages and those that they are in calls which need no copy."""
        return frozenset(storages).union(*(self._shared.get(each, ()) for each in storages))

    def _outcome(self, node: fx.Node) -> tuple[Any, Effect]:
        """What a node yields and does: by a rule, or by running it."""
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), _value)
        if node.op in ("get_attr", "output"):
            return self.to_meta(attribute_of(node)) if node.op == "get_attr" else args, NOTHING
        called = _called_by(node)
        if kwargs:
            return self._run(node, called, args, kwargs)
        return known_outcome(lambda: self._run(node, called, args, kwargs), called, *args)

    def _run(self, node: fx.Node, called: Any, args: Any, kwargs: Any) -> tuple[Any, Effect]:
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        named = torch.device | str if node.target == "to" else torch.device
        args = ["meta" if isinstance(each, named) else each for each in args]
        if node.op == "call_method":
            called, args = getattr(args[0], called), args[1:]
        elif node.op == "call_module":
            called = self.to_meta(called)
        with torch.no_grad(), torch.device("meta"), EVERY_MASK_IS_FULL, Effects() as effects:
            value = called(*args, **kwargs)
        return value, Effect(effects.writes, effects.random)

    def copy(self, node: fx.Node, other: fx.Node) -> None:
        """Record for another node what is known of this one."""
        self._record(other, node.meta["fact"])

    def identify(self, node: fx.Node, replaced: fx.Node) -> None:
        """Record that views of a value that is replaced will be views of another one.

        Where one of them is written, whatever shares memory with either is told.
        """
        held = node.meta["fact"].storages
        both: frozenset[int] = held | replaced.meta["fact"].storages
        if not self.any_written(both):
            self._rename([node], held, both)
            return
        self._rename(self._users_of(both), both, both)

    def rename_after(self, node: fx.Node, replaced: fx.Node) -> None:
        """Record that what holds or writes a value after `node` does so to that one's."""
        was, now = (each.meta["fact"].storages for each in (replaced, node))
        known = dict.fromkeys([*self._users_of(was), node.graph.output_node()])
        self._rename([each for each in known if not each._erased and node < each], was, now)

    def _users_of(self, storages: frozenset[int]) -> list[fx.Node]:
        """The nodes that hold or write some storages."""
        known = (table.get(n, ()) for n in storages for table in (self.holders, self.writers))
        return list({each: None for nodes in known for each in nodes})

    def _rename(self, nodes: list[fx.Node], was: frozenset[int], now: frozenset[int]) -> None:
        """Record that nodes that hold, or write, some storages do so to others instead."""
        gone = set(nodes)
        for storage, table in product(was, (self.holders, self.writers)):
            if storage in table:
                table[storage] = [each for each in table[storage] if each not in gone]
        for node in nodes:
            fact: Fact = node.meta["fact"]
            held, written = (a - was | now if was & a else a for a in (fact.storages, fact.writes))
            self._record(node, replace(fact, storages=held, writes=written))

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a graph starts without facts: they speak of the nodes of this one."""

    def _record(self, node: fx.Node, fact: Fact) -> None:
        node.meta["fact"] = fact
        for storage in fact.writes:
            self.writers.setdefault(storage, []).append(node)
        for storage in fact.storages if node.op != "output" else ():
            self.holders.setdefault(storage, []).append(node)


def _called_by(node: fx.Node) -> Any:
    """The function, the module or the name of the method that a node calls."""
    if node.op != "call_module":
        return node.target
    module = module_of(node)
    if not all(map(is_plain, module.modules())):
        raise Unobserved("it has hooks or parametrizations, which are left alone")
    return module


def _given(node: fx.Node) -> frozenset[int]:
    """The storages of everything that a node is given."""
    facts: list[Fact] = [each.meta["fact"] for each in node.all_input_nodes]
    return frozenset[int]().union(*(fact.storages | fact.writes for fact in facts))


def _value(node: fx.Node) -> Any:
    fact: Fact = node.meta["fact"]
    if fact.error:
        raise Unobserved(fact.error)
    return fact.value


def _snapshot(value: Any) -> tuple[Any, frozenset[int]]:
    """A result as it is now: later in-place changes of its shape are not seen through it."""
    kept = map_tensors(lambda tensor: tensor.detach().to("meta"), value)
    return kept, frozenset(storages_in(value))
