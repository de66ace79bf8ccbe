"""A generated program as an `fx.Graph` that is built node by node: nothing is traced."""

from __future__ import annotations

import ast
import inspect
import operator
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_,
    ast.Invert: operator.invert,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
IN_PLACE: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.iadd,
    ast.Sub: operator.isub,
    ast.Mult: operator.imul,
    ast.Div: operator.itruediv,
    ast.FloorDiv: operator.ifloordiv,
    ast.Mod: operator.imod,
    ast.Pow: operator.ipow,
    ast.MatMult: operator.imatmul,
    ast.BitAnd: operator.iand,
    ast.BitOr: operator.ior,
    ast.BitXor: operator.ixor,
    ast.LShift: operator.ilshift,
    ast.RShift: operator.irshift,
}


def as_graph(model: nn.Module) -> fx.GraphModule:
    """A GraphModule that shares the submodules of `model`, with a node for each operation.

    Args:
        model: its forward is straight: it has no loops, and what its conditions rest on are
            defaults of arguments and attributes, as in all that `Spec.source` gives.
    """
    source = inspect.getsource(type(model).forward)
    (forward,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(forward, ast.FunctionDef)
    builder = _Builder(model)
    builder.arguments(forward.args)
    for statement in forward.body:
        builder.execute(statement)
    return fx.GraphModule(model, builder.graph)


class _Member:
    """A submodule of the model, by its name; None is the model itself."""

    def __init__(self, module: nn.Module, name: str = "") -> None:
        self.module, self.name = module, name


class _Builder:
    """Evaluates a forward with nodes in the place of tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.graph = fx.Graph()
        known = {"torch": torch, "F": functional, "self": _Member(model)}
        self.names: dict[str, Any] = type(model).forward.__globals__ | known

    def arguments(self, given: ast.arguments) -> None:
        count = len(given.args) - len(given.defaults)
        for argument in given.args[1:count]:
            self.names[argument.arg] = self.graph.placeholder(argument.arg)
        self.names |= {given.vararg.arg: ()} if given.vararg else {}
        optional = [*given.args[count:], *given.kwonlyargs]
        defaults = [*given.defaults, *filter(None, given.kw_defaults)]
        for argument, default in zip(optional, defaults, strict=True):
            self.names[argument.arg] = value = ast.literal_eval(default)
            self.graph.placeholder(argument.arg, default_value=value)

    def execute(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Return) and statement.value is not None:
            self.graph.output(self.value(statement.value))
        elif isinstance(statement, ast.Expr):
            self.value(statement.value)
        elif isinstance(statement, ast.Assign):
            self.assign(statement.targets[0], self.value(statement.value))
        else:
            assert isinstance(statement, ast.AugAssign)
            operands = self.value(statement.target), self.value(statement.value)
            self.assign(statement.target, self.apply(IN_PLACE[type(statement.op)], *operands))

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        else:
            assert isinstance(target, ast.Subscript)
            self.apply(operator.setitem, self.value(target.value), self.value(target.slice), value)

    def apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A node where a tensor is concerned; what Python computes elsewhere."""
        if function in {*OPERATORS.values()} and not any(isinstance(a, fx.Node) for a in args):
            return function(*args)
        return self.graph.call_function(function, args, kwargs)

    def value(self, expression: ast.expr) -> Any:
        return getattr(self, f"_{type(expression).__name__.lower()}")(expression)

    def _constant(self, expression: ast.Constant) -> Any:
        return expression.value

    def _name(self, expression: ast.Name) -> Any:
        return self.names[expression.id]

    def _namedexpr(self, expression: ast.NamedExpr) -> Any:
        value = self.value(expression.value)
        self.assign(expression.target, value)
        return value

    def _tuple(self, expression: ast.Tuple) -> Any:
        return tuple(map(self.value, expression.elts))

    def _list(self, expression: ast.List) -> Any:
        return [*map(self.value, expression.elts)]

    def _dict(self, expression: ast.Dict) -> Any:
        keys = [ast.literal_eval(key) for key in expression.keys if key is not None]
        return dict(zip(keys, map(self.value, expression.values), strict=True))

    def _slice(self, expression: ast.Slice) -> Any:
        parts = (expression.lower, expression.upper, expression.step)
        return slice(*(None if part is None else self.value(part) for part in parts))

    def _subscript(self, expression: ast.Subscript) -> Any:
        return self.apply(
            operator.getitem, self.value(expression.value), self.value(expression.slice)
        )

    def _binop(self, expression: ast.BinOp) -> Any:
        operands = self.value(expression.left), self.value(expression.right)
        return self.apply(OPERATORS[type(expression.op)], *operands)

    def _unaryop(self, expression: ast.UnaryOp) -> Any:
        return self.apply(OPERATORS[type(expression.op)], self.value(expression.operand))

    def _compare(self, expression: ast.Compare) -> Any:
        operands = self.value(expression.left), self.value(expression.comparators[0])
        if isinstance(expression.ops[0], ast.Is | ast.IsNot):
            return OPERATORS[type(expression.ops[0])](*operands)  # a node stands for a tensor
        return self.apply(OPERATORS[type(expression.ops[0])], *operands)

    def _ifexp(self, expression: ast.IfExp) -> Any:
        return self.value(expression.body if self.value(expression.test) else expression.orelse)

    def _attribute(self, expression: ast.Attribute) -> Any:
        base = self.value(expression.value)
        if isinstance(base, fx.Node):
            return self.graph.call_function(getattr, (base, expression.attr))
        if not isinstance(base, _Member):
            return getattr(base, expression.attr)
        value = getattr(base.module, expression.attr)
        name = f"{base.name}.{expression.attr}".removeprefix(".")
        if isinstance(value, nn.Module):
            return _Member(value, name)
        return self.graph.get_attr(name) if isinstance(value, torch.Tensor) else value

    def _call(self, expression: ast.Call) -> Any:
        args = [self.value(argument) for argument in expression.args]
        kwargs = {str(each.arg): self.value(each.value) for each in expression.keywords}
        function = expression.func
        if isinstance(function, ast.Attribute):
            base = self.value(function.value)
            if isinstance(base, fx.Node):
                return self.graph.call_method(function.attr, (base, *args), kwargs)
        called = self.value(function)
        if isinstance(called, _Member):
            return self.graph.call_module(called.name, tuple(args), kwargs)
        return self.apply(called, *args, **kwargs)
