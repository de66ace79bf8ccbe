"""Every operation that a pass or a table of operations names is one that some word produces."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import SHAPES, TOKENS, Spec
from tests.internals import KNOWN, Pattern, Recorder, name_of_call, passes

# ATen overloads are in no list: they stand for functions that are, in exported programs.
TABLES = (
    "frontend.canonicalize", "core.ops", "rewrite.edit", "rewrite.subgraph",
    *(f"passes.{each.name}" for each in pkgutil.iter_modules(passes.__path__)),
)  # fmt: skip
NOT_MET = {
    "what ends a recording as item() does": {".numpy", ".tolist"},
    "an address, or of autograd": {".data_ptr", ".untyped_storage", ".requires_grad_"},
    "needs a GPU": {".cuda"},
    "tried by test_facts on each dtype": {
        ".cdouble", ".cfloat", ".chalf", ".conj_physical", ".dequantize", ".resolve_conj",
        ".resolve_neg", ".sum_to_size"},
    "Python, of which fx records the method": {"F.sigmoid", "F.tanh"},
    "what passes make": {"add_over", "mul_over"},
}  # fmt: skip


def key(value: Any) -> str:
    """The name of an operation, the same for each way to get at it; none for all else."""
    name = getattr(value, "__name__", "")
    if isinstance(value, str):  # a method; special ones are operators or conversions
        return f".{value}" if hasattr(torch.Tensor, value) and not value.startswith("__") else ""
    if isinstance(value, type):  # what is private stands for its subclasses
        known = issubclass(value, nn.Module) and value.__module__.startswith("torch")
        return f"nn.{name}" if known and not name.startswith("_") else ""
    home = getattr(value, "__module__", None) or "torch"
    if not callable(value) or not name or isinstance(value, torch._ops.OpOverload):
        return ""
    if home in ("_operator", "optimizer.core.ops"):
        return name
    in_functional = getattr(F, name, None) is value and getattr(torch, name, None) is not value
    return f"{'F' if in_functional else 'torch'}.{name}" if home.startswith("torch") else ""


def leaves(value: Any) -> Iterator[Any]:
    """What tables hold, also as keys."""
    if isinstance(value, dict):
        yield from leaves([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def targets(pattern: Pattern | None) -> Iterator[Any]:
    if pattern is not None:
        yield from pattern.targets
        for each in pattern.args:
            yield from targets(each)


def named() -> set[str]:
    modules = [importlib.import_module(f"optimizer.{name}") for name in TABLES]
    tables = [v for m in modules for n, v in vars(m).items() if not n.startswith("__")]
    found = [each for table in tables if not callable(table) for each in leaves(table)]
    found += [each for one in optimizer.all_passes() for each in targets(one.pattern)]
    return {key(each) for each in found} - {""}


def operations(graph: fx.GraphModule) -> Iterator[Any]:
    for node in graph.graph.nodes:
        if node.op == "call_module":
            yield from map(type, graph.get_submodule(str(node.target)).modules())
        elif node.op.startswith("call"):
            yield node.target
            yield node.args[1] if node.target is getattr else None


def produced(words: Iterable[str]) -> set[str]:
    """What words call on a shape of each rank: several stand in one program, each on its input."""
    shapes = {len(shape): shape for shape in reversed(SHAPES)}.values()
    program = tuple(" ".join(f"dup dup {word} turned drop drop" for word in words).split())
    graphs = [Spec(program, shape, entry="graph").build() for shape in shapes]
    return {key(each) for graph in graphs for each in operations(graph)}  # type: ignore[arg-type]


def test_a_word_produces_each_operation_that_is_named() -> None:
    words = (*TOKENS,)
    found = (produced(words[start : start + 8]) for start in range(0, len(words), 8))
    expected, known = named(), set().union(*found)
    assert len(expected) > 200
    assert expected - known == set().union(*NOT_MET.values())


def operators(word: str) -> set[str]:
    """What a word runs on a shape of each rank, named as at level 2."""
    found = set[str]()
    for shape in ((4, 4), (2, 4, 4), (2, 4, 4, 4), (2, 4, 3, 3, 3)):
        spec = Spec((word,), shape)
        model, inputs = spec.build(), spec.inputs()
        recorder = Recorder(inputs, [*model.parameters(), *model.buffers()], KNOWN)
        with suppress(Exception), torch.inference_mode(), recorder:  # what cannot be written down
            model(*inputs)
        found |= {name_of_call(node) for node in recorder.graph.nodes}
    return found


def test_a_word_produces_each_operator_of_a_region() -> None:
    assert set().union(*map(operators, TOKENS)) >= KNOWN
