"""Run passes over a captured graph in phases, each to a fixed point."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from optimizer.core.errors import PassError, Refused
from optimizer.core.guards import expect_given, expect_tensor
from optimizer.core.node import callee, source_of
from optimizer.core.report import Refusal, Rewrite
from optimizer.facts.facts import Facts, facts_of, is_pure
from optimizer.rewrite.contract import PHASES, Captured, Pass, Pattern, Phase

log = logging.getLogger("optimizer")


class FaultyPassError(Exception):
    """A pass raised, never ended, or changed an answer. The message is the remark."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"pass {name} {message}; it was rolled back")
        self.name = name


class Pipeline:
    """One run of some passes over one graph module.

    `verify` is called with each pass that changed the graph, and raises FaultyPassError if the
    answer is another. No more than `budget` rewrites are made; a run over a whole graph is one.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        verify: Callable[[Pass], None] | None = None,
        *,
        budget: int | None = None,
    ) -> None:
        self.module = module
        self.verify = verify
        self.budget = budget
        self.steps = 0
        self.fired: list[Rewrite] = []
        self._refused: dict[str, list[Refusal]] = {}
        self._facts = facts_of(module.graph) or Facts()
        self._calls: dict[Any, list[fx.Node]] | None = None  # until the graph changes

    @property
    def refused(self) -> list[Refusal]:
        """Return the refusals of the last sweep of each pass."""
        return [refusal for refusals in self._refused.values() for refusal in refusals]

    def run(self, passes: Sequence[Pass]) -> None:
        """Run all phases until none changes anything, then guard what was relied on."""

        def run_phase(phase: Phase) -> bool:
            active = [each for each in passes if each.phase == phase]
            return self._until_idle(self._attempt, active, "and its phase never come to an end")

        endless = "and another phase undo one another without end"
        self._until_idle(run_phase, PHASES, endless)
        _guard(self.module.graph)
        self.module.graph.lint()

    def _until_idle(self, step: Callable[[Any], bool], over: Sequence[Any], endless: str) -> bool:
        """Take a step for each, over and over until none changes anything; return if one did."""
        for rounds in range(len(self.module.graph.nodes) + 2):
            changed = [step(each) for each in over]
            if not any(changed):
                return rounds > 0
        raise FaultyPassError(self.fired[-1].name, endless)

    def _attempt(self, each: Pass) -> bool:
        before = len(self.fired)
        self._refused[each.name] = []
        try:
            self._sweep(each)
            changed = len(self.fired) > before
            if changed:
                self._calls = None
                self.module.graph.lint()
        except Exception as error:  # a bug in a pass costs the user nothing
            log.debug("pass %s failed", each.name, exc_info=True)
            raise FaultyPassError(each.name, f"raised {type(error).__name__}: {error}") from error
        if changed and self.verify is not None:
            self.verify(each)
        return changed

    def _sweep(self, each: Pass) -> None:
        if each.pattern is not None:
            for node in self._candidates(each.pattern):
                captured = None if node._erased else each.pattern.match(node)
                if captured is not None and self.steps != self.budget:
                    self._rewrite(each, node, captured)
        elif self.steps != self.budget:
            self._facts.pending_guards.clear()
            removed = each.apply(self.module.graph)
            self._facts.guards |= self._facts.pending_guards
            self.fired += [Rewrite(each.name, n.name, source_of(n)) for n in removed]
            self.steps += bool(removed)

    def _candidates(self, pattern: Pattern) -> list[fx.Node]:
        """Return the nodes that call what the pattern's root does, in order."""
        if not pattern.targets:
            return list(self.module.graph.nodes)
        if self._calls is None:
            self._calls = {}
            for node in self.module.graph.nodes:
                self._calls.setdefault(callee(node), []).append(node)
        return sorted(node for each in pattern.targets for node in self._calls.get(each, ()))

    def _rewrite(self, each: Pass, root: fx.Node, captured: Captured) -> None:
        self._facts.pending_guards.clear()
        size, replacement = len(root.graph.nodes), None
        try:
            replacement = each.apply(**captured)
        except Refused as refusal:
            remark = Refusal(each.name, root.name, source_of(root), str(refusal))
            self._refused[each.name].append(remark)
        if replacement is None:
            if len(root.graph.nodes) != size:
                raise PassError("it changed the graph, and then refused: require everything first")
            return
        self._facts.guards |= self._facts.pending_guards  # a rewrite that fired rests on them
        self.steps += 1
        self.fired.append(Rewrite(each.name, root.name, source_of(root)))
        if replacement.meta.get("stands_for") is None and "new" in replacement.meta:
            replacement.meta["stands_for"] = root.meta.get("stands_for", root.name)
        if "fact" in root.meta:
            self._facts.identify(replacement, root)
        root.replace_all_uses_with(replacement)
        _sign(replacement, each, [*captured.values(), *_erase(root)])


def _sign(replacement: fx.Node, each: Pass, origins: list[fx.Node]) -> None:
    """Record on all nodes that a rewrite made its pass, and the model's nodes they come from."""
    pending = [replacement]
    while pending:
        node = pending.pop()
        if node.meta.get("made_by") == "":
            groups = [n.meta.get("made_from", (n.name,)) for n in (node, *reversed(origins))]
            made_from = tuple(dict.fromkeys(name for group in groups for name in group))
            node.meta.update(made_by=each.name, made_from=made_from)
            pending += node.all_input_nodes


def _erase(root: fx.Node) -> list[fx.Node]:
    """Erase a replaced node and whatever was only computed for it; return all that went."""
    pending, erased = [root], []
    while pending:
        node = pending.pop()
        if node._erased or node.users or (node is not root and not is_pure(node)):
            continue
        pending += node.all_input_nodes
        node.graph.erase_node(node)
        erased.append(node)
    return erased


def _guard(graph: fx.Graph) -> None:
    """Begin the graph with a check of what a rewrite or a branch of the model relied on."""
    inputs = graph.find_nodes(op="placeholder")
    for node in reversed(inputs):
        guard = _guard_of(node)
        if guard is None:
            continue
        check, args = guard  # which ignores what is None
        earlier = (zip(args, n.args, strict=False) for n in node.users if n.target is check)
        if not any(all(new in (None, old) for new, old in pairs) for pairs in earlier):
            with graph.inserting_after(inputs[-1]):
                graph.call_function(check, args)


def _guard_of(node: fx.Node) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    facts = facts_of(node.graph)
    value = node.meta["fact"].value if facts else None
    tested = bool(node.meta.get("tested"))
    if not facts or not isinstance(value, torch.Tensor):
        return (expect_given, (node, node.name)) if tested else None
    rank = value.dim() if ("rank", node) in facts.guards else None
    dtype = value.dtype if ("dtype", node) in facts.guards else None
    is_guarded = rank is not None or dtype is not None or tested
    return (expect_tensor, (node, rank, dtype, node.name)) if is_guarded else None
