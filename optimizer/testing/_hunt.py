"""The known-bad control: the same fuzz, pointed at torch's own tools, finds what they break."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from hypothesis import Phase, given, seed, settings
from torch import fx, nn

from optimizer.testing._assemble import Spec
from optimizer.testing._check import Subject, check_spec
from optimizer.testing._report import Counterexample
from optimizer.testing._strategies import models

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Target:
    """One of torch's tools, and the words that make models which it is meant for."""

    subject: Subject
    alphabet: tuple[str, ...]


@dataclass(frozen=True)
class Defect:
    """A way in which a tool fails, on the smallest program found that shows it."""

    signature: str
    counterexample: Counterexample


def fuse(model: nn.Module, inputs: Inputs) -> nn.Module:
    """`torch.fx.experimental.optimization.fuse`, on a copy."""
    with warnings.catch_warnings():  # the module uses what torch has deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.fx.experimental import optimization
    return optimization.fuse(copy.deepcopy(model))


def dead_code(model: nn.Module, inputs: Inputs) -> nn.Module:
    """`torch.fx.Graph.eliminate_dead_code`, on a trace."""
    traced = fx.symbolic_trace(model)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def freeze(model: nn.Module, inputs: Inputs) -> nn.Module:
    """`torch.jit.freeze`, on a trace, with the optimizations that it runs by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(copy.deepcopy(model), inputs, check_trace=False)  # type: ignore[no-untyped-call]
        return torch.jit.freeze(traced)  # type: ignore[no-any-return]


def common_subexpressions(model: nn.Module, inputs: Inputs) -> nn.Module:
    """`torch.fx.passes.dialect.common.cse_pass.CSEPass`, on a trace."""
    from torch.fx.passes.dialect.common import cse_pass

    result = cse_pass.CSEPass()(fx.symbolic_trace(model))
    assert result is not None
    return result.graph_module  # type: ignore[no-any-return]


_LAYERS = ("relu", "linear", "conv", "bn", "add", "dup", "swap", "again", "block", "out")
TARGETS: dict[str, Target] = {
    "torch.fx.fuse": Target(
        fuse,
        (*_LAYERS, "hook", "tie", "linear4", "bn_plain", "bn_train", "bn_nostats", "linear bn",
         "linear bn hook", "block again"),
    ),
    "dead_code": Target(
        dead_code,
        ("relu", "shift", "add", "dup", "idouble_statement", "mask_fill", "iview_statement",
         "relu_statement", "dropout_train", "bn_train", "dup dropout_train drop",
         "dup bn_train drop", "dup idouble drop"),
    ),
    "cse": Target(
        common_subexpressions,
        ("relu", "shift", "dup", "swap", "add", "idouble_statement", "mask_fill", "out",
         "dropout_F_train", "dup relu swap relu", "dup double swap double",
         "dup dropout_F_train swap dropout_F_train add", "linear"),
    ),
    "jit.freeze": Target(
        freeze,
        (*_LAYERS, "bn_train", "dropout_train", "constant_counter", "hook", "merge", "add_size"),
    ),
}  # fmt: skip


def hunt(name: str, examples: int = 120) -> list[Defect]:
    """The distinct defects of a target that so many generated models show, smallest first."""
    target, found = TARGETS[name], dict[str, Counterexample]()
    torch.set_num_threads(1)

    @settings(max_examples=examples, database=None, deadline=None, phases=(Phase.generate,))
    @seed(0)
    @given(models(alphabet=target.alphabet))
    def collect(spec: Spec) -> None:
        try:
            check_spec(spec, target.subject)
        except Counterexample as failure:
            if _kind(failure) not in seen or len(spec.tokens) <= 3:
                seen.add(_kind(failure))
                smallest = failure.reduced()
                found.setdefault(signature(smallest), smallest)

    seen = set[str]()
    collect()
    return [Defect(key, found[key]) for key in sorted(found, key=lambda k: (len(k), k))]


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
