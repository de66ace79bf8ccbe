"""What a failure prints: what differs, who is to blame, where, and a test to paste."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from torch import fx

from optimizer.core.inputs import as_call
from optimizer.testing._assemble import Spec
from optimizer.testing._strategies import SHAPES
from optimizer.testing._tokens import FAMILIES
from optimizer.verify.check import first_divergence, values

SIMPLEST = {token: next(iter(family)) for family in FAMILIES.values() for token in family}
_PLAIN = Spec(())


def smallest(spec: Spec, fails: Callable[[Spec], bool]) -> Spec:
    """A failing program that is minimal: nothing simpler that is tried fails.

    What is tried is to leave out any word or two, to replace a word by the simplest of its
    family, to make any of the data that of a plain `Spec`, and a shape that is drawn earlier.

    Args:
        spec: a failing program; it is returned if nothing smaller fails.
        fails: whether a program fails.
    """
    for simpler in _simpler(spec):
        if fails(simpler):
            return smallest(simpler, fails)
    return spec


def _simpler(spec: Spec) -> Iterator[Spec]:
    for tokens in _shorter(spec.tokens):
        yield replace(spec, tokens=tokens)
    for index, token in enumerate(spec.tokens):
        if SIMPLEST[token] != token:
            before, after = spec.tokens[:index], spec.tokens[index + 1 :]
            yield replace(spec, tokens=(*before, SIMPLEST[token], *after))
    for each in fields(Spec)[1:]:
        plain: dict[str, Any] = {each.name: getattr(_PLAIN, each.name)}
        if getattr(spec, each.name) != plain[each.name]:
            yield replace(spec, **plain)
    if spec.shape in SHAPES:
        yield from (replace(spec, shape=s) for s in SHAPES[1 : SHAPES.index(spec.shape)])


def _shorter(tokens: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Without half of the words, a quarter, ... one; without any two, if they are few."""
    count = -(-len(tokens) // 2)
    while count:
        for start in range(0, len(tokens), count):
            yield (*tokens[:start], *tokens[start + count :])
        count //= 2
    # A transpose often goes only with the one that undoes it.
    for one, other in combinations(range(len(tokens)), 2):
        yield (*tokens[:one], *tokens[one + 1 : other], *tokens[other + 1 :])


@dataclass(eq=False)
class Counterexample(AssertionError):  # noqa: N818 - a finding about the subject
    """A generated model that a subject gets wrong.

    The report is made when it is printed: Hypothesis raises many of these while it shrinks, and
    prints the last.

    Attributes:
        spec: the model and its data.
        subject: the function that gets it wrong.
    """

    spec: Spec
    subject: Callable[..., Any]
    retry: Callable[..., object]
    exact: bool
    dtype: torch.dtype
    later: tuple[str, ...] = ()
    is_reporting: bool = field(default=False, init=False)

    def __str__(self) -> str:
        if self.is_reporting:  # a subject that prints what is being handled, as Dynamo does
            return f"{self.__cause__}"
        self.is_reporting = True
        try:
            return self.reduced.text()
        finally:
            self.is_reporting = False

    @cached_property
    def reduced(self) -> Counterexample:
        """The same kind of failure on the smallest program that still shows it."""
        found: dict[Spec, Counterexample | None] = {}  # what is left out again gives the same

        def fails(spec: Spec) -> bool:
            if spec not in found:
                found[spec] = self.on(spec)
            return found[spec] is not None

        return found.get(smallest(self.spec, fails)) or self

    def on(self, spec: Spec) -> Counterexample | None:
        """The same kind of failure on another program; None if there is none."""
        try:
            self.retry(spec)
        except Counterexample as other:
            return other if type(other.__cause__) is type(self.__cause__) else None
        return None

    def text(self) -> str:
        """The report on exactly this model."""
        told = f"{type(self.__cause__).__name__}: {self.__cause__}"
        verdict, _, values = told.partition("\n")
        lines = [f"{self.spec}"]
        if hasattr(self.subject, "parts"):
            lines.append(f"first guilty pass: {self._guilty()}")
        lines += [f"first divergent node: {self._divergent_node()}", *values.splitlines()]
        # What follows the test are comments, which may be pasted with it.
        details = indent("\n".join(lines), "# ", lambda line: True)
        return f"{verdict}\npaste-ready test:\n\n{self.reproducer()}\n\n{details}"

    def _guilty(self) -> str:
        """The pass with which the subject's `parts` first go wrong; or the capture."""
        for name, part in self.subject.parts():  # type: ignore[attr-defined]
            try:
                self.retry(self.spec, subject=part)
            except AssertionError:
                return str(name)
        return "none alone: the passes together are wrong, or the failure does not repeat"

    def _divergent_node(self) -> str:
        """The first node of the candidate whose value differs from what it stands for.

        The model's graph is what the subject's `unchanged` gives, if it has one; else its trace.
        """
        model, inputs = self.spec.build(self.dtype), self.spec.inputs(self.dtype)
        unchanged = getattr(self.subject, "unchanged", lambda model, _: fx.symbolic_trace(model))
        with self.spec.surroundings():
            try:
                graphs = unchanged(model, inputs), self.subject(model, inputs)
            except Exception as error:  # whatever is wrong with the subject
                return f"none, for there are no two graphs: {type(error).__name__}"
            if not all(isinstance(each, fx.GraphModule) for each in graphs):
                return "none, for there are no two graphs"
            expected, actual = (values(each, as_call(inputs)) for each in graphs)
        alike = f"{len(expected.keys() & actual.keys())} of the {len(actual)} nodes"
        none = f"none: {alike} stand for one of the model's, and agree with it here"
        return first_divergence(expected, actual, exact=self.exact) or none

    def reproducer(self) -> str:
        """A self-contained pytest module that fails as this did."""
        spec, suffix = self.spec, ", exact=True" if self.exact else ""
        preamble, call = _call(self.subject)
        body = [
            f'model = randomize(Model().to({self.dtype}), "{spec.regime}", seed={spec.seed})',
            *(["model = as_graph(model)"] if spec.entry == "graph" else []),
            f"inputs = inputs_like({_inputs(spec)}, dtype={self.dtype})",
            "",
            "with untouched(model):",
            f"    candidate = {call}",
            "",
            f"assert_equivalent(model, candidate, inputs{suffix})",
        ]
        names = ["assert_equivalent", "inputs_like", "randomize", "untouched"]
        body += [
            f'LATER_CALLS["{name}"](model, candidate, inputs, exact={self.exact})'
            for name in self.later
        ]
        names += ["LATER_CALLS"] if self.later else []
        names += ["as_graph"] if spec.entry == "graph" else []
        autocast = '@torch.autocast("cpu", torch.bfloat16, cache_enabled=False)\n'
        under = autocast if spec.is_autocast() else ""
        return (
            "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n"
            f"{preamble}\n"
            f"from optimizer.testing import {', '.join(sorted(names))}\n"
            f"\n\n{spec.source()}\n\n{under}def test_counterexample():\n"
            f"{indent(chr(10).join(body), ' ' * 4)}\n"
        )


def _inputs(spec: Spec) -> str:
    """The arguments of `inputs_like`, but for the dtype, that give the inputs of a model."""
    kinds = spec.argument_kinds()
    given = f'[{spec.shape}] * {len(kinds)}, "{spec.regime}", seed={spec.seed}'
    given += f", kinds={kinds}" if set(kinds) > {"value"} else ""
    return given + (f', layout="{spec.layout}"' if spec.layout != "contiguous" else "")


def _call(subject: Callable[..., Any]) -> tuple[str, str]:
    """An import and an expression that call `subject` in a test."""
    imported, expression = getattr(subject, "preamble", None), getattr(subject, "call", None)
    if isinstance(imported, str) and isinstance(expression, str):
        return imported, expression
    name = getattr(subject, "__qualname__", "<locals>")
    if "<" in name:
        return f"# subject is {subject}: import or define it here", "subject(model, inputs)"
    return f"from {importable(subject.__module__)} import {name}", f"{name}(model, inputs)"


def importable(module: str) -> str:
    """The name that another process imports a module by, also the one that is run as a script."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).stem if module == "__main__" and file else module
