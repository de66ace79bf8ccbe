"""One spelling per operation, so that every pattern is written once.

Affine and norm layers become calls of plain `torch.nn` modules, also where a forward calls
`F.linear`, `F.conv2d` or `F.batch_norm` on the model's own tensors. ReLU, the Dropouts and
the transposes become calls of one function each, with every argument positional; sums and
products become operators. No value changes, so each node keeps the facts of the one it replaces.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.node import (
    attribute_of,
    callee,
    fresh_name,
    is_attribute,
    module_of,
    named_arguments,
    owner,
)
from optimizer.facts.facts import Refused, is_read_only, rank, rely_on_asked
from optimizer.frontend.known import is_of_torch

Function: TypeAlias = Callable[..., Any]

_CONVS: dict[Function, type[nn.Module]] = {
    F.conv1d: nn.Conv1d, F.conv2d: nn.Conv2d, F.conv3d: nn.Conv3d,
    F.conv_transpose1d: nn.ConvTranspose1d, F.conv_transpose2d: nn.ConvTranspose2d,
    F.conv_transpose3d: nn.ConvTranspose3d,
}  # fmt: skip
_NORMS: dict[int, type[nn.Module]] = {
    2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d,
}  # fmt: skip


def affine_as_module(node: fx.Node) -> None:
    """Turn a node, in place, from a Linear or Conv function into a call of the module."""
    function = callee(node)
    if function is not F.linear and function not in _CONVS:
        return
    weight: Any
    source, weight, bias, *settings = node.args
    if not (_is_constant(weight) and (bias is None or _is_constant(bias))):
        return
    if any(isinstance(leaf, fx.Node) for leaf in torch.utils._pytree.tree_leaves(settings)):
        return
    if attribute_of(weight).dim() < 2:
        return  # F.linear takes a vector for a weight, nn.Linear does not
    _call_module(node, _affine_module(function, settings, weight), source, weight=weight, bias=bias)


def _affine_module(function: Function, settings: list[Any], weight: fx.Node) -> nn.Module:
    rows, columns, *kernel = attribute_of(weight).shape
    if function is F.linear:
        return nn.Linear(columns, rows, device="meta")
    if len(settings) == 4:
        wide = columns * settings[-1]
        return _CONVS[function](wide, rows, kernel, *settings, device="meta")
    *settings, groups, dilation = settings  # a transposed one takes and names one more
    sizes, others = (rows, columns * groups, kernel), {"dilation": dilation, "device": "meta"}
    return _CONVS[function](*sizes, *settings, groups, **others)


def norm_as_module(node: fx.Node) -> None:
    """Turn a node, in place, from F.batch_norm in eval mode into a call of the module."""
    if callee(node) is not F.batch_norm:
        return
    source, mean, variance, weight, bias, training, momentum, eps = node.args
    tensors = {"running_mean": mean, "running_var": variance, "weight": weight, "bias": bias}
    attributes = all(t is None or _is_constant(t) for t in tensors.values())
    inference = training is False and mean is not None and variance is not None
    if not (inference and attributes and isinstance(eps, float)):
        return
    try:
        kind = _NORMS[rank(source)]  # type: ignore[arg-type]
    except (Refused, KeyError):
        return
    rely_on_asked(node.graph)
    features = attribute_of(mean).shape[0]
    module = kind(features, eps, momentum, device="meta").eval()
    module.num_batches_tracked = torch.tensor(0)
    _call_module(node, module, source, **tensors)


def _is_constant(value: Any) -> bool:
    """Whether a value is a tensor of the model that no node writes."""
    return is_attribute(value) and is_read_only(value)


def _call_module(node: fx.Node, module: nn.Module, source: Any, **tensors: Any) -> None:
    """Turn a node, in place, into a call of `module` holding the given attributes."""
    root = owner(node)
    for name, value in tensors.items():
        held = None if value is None else attribute_of(value)
        if name in module._buffers:
            module._buffers[name] = held
        elif held is None or isinstance(held, nn.Parameter):
            module._parameters[name] = held
        else:
            module._parameters[name] = nn.Parameter(held, requires_grad=False)
    path = str(tensors["weight"].target) if tensors["weight"] else node.name
    stem = path.rpartition(".")[0] or node.name
    name = fresh_name(root, stem)
    root.add_submodule(name, module)
    node.op, node.target, node.args, node.kwargs = "call_module", name, (source,), {}


_METHODS: dict[str, Function] = {
    "relu": torch.relu, "relu_": torch.relu_, "transpose": torch.transpose,
    "swapaxes": torch.transpose, "swapdims": torch.transpose, "permute": torch.permute,
    "movedim": torch.movedim, "moveaxis": torch.movedim, "t": torch.t,
    "matmul": torch.matmul, "mm": torch.mm, "addmm": torch.addmm,
    "flatten": torch.flatten,
}  # fmt: skip
_FUNCTIONS: dict[Function, Function] = {
    torch.swapaxes: torch.transpose, torch.swapdims: torch.transpose,
    torch.moveaxis: torch.movedim, torch.dropout: F.dropout,
    torch.alpha_dropout: F.alpha_dropout, torch.feature_alpha_dropout: F.feature_alpha_dropout,
}  # fmt: skip
_ARITHMETIC: dict[Function | str, Function] = {
    torch.add: operator.add, torch.sub: operator.sub, torch.mul: operator.mul,
    torch.div: operator.truediv, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "div": operator.truediv,
}  # fmt: skip
_OPERANDS = {"input", "other"}
_RELUS: dict[Function, bool] = {torch.relu: False, torch.relu_: True}
_DROPOUTS: dict[type, Function] = {
    nn.Dropout: F.dropout, nn.Dropout1d: F.dropout1d, nn.Dropout2d: F.dropout2d,
    nn.Dropout3d: F.dropout3d, nn.AlphaDropout: F.alpha_dropout,
    nn.FeatureAlphaDropout: F.feature_alpha_dropout,
}  # fmt: skip
# Builtins have no signature that Python could read; the first names are required.
_CONV = {"input": ..., "weight": ..., "bias": None, "stride": 1, "padding": 0, "dilation": 1,
         "groups": 1}  # fmt: skip
_CONV_TRANSPOSE = {"input": ..., "weight": ..., "bias": None, "stride": 1, "padding": 0,
                   "output_padding": 0, "groups": 1, "dilation": 1}  # fmt: skip
_BUILTINS: dict[Function, dict[str, Any]] = {
    torch.relu: {"input": ...}, torch.relu_: {"input": ...}, torch.t: {"input": ...},
    torch.transpose: {"input": ..., "dim0": ..., "dim1": ...},
    torch.permute: {"input": ..., "dims": ...},
    torch.movedim: {"input": ..., "source": ..., "destination": ...},
    F.linear: {"input": ..., "weight": ..., "bias": None},
    F.conv1d: _CONV, F.conv2d: _CONV, F.conv3d: _CONV, F.conv_transpose1d: _CONV_TRANSPOSE,
    F.conv_transpose2d: _CONV_TRANSPOSE, F.conv_transpose3d: _CONV_TRANSPOSE,
    torch.flatten: {"input": ..., "start_dim": 0, "end_dim": -1},
}  # fmt: skip
_ALIASES = {"axis0": "dim0", "axis1": "dim1", "train": "training"}  # of swapaxes, torch.dropout


def spell(module: fx.GraphModule) -> None:
    """Bring every node of a captured graph to its one spelling."""
    rules = (
        _method, _arithmetic, _module, _positional, _relu, _permute, _stochastic_depth,
        affine_as_module, norm_as_module,
    )  # fmt: skip
    for node in list(module.graph.nodes):
        for rule in rules:
            rule(node)
    for node in reversed(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)


def spelled(target: Any) -> Any:
    """What a captured graph calls instead of a function, a module's class or a method's name."""
    target = _METHODS.get(target, target)
    target = _ARITHMETIC.get(target, _FUNCTIONS.get(target, target))
    is_relu = target in _RELUS or target is nn.ReLU
    return F.relu if is_relu else _DROPOUTS.get(target, target)


def _call(node: fx.Node, target: Function, *args: Any) -> None:
    """Turn a node, in place, into a call of a function with positional arguments."""
    node.op, node.target = "call_function", target
    node.args, node.kwargs = args, {}
    node.meta.pop("is_wrapped", None)  # the mark was of the function called before


def _method(node: fx.Node) -> None:
    if node.op == "call_method" and node.target in _METHODS:
        node.op, node.target = "call_function", _METHODS[str(node.target)]
    if node.op == "call_function" and node.target in _FUNCTIONS:
        node.target = _FUNCTIONS[node.target]
    if callee(node) is getattr and node.args[1] == "mT":
        _call(node, torch.transpose, node.args[0], -2, -1)
    elif callee(node) is getattr and node.args[1] == "T" and _is_tensor(node.args[0], 2):
        _call(node, torch.t, node.args[0])  # the same at every rank that .T is meant for


def _is_tensor(value: Any, most_dimensions: int = 64) -> bool:
    fact = value.meta.get("fact") if isinstance(value, fx.Node) else None
    known = getattr(fact, "value", None)
    return isinstance(known, torch.Tensor) and known.dim() <= most_dimensions


def _arithmetic(node: fx.Node) -> None:
    """Sums and products as functions or methods are operators; `add` of a set is not a sum."""
    given = named_arguments(node, ("input", "other"))
    plain = len(given) == len(node.args) + len(node.kwargs) == 2 and set(given) == _OPERANDS
    method = node.op == "call_method" and _is_tensor(node.args[0])
    if plain and (method or node.op == "call_function") and node.target in _ARITHMETIC:
        _call(node, _ARITHMETIC[node.target], given["input"], given["other"])


def _module(node: fx.Node) -> None:
    kind = callee(node)
    if node.op != "call_module" or kind is None or not is_of_torch(kind):
        return
    if not node.args and set(node.kwargs) == {"input"}:
        node.args, node.kwargs = (node.kwargs["input"],), {}
    module = module_of(node)
    if kind is nn.ReLU:
        _call(node, F.relu, *node.args, module.inplace)
    elif kind in _DROPOUTS:
        _call(node, _DROPOUTS[kind], *node.args, float(module.p), module.training, module.inplace)


@cache
def _parameters(function: Function) -> dict[str, Any]:
    """The names of a function's parameters and their defaults, `...` where there is none."""
    if function in _BUILTINS:
        return _BUILTINS[function]
    parameters = inspect.signature(function).parameters.values()
    return {p.name: ... if p.default is p.empty else p.default for p in parameters}


