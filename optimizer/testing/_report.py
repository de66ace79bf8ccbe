"""What a failure prints: what differs, who is to blame, where, and a test to paste."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from textwrap import indent
from typing import Any

import torch

from optimizer.testing._assemble import Spec
from optimizer.testing._locate import first_divergent_node
from optimizer.testing._reduce import smallest


class Counterexample(AssertionError):  # noqa: N818 - a finding about the subject
    """A generated model that a subject gets wrong.

    The report is made when it is printed: Hypothesis raises many of these while it shrinks, and
    prints the last.

    Attributes:
        spec: the model and its data.
        subject: the function that gets it wrong.
    """

    def __init__(
        self,
        spec: Spec,
        subject: Callable[..., Any],
        retry: Callable[[Spec], object],
        *,
        exact: bool,
        dtype: torch.dtype,
        later: tuple[str, ...] = (),
    ) -> None:
        super().__init__(spec)
        self.spec = spec
        self.subject = subject
        self.retry = retry
        self.exact = exact
        self.dtype = dtype
        self.later = later
        self.is_reporting = False

    def __str__(self) -> str:
        if self.is_reporting:  # a subject that prints what is being handled, as Dynamo does
            return f"{self.__cause__}"
        self.is_reporting = True
        try:
            return self._report
        finally:
            self.is_reporting = False

    @cached_property
    def _report(self) -> str:
        return self.reduced.text()

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
        guilty = getattr(self.subject, "guilty", None)
        if guilty is not None:
            later = bool(self.later)
            blamed = guilty(self.spec, exact=self.exact, dtype=self.dtype, later=later)
            lines.append(f"first guilty pass: {blamed}")
        parted = first_divergent_node(self.spec, self.subject, exact=self.exact, dtype=self.dtype)
        lines += [f"first divergent node: {parted}", *values.splitlines()]
        # What follows the test are comments, which may be pasted with it.
        details = indent("\n".join(lines), "# ", lambda line: True)
        return f"{verdict}\npaste-ready test:\n\n{self.reproducer()}\n\n{details}"

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
