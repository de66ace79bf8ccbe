"""The known-bad control: the same fuzz, pointed at other tools, finds what they break."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.subjects import HUNTED, Task, all_subjects, named
from optimizer.testing._assemble import Spec
from optimizer.testing._check import check_spec
from optimizer.testing._report import Counterexample
from optimizer.testing._strategies import models, on_each

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Defect:
    """A way in which a tool fails, on the smallest program found that shows it."""

    signature: str
    counterexample: Counterexample


@dataclass(frozen=True)
class Hunted:
    """A subject of the suite, as the fuzz takes one: from a copy of a model to a module."""

    name: str

    preamble = "from tests.quality.hunt import Hunted"

    @property
    def call(self) -> str:
        """The expression that a test writes for this."""
        return f"{self}(model, inputs)"

    def __call__(self, model: nn.Module, inputs: Inputs) -> nn.Module:
        subject = named(self.name)
        logging.getLogger("torch.onnx").setLevel(logging.CRITICAL)
        with tempfile.TemporaryDirectory() as folder:
            task = Task(copy.deepcopy(model), inputs, 1, Path(folder))
            made = subject.prepare(task)
        if subject.values_only:
            return _ValuesOnly(model, made)
        return made if isinstance(made, nn.Module) else _AsModule(made)


class _AsModule(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


class _ValuesOnly(nn.Module):
    """A runtime's values, in the memory of the model's own answer.

    It knows neither strides nor aliases, and writes no input.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.function = copy.deepcopy(model), function

    def forward(self, *inputs: torch.Tensor) -> Any:
        values = self.function(*inputs)
        answer = self.model(*inputs)
        leaves, structure = pytree.tree_flatten(answer)
        for leaf, value in zip(leaves, values, strict=True):
            assert leaf.shape == value.shape, f"expected {leaf.shape}, got {value.shape}"
            leaf.copy_(value)
        return pytree.tree_unflatten(leaves, structure)


def targets() -> list[str]:
    """The subjects that are hunted."""
    return [name for name, subject in all_subjects().items() if HUNTED in subject.roles]


def installed() -> list[str]:
    """Those of them that can be here: not one that promises an error and no answer."""
    found = map(named, targets())
    return [s.name for s in found if s.is_installed and not isinstance(s.promise, float)]


def hunt(name: str, examples: int | None = None) -> list[Defect]:
    """The distinct defects of a target that so many generated models show, smallest first."""
    chosen, found, seen = named(name).hunt, dict[str, Counterexample](), set[str]()
    torch.set_num_threads(1)

    @on_each(models(alphabet=chosen.words, max_size=chosen.size), examples or chosen.examples)
    def collect(spec: Spec) -> None:
        failure = _failure(spec, name)
        if failure and (_kind(failure) not in seen or len(spec.tokens) <= 3):
            seen.add(_kind(failure))
            smallest = failure.reduced
            found.setdefault(signature(smallest), smallest)

    return [Defect(key, found[key]) for key in sorted(found, key=lambda k: (len(k), k))]


def _failure(spec: Spec, name: str) -> Counterexample | None:
    """What is wrong on a model, out of the handling of it: Dynamo prints what is handled."""
    subject = named(name)
    exact, dtype = subject.promise == "same bits", getattr(torch, subject.hunt.dtype)
    try:
        check_spec(spec, Hunted(name), exact=exact, dtype=dtype)
    except Counterexample as failure:
        return failure
    return None


def _kind(failure: Counterexample) -> str:
    """What a failure is, before it is reduced: its words in no order."""
    return f"{type(failure.__cause__).__name__} {sorted(set(failure.spec.tokens))}"


def signature(failure: Counterexample) -> str:
    """The kind of a failure and the operations that show it: one for each defect."""
    cause = failure.__cause__
    kind = "wrong answer" if "values differ" in str(cause) else type(cause).__name__
    kind = f"{kind}: {str(cause).partition(':')[0]}" if kind == "AssertionError" else kind
    return f"{kind} · {' '.join(failure.spec.tokens)}"


def listing(name: str, defects: list[Defect]) -> Iterator[str]:
    """The lines of a page: each defect with a test to paste."""
    yield f"{name}: {len(defects)} defects"
    for each in defects:
        yield from ("", f"## {each.signature}", "", each.counterexample.reproducer())
