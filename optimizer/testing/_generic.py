"""Generic mutants, a second opinion: no person chose what is changed in the passes and below.

A mutant is one small change of a syntax tree. The fuzz of the passes that it concerns has to find
it, or else their own tests. What cannot be seen from outside is in `equivalent.txt`, with the why.
"""

from __future__ import annotations

import ast
import importlib
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from difflib import ndiff
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from optimizer.testing._mutants import PACKAGE, Mutant, planted
from optimizer.testing._score import Verdict, concerned, imports, try_mutant
from optimizer.testing.motifs import MOTIFS

# What passes rest on without importing it, and where its tests are.
_BELOW = {"_observation": "_facts", "_effects": "_facts"}
_SECONDS = 600  # a change may make a loop endless
_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_CHANGED_ITSELF = (ast.UnaryOp, ast.Compare)  # so that no change is made twice


class _TooLong(BaseException):
    """Derived so that nothing which forgives an error forgives this."""


def sample(count: int, seed: int) -> list[Mutant]:
    """So many of all generic mutants; the same for a seed, whatever became of other code."""
    every = [mutant for file in files() for mutant in mutants_of(file)]
    return sorted(every, key=lambda each: Random(f"{seed} {each.name}").random())[:count]


def files() -> list[str]:
    """The passes, and what they are written with."""
    used = {module for name in MOTIFS for module in imports(name)} | {*_BELOW}
    below = sorted(f"{module}.py" for module in used if (PACKAGE / f"{module}.py").exists())
    return [f"passes/{name}.py" for name in MOTIFS] + below


@cache
def mutants_of(file: str) -> tuple[Mutant, ...]:
    """Every single change of a file. Where two read alike, the second's name ends in (2)."""
    return tuple(_mutants_of(file))


def _mutants_of(file: str) -> Iterator[Mutant]:
    text = (PACKAGE / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    plain, alike = ast.unparse(tree), Counter[str]()
    for node in code_of(tree):
        for field, value in changes(node):
            changed = with_changed(tree, node, field, value)
            name = f"{file}: {_difference(plain, changed)}"
            alike[name] += 1
            name += f" ({alike[name]})" * (alike[name] > 1)
            yield Mutant(name, file, text, changed, "generic")


def with_changed(tree: ast.AST, node: ast.AST, field: str, value: Any) -> str:
    """The text of a tree in which a field of one node has another value."""
    before = getattr(node, field)
    setattr(node, field, value)
    try:
        return ast.unparse(tree)
    finally:
        setattr(node, field, before)


def code_of(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes but annotations and what only the example of a pass is made of."""
    examples = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "example"]
    names = {n.id for each in examples for n in ast.walk(each) if isinstance(n, ast.Name)}
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in names]
    types = [n for n in tree.body if isinstance(n, ast.AnnAssign) and _names_a_type(n)]
    pending: list[ast.AST] = [n for n in tree.body if n not in (*examples, *classes, *types)]
    while pending:
        node = pending.pop(0)
        yield node
        annotations = (getattr(node, "annotation", None), getattr(node, "returns", None))
        pending += [child for child in ast.iter_child_nodes(node) if child not in annotations]


def _names_a_type(node: ast.AnnAssign) -> bool:
    return isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"


def changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Fields of a node, each with another value."""
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "operand", _not(operand)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, _CHANGED_ITSELF):
            yield "test", _not(test)
        case ast.Expr(value=ast.Call()):
            yield "value", ast.Constant(None)
        case ast.Name(id="all" | "any"):
            yield "id", {"all": "any", "any": "all"}[node.id]
        case ast.Constant(value=bool(value)):
            yield "value", not value
        case ast.Constant(value=int(value) | float(value)):
            yield "value", value + 1
        case _:
            yield from _other_operators(node)


def _other_operators(node: ast.AST) -> Iterator[tuple[str, Any]]:
    match node:
        case ast.Compare(ops=ops):
            for place, each in enumerate(ops):
                yield "ops", [*ops[:place], _OTHER[type(each)](), *ops[place + 1 :]]
        case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _OTHER:
            yield "op", _OTHER[type(op)]()
        case ast.comprehension(ifs=[_, *_]):
            yield "ifs", []


def _not(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _difference(before: str, after: str) -> str:
    """The lines that differ, on one line."""
    lines = [each for each in ndiff(before.splitlines(), after.splitlines()) if each[0] in "-+"]
    return " ".join(f"{line[0]} {line[2:].strip()}" for line in lines)


def equivalent() -> dict[str, str]:
    """The mutants that behave as the package does, by name, and why."""
    text = Path(__file__).with_name("equivalent.txt").read_text(encoding="utf-8")
    pairs = zip(*[iter(text.splitlines())] * 2, strict=True)
    return {name: why.removeprefix("# ") for name, why in pairs}


def generic(mutants: Iterable[Mutant], budget: int, processes: int) -> Iterator[Verdict]:
    """Try mutants, each in a process of its own, and yield what becomes of each."""
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        yield from pool.map(partial(try_generic, budget=budget), mutants)


def try_generic(mutant: Mutant, budget: int) -> Verdict:
    """Fuzz what a mutant concerns, then run its tests, until one of them fails."""
    try:
        with _limited(), Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
            verdict = try_mutant(mutant, budget)
    except (Exception, _TooLong) as error:  # it breaks the package, or never ends
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Verdict(mutant, killed=True, examples=0, seconds=0, evidence=found)
    if verdict.killed or not _tests_fail(mutant):
        return verdict
    return replace(verdict, killed=True, evidence="its tests fail")


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _tests_fail(mutant: Mutant) -> bool:
    """Whether the tests of a file, or of a pass that it concerns, find a mistake in it."""
    tests = Path("tests").absolute()  # of the repository; the package may be installed elsewhere
    stem = Path(mutant.file).stem
    own = tests / f"test{_BELOW.get(stem, stem)}.py"
    of_passes = [tests / "passes" / f"test_{name}.py" for name in concerned(mutant)]
    chosen = [str(each) for each in (own, *of_passes) if each.exists()]
    # Hypothesis is in use, which its plugin, where it is loaded now, takes for a mistake.
    options = ["-q", "-x", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    with (
        _limited(),
        planted(mutant, "optimizer"),
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        code = importlib.import_module("pytest").main([*options, *chosen])
    if code > 2:  # 1: a test failed, 2: one could not be imported
        raise RuntimeError(f"pytest could not run {chosen}: {code!r}")
    return bool(code)


def table(verdicts: Iterable[Verdict], known: Mapping[str, str]) -> Iterator[str]:
    """The lines of a Markdown table of all verdicts, and what they come to.

    `known` are the equivalent ones, by name, and why.
    """
    yield from ("| found by | file: change |", "|---|---|")
    killed, counted = 0, 0
    for each in verdicts:
        name = each.mutant.name
        survives = f"nothing: {known[name]}" if name in known else "nothing"
        found = each.evidence if each.killed else survives
        yield f"| {found.replace('|', '/')} | `{name.replace('|', '/')}` |"
        killed += each.killed
        counted += each.killed or name not in known
    yield from (
        "",
        f"killed {killed} of {counted} that are not equivalent ({killed / counted:.1%})",
    )
