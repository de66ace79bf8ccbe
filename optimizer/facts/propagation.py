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
from optimizer.core.errors import require
from optimizer.core.inputs import hides_tensors, map_tensors, storages_in
from optimizer.core.node import (
    attribute_of,
    called_on,
    is_plain,
    module_of,
    name_of_call,
    tensors_of,
)
from optimizer.core.ops import MAY_COPY
from optimizer.facts.effects import (
    EVERY_MASK_IS_FULL,
    NOTHING,
    Effect,
    Effects,
    devices_named_by,
    known_outcome,
    runs_known_code,
)


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
        self.record(node, Fact(*_snapshot(self.to_meta(example)), inputs=frozenset({node})))

    def evaluate(self, node: fx.Node) -> None:
        """Run one node on meta tensors and record what it yields and does."""
        self.devices |= devices_named_by(node)
        try:
            value, effect = self._outcome(node)
        except Exception as error:  # an operator that needs data, or a bug of the model
            self.failures.append(node)
            reason = str(error).split("\n")[0] or type(error).__name__
            self.record(node, Fact(writes=self._within_reach(node), error=reason))
            return
        lasting_writes = {s for s in effect.writes if s in self.holders or s in self.external}
        given: list[Fact] = [each.meta["fact"] for each in node.all_input_nodes]
        name, known = name_of_call(node), runs_known_code(node)
        squeezes = not known or "squeeze" in name.split("_")
        varies = squeezes or any(each.rank_varies for each in given)
        inputs = frozenset[fx.Node]().union(*(each.inputs for each in given))
        kept, storages = _snapshot(value)
        sources = self._may_be_part_of_result(node, value, given)
        self._shared |= dict.fromkeys(storages - sources, sources) if sources else {}
        storages |= sources
        storages, writes = self._with_shared(storages), self._with_shared(lasting_writes)
        training = node.op == "call_module" and module_of(node).training
        draws = training or "dropout" in name or "attention" in name  # but nothing for no elements
        none = any(isinstance(v, torch.Tensor) and not v.numel() for v in (g.value for g in given))
        drawn = effect.random or (draws and none)
        self.record(node, Fact(kept, storages, writes, drawn, varies, inputs))

    def _within_reach(self, node: fx.Node) -> frozenset[int]:
        """The storages of all that a node is given and, if a user's code, of what it holds."""
        known = node.op != "call_module" or runs_known_code(node)
        held = storages_in(self.to_meta([] if known else tensors_of(module_of(node))))
        facts: list[Fact] = [each.meta["fact"] for each in node.all_input_nodes]
        return frozenset(held).union(*(fact.storages | fact.writes for fact in facts))

    def _may_be_part_of_result(
        self, node: fx.Node, value: Any, given: list[Fact]
    ) -> frozenset[int]:
        """What a result may hold unseen, or share in another call, which needs no copy."""
        if not runs_known_code(node) or hides_tensors(value):
            return self._within_reach(node)
        name, others = name_of_call(node), (each.value for each in given[1:] if each.inputs)
        numbers = {getattr(each, "dtype", torch.bool) for each in others} - {torch.bool}
        may = name in MAY_COPY or (name == "getitem" and numbers)  # of no dimension: a view
        return given[0].storages if given and may else frozenset()

    def _with_shared(self, storages: Iterable[int]) -> frozenset[int]:
        """Some storages and those that they are in calls which need no copy."""
        return frozenset(storages).union(*(self._shared.get(each, ()) for each in storages))

    def _outcome(self, node: fx.Node) -> tuple[Any, Effect]:
        """What a node yields and does: as before, or by running it."""
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), _value)
        if node.op in ("get_attr", "output"):
            return self.to_meta(attribute_of(node)) if node.op == "get_attr" else args, NOTHING
        module = module_of(node) if node.op == "call_module" else None
        plain = module is None or all(map(is_plain, module.modules()))
        require(plain, "it has hooks or parametrizations, which are left alone")
        if kwargs:
            return self._observed(node)
        return known_outcome(lambda: self._observed(node), module or node.target, *args)

    def _observed(self, node: fx.Node) -> tuple[Any, Effect]:
        effects = Effects()
        return self.run(node, effects), Effect(effects.writes, effects.random)

    def run(self, node: fx.Node, effects: Effects) -> Any:
        """Call what a node calls on meta tensors, and collect what its operators do."""
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), _value)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        if isinstance(node.kwargs.get("training"), fx.Node):
            kwargs = {**kwargs, "training": True}  # which it may be in another call
        named = torch.device | str if node.target == "to" else torch.device
        given = ["meta" if isinstance(each, named) else each for each in args]
        module = self.to_meta(module_of(node)) if node.op == "call_module" else None
        with torch.no_grad(), torch.device("meta"), EVERY_MASK_IS_FULL, effects:
            return called_on(node, module, given, kwargs)

    def identify(self, node: fx.Node, replaced: fx.Node) -> None:
        """Record that views of a value that is replaced will be views of another one."""
        both: frozenset[int] = node.meta["fact"].storages | replaced.meta["fact"].storages
        told = self._users_of(both) if self.any_written(both) else [node]
        self._rename(told, both, both)

    def rename_after(self, node: fx.Node, replaced: fx.Node) -> None:
        """Record that what holds or writes a value after `node` does so to that one's."""
        was, now = (each.meta["fact"].storages for each in (replaced, node))
        later = [each for each in self._users_of(was) if not each._erased and node < each]
        self._rename(later, was, now)

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
            self.record(node, replace(fact, storages=held, writes=written))

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a graph starts without facts: they speak of the nodes of this one."""

    def record(self, node: fx.Node, fact: Fact) -> None:
        """Keep what is known of a node."""
        node.meta["fact"] = fact
        for storage in fact.writes:
            self.writers.setdefault(storage, []).append(node)
        for storage in fact.storages:
            self.holders.setdefault(storage, []).append(node)


def _value(node: fx.Node) -> Any:
    fact: Fact = node.meta["fact"]
    require(not fact.error, fact.error)
    return fact.value


def _snapshot(value: Any) -> tuple[Any, frozenset[int]]:
    """A result as it is now: later in-place changes of its shape are not seen through it."""
    kept = map_tensors(lambda tensor: tensor.detach().to("meta"), value)
    return kept, frozenset(storages_in(value))
