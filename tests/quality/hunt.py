"""The known-bad control: the same fuzz, pointed at other tools, finds what they break."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import fx, nn

from optimizer.testing._assemble import Spec
from optimizer.testing._check import Subject, check_spec
from optimizer.testing._report import Counterexample
from optimizer.testing._strategies import models, on_each
from tests.quality.compilers import inductor, onnx_runtime

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Target:
    """A tool, and the words that make models which it is meant for.

    Attributes:
        subject: the tool.
        alphabet: the words.
        dtype: of parameters and inputs.
        examples: how many models, unless told otherwise.
        max_size: the most programs in one; a compiler takes long to reduce them.
        needs: the package that it is of, where that is not torch.
    """

    subject: Subject
    alphabet: tuple[str, ...]
    dtype: torch.dtype = torch.float64
    examples: int = 120
    max_size: int = 12
    needs: str = "torch"


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
    "inductor": Target(
        inductor,
        ("relu", "linear", "conv", "bn", "add", "dup", "block", "bn_train", "t01",
         "dropout idouble_statement"),
        torch.float32,
        examples=40,
        max_size=3,
    ),
    "onnxruntime": Target(
        onnx_runtime,
        (*_LAYERS, "linear_matmul", "permute_same", "offset", "t01", "pad_kw", "avg_pool_padded",
         "permute_same linear_matmul offset"),
        torch.float32,
        examples=60,
        max_size=3,
        needs="onnxruntime",
    ),
}  # fmt: skip


def installed() -> list[str]:
    """The targets that can be hunted on here."""
    return [name for name, target in TARGETS.items() if find_spec(target.needs)]


def hunt(name: str, examples: int | None = None) -> list[Defect]:
    """The distinct defects of a target that so many generated models show, smallest first."""
    target, found, seen = TARGETS[name], dict[str, Counterexample](), set[str]()
    torch.set_num_threads(1)

    @on_each(
        models(alphabet=target.alphabet, max_size=target.max_size), examples or target.examples
    )
    def collect(spec: Spec) -> None:
        failure = _failure(spec, target)
        if failure and (_kind(failure) not in seen or len(spec.tokens) <= 3):
            seen.add(_kind(failure))
            smallest = failure.reduced()
            found.setdefault(signature(smallest), smallest)

    return [Defect(key, found[key]) for key in sorted(found, key=lambda k: (len(k), k))]


def _failure(spec: Spec, target: Target) -> Counterexample | None:
    """What is wrong on a model, out of the handling of it: Dynamo prints what is handled."""
    try:
        check_spec(spec, target.subject, dtype=target.dtype)
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
