"""Generic mutants, a second opinion: no person chose what is changed in the passes and below.

A mutant is one small change of a syntax tree. What cannot be seen from outside is in
`equivalent.txt`, with the why.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from difflib import ndiff
from functools import cache
from pathlib import Path
from typing import Any

from tests.quality.mutants import BELOW, PACKAGE, Mutant, homes, imports, of_capture

_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_CHANGED_ITSELF = (ast.UnaryOp, ast.Compare)  # so that no change is made twice


def mutants() -> dict[str, Mutant]:
    """All of them, by name."""
    return {mutant.name: mutant for file in files() for mutant in mutants_of(file)}


def files() -> list[str]:
    """The passes, what they are written with, and the capture."""
    passes = sorted({*homes().values()})
    used = {module for each in passes for module in imports(each)}
    below = sorted(f"{module}.py" for module in {*used, *BELOW, *of_capture()})
    return [f"{each}.py" for each in passes] + [f for f in below if (PACKAGE / f).exists()]


@cache
def mutants_of(file: str) -> tuple[Mutant, ...]:
    """Every single change of a file. Where two read alike, the second's name ends in (2)."""
    return tuple(_mutants_of(file))


def _mutants_of(file: str) -> Iterator[Mutant]:
    text = (PACKAGE / file).read_text(encoding="utf-8")
    tree = ast.parse(text)
    plain, alike = [ast.unparse(each) for each in tree.body], Counter[str]()
    places = {node: place for place, each in enumerate(tree.body) for node in ast.walk(each)}
    for node in code_of(tree):
        place = places[node]
        for field, value in changes(node):
            changed = with_changed(tree.body[place], node, field, value)
            name = f"{file}: {_difference(plain[place], changed)}"
            alike[name] += 1
            name += f" ({alike[name]})" * (alike[name] > 1)
            new = "\n".join([*plain[:place], changed, *plain[place + 1 :]])
            yield Mutant(name, file, text, new, "generic")


def with_changed(tree: ast.AST, node: ast.AST, field: str, value: Any) -> str:
    """The text of a tree in which a field of one node has another value."""
    before = getattr(node, field)
    setattr(node, field, value)
    try:
        return ast.unparse(tree)
    finally:
        setattr(node, field, before)


def code_of(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes but annotations."""
    types = [n for n in tree.body if isinstance(n, ast.AnnAssign) and _names_a_type(n)]
    pending: list[ast.AST] = [n for n in tree.body if n not in types]
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