_POSITIONAL = {*_BUILTINS, *_DROPOUTS.values(), F.relu, F.batch_norm}


def _positional(node: fx.Node) -> None:
    if node.op != "call_function" or node.target not in _POSITIONAL:
        return
    if node.target is torch.permute and "dims" not in node.kwargs:
        return
    parameters = _parameters(node.target)
    given = dict(zip(parameters, node.args, strict=False))
    given |= {_ALIASES.get(name, name): value for name, value in node.kwargs.items()}
    complete = parameters | given
    if len(complete) == len(parameters) and ... not in complete.values():
        _call(node, node.target, *complete.values())


def _relu(node: fx.Node) -> None:
    inplace = _RELUS.get(callee(node))
    if inplace is not None:
        _call(node, F.relu, *node.args, inplace)


def _permute(node: fx.Node) -> None:
    if callee(node) is not torch.permute:
        return
    source, *order = node.args
    if len(order) == 1 and isinstance(order[0], list | tuple):
        order = list(order[0])
    if len(order) == 1 and isinstance(order[0], fx.Node):
        return  # a list of axes that is computed, or one axis: torch.permute takes both
    axes = [axis for axis in order if isinstance(axis, int)]
    constant = len(axes) == len(order)
    _call(
        node,
        torch.permute,
        source,
        tuple(axis % len(axes) for axis in axes) if constant else tuple(order),
    )


def _stochastic_depth(node: fx.Node) -> None:
    """torchvision's, by name: outside training it returns its input, as dropout does."""
    function = callee(node)
    if getattr(function, "__module__", "") != "torchvision.ops.stochastic_depth":
        return
    given = named_arguments(node, ("input", "p", "mode", "training"))
    if given.get("training") is False:
        _call(node, F.dropout, given["input"], given["p"], False, False)
