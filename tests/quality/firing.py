"""Whether the fuzz of a pass is about the pass: how often it fires, and what it refuses."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from optimizer.testing._assemble import Spec
from optimizer.testing._strategies import models, on_each
from optimizer.testing._subject import Optimize
from tests.quality.mutants import PACKAGE, homes


@dataclass
class Firing:
    """What one pass did with the models of its own fuzz."""

    name: str
    examples: int = 0
    fired: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def met(self) -> list[str]:
        """The reasons of the pass that a model met."""
        return sorted(reasons(self.name) & set(self.refused))

    def never(self) -> list[str]:
        """The reasons of the pass that no model met."""
        return sorted(reasons(self.name) - set(self.refused))


def firing(name: str, examples: int) -> Firing:
    """Run a pass alone on so many models that are drawn around its motifs."""
    seen = Firing(name)

    @on_each(models(focus=name), examples)
    def count(spec: Spec) -> None:
        with spec.surroundings():
            result: Any = Optimize(only=(name,))(spec.build(), spec.inputs())
        report = result.report
        seen.examples += 1
        seen.fired += name in report.counts()
        seen.refused.update({each.reason for each in report.refused})

    return seen


def reasons(name: str) -> set[str]:
    """What a pass, or a function of its file that it uses, gives as reasons to refuse."""
    calls = [node for node in _nodes_of(name) if isinstance(node, ast.Call)]
    named = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id in _REFUSING]
    last = [call.args[-1] for call in named if call.args]
    return {str(each.value) for each in last if isinstance(each, ast.Constant)}


def _nodes_of(name: str) -> list[ast.AST]:
    """The code of a pass and of the functions of its file that it uses."""
    tree = ast.parse((PACKAGE / f"{homes()[name]}.py").read_text(encoding="utf-8"))
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    nodes, names = list[ast.AST](), [name]
    for each in names:
        walked = [*ast.walk(functions[each])]
        nodes += walked
        named = dict.fromkeys(node.id for node in walked if isinstance(node, ast.Name))
        names += [used for used in named if used in functions and used not in names]
    return nodes


_REFUSING = ("require", "Refused")


def table(firings: Iterable[Firing]) -> Iterator[str]:
    """The lines of a Markdown table, a row for each pass."""
    yield from ("| pass | fires in | reasons met | never met |", "|---|---|---|---|")
    for seen in firings:
        share, never = seen.fired / seen.examples, "; ".join(seen.never()) or "-"
        yield f"| {seen.name} | {share:.0%} | {len(seen.met())} | {never} |"
