"""What a run of arithmetic on one tensor computes, in one form for all of its spellings.

A form is x, a number times forms, a number plus forms, or a function of forms. Products and sums
are flat and sorted, so that association, order, division by a number and whole powers make no
difference. Two runs of one form compute the same up to rounding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.node import arg, module_of
from optimizer.core.ops import iadd, imul, isub, itruediv
from optimizer.facts.facts import fact
from optimizer.rewrite.pattern import Target, called

Form: TypeAlias = tuple[Any, ...]
X: Form = ("x",)

_SPELLINGS: dict[str, tuple[Target, ...]] = {
    "mul": (operator.mul, imul, torch.mul, "mul", "mul_"),
    "div": (operator.truediv, itruediv, torch.div, "div", "div_"),
    "add": (operator.add, iadd, torch.add, "add", "add_"),
    "sub": (operator.sub, isub, torch.sub, "sub", "sub_"),
    "pow": (operator.pow, torch.pow, "pow"),
    "clamp": (F.relu6, nn.ReLU6, F.hardtanh, nn.Hardtanh, torch.clamp, "clamp", "clamp_"),
    "sigmoid": (torch.sigmoid, F.sigmoid, nn.Sigmoid, "sigmoid", "sigmoid_"),
    "tanh": (torch.tanh, F.tanh, nn.Tanh, "tanh", "tanh_"),
    "erf": (torch.erf, "erf", "erf_"),
    "hardsigmoid": (F.hardsigmoid, nn.Hardsigmoid),
}
_NAMES = {target: name for name, targets in _SPELLINGS.items() for target in targets}
_FARTHEST = 8  # calls between the root of a form and its x
PRODUCTS = (*_SPELLINGS["mul"], *_SPELLINGS["div"])


def _number(value: float) -> Form:
    return "product", float(value)


def _product(*factors: Form) -> Form:
    coefficient = 1.0
    rest: list[Form] = []
    for factor in factors:
        is_product = factor[0] == "product"
        coefficient *= factor[1] if is_product else 1.0
        rest += factor[2:] if is_product else [factor]
    return _flat("product", coefficient, rest, 1.0)


def _total(*terms: Form) -> Form:
    constant = 0.0
    rest: list[Form] = []
    for term in terms:
        is_number = term[0] == "total" or (term[0] == "product" and len(term) == 2)
        constant += term[1] if is_number else 0.0
        rest += term[2:] if is_number else [term]
    return _flat("total", constant, rest, 0.0) if rest else _number(constant)


def _flat(kind: str, value: float, rest: list[Form], neutral: float) -> Form:
    if value == neutral and len(rest) == 1:
        return rest[0]
    return kind, float(f"{value:.13g}"), *sorted(rest, key=repr)


def form_of(value: Any, x: fx.Node, inner: set[fx.Node], depth: int = _FARTHEST) -> Form:
    """The form of a value as a function of `x`; the calls on the way are added to `inner`."""
    if value is x:
        return X
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value)
    name = _NAMES.get(called(value)) if isinstance(value, fx.Node) and depth else None
    operands = _operands(value, name) if name else None
    if name is None or operands is None:
        return "unknown", str(value)
    inner.add(value)
    return _combined(name, [form_of(each, x, inner, depth - 1) for each in operands])


def _combined(name: str, forms: Sequence[Form]) -> Form:
    one, *others = forms
    other = others[0] if others else _number(1)
    is_number = other[0] == "product" and len(other) == 2
    if name == "mul":
        return _product(one, other)
    if name == "div" and is_number and other[1]:
        return _product(one, _number(1 / other[1]))
    if name == "add":
        return _total(one, other)
    if name == "sub":
        return _total(one, _product(_number(-1), other))
    if name == "pow" and is_number and other[1] in (2.0, 3.0):
        return _product(*[one] * int(other[1]))
    return name, *forms


def _operands(node: fx.Node, name: str) -> Sequence[Any] | None:
    """What a call computes with, or None where its arguments say more than that."""
    keywords = {key: value for key, value in node.kwargs.items() if key != "inplace"}
    if name == "clamp":
        return arg(node, 0, keywords.get("input")), *_bounds(node, keywords)
    expected = 2 if name in ("mul", "div", "add", "sub", "pow") else 1
    return None if keywords or len(node.args) != expected else node.args


def _bounds(node: fx.Node, keywords: dict[str, Any]) -> tuple[Any, Any]:
    target = called(node)
    if target in (F.relu6, nn.ReLU6):
        return 0.0, 6.0
    if target is nn.Hardtanh:
        return module_of(node).min_val, module_of(node).max_val
    low, high = (-1.0, 1.0) if target is F.hardtanh else (None, None)
    low = keywords.get("min", keywords.get("min_val", arg(node, 1, low)))
    return low, keywords.get("max", keywords.get("max_val", arg(node, 2, high)))


def form_of_function(function: Callable[[Any], Any]) -> Form:
    """The form of what a function of one tensor returns."""
    graph = fx.Tracer().trace(function)
    x, *_, output = graph.nodes
    return form_of(output.args[0], x, set())


def readings(root: fx.Node) -> list[tuple[Form, fx.Node, set[fx.Node]]]:
    """Every reading of a value as a form of one other: the form, its x and the calls between."""
    reached: set[fx.Node] = set()
    form_of(root, root.graph._root, reached)
    sources = {each for node in reached for each in node.all_input_nodes}
    found = []
    for x in sorted(sources) if len(reached) <= 2 * _FARTHEST else ():
        inner: set[fx.Node] = set()
        found.append((form_of(root, x, inner), x, inner - {root}))
    return found


def is_closed(root: fx.Node, inner: set[fx.Node]) -> bool:
    """Whether what is computed on the way to `root` is read and written there and nowhere else.

    A call that writes its operand must be the operand's only reader: others read it before.
    """
    known = {root, *inner}
    if any(not known.issuperset(node.users) for node in inner):
        return False
    writers = [node for node in known if fact(node).writes]
    return all(arg(node, 0) in inner and len(arg(node, 0).users) == 1 for node in writers)
