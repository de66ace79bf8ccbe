"""One spelling per operation, so that every pattern is written once.

Affine and norm layers become calls of plain `torch.nn` modules, also where a forward calls
`F.linear`, `F.conv2d` or `F.batch_norm` on the model's own tensors. ReLU, the Dropouts and
the transposes become calls of one function each, with every argument positional; sums and
products become operators. ATen overloads, as `torch.export` records them, become the functions
that they are where a pattern names those. No value changes, so a node keeps the facts it has.
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
from torch.nn.modules.conv import _ConvTransposeNd
from torch.overrides import get_testing_overrides

from optimizer.core.errors import Refused
from optimizer.core.node import (
    adopt,
    attribute_of,
    callee,
    home_of,
    is_attribute,
    module_of,
    named_arguments,
)
from optimizer.facts.facts import facts_of, is_read_only, rank
from optimizer.frontend.traceable import is_of_torch

aten = torch.ops.aten
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
    constant = _is_constant(weight) and (bias is None or _is_constant(bias))
    if not constant or not {source, weight, bias}.issuperset(node.all_input_nodes):
        return
    if attribute_of(weight).dim() < 2:
        return  # F.linear takes a vector for a weight, nn.Linear does not
    rows, columns, *kernel = attribute_of(weight).shape
    if function is F.linear:
        module: nn.Module = nn.Linear(columns, rows, device="meta")
    else:
        kind, names = _CONVS[function], [*_parameters(function)][3:]
        options = dict(zip(names, settings, strict=True))
        inputs = columns * options["groups"]
        sizes = (rows, inputs) if issubclass(kind, _ConvTransposeNd) else (inputs, rows)
        module = kind(*sizes, kernel, **options, device="meta")
    _call_module(node, module, source, weight=weight, bias=bias)


def norm_as_module(node: fx.Node) -> None:
    """Turn a node, in place, from F.batch_norm in eval mode into a call of the module."""
    if callee(node) is not F.batch_norm:
        return
    source, mean, variance, weight, bias, training, momentum, eps = node.args
    tensors = {"running_mean": mean, "running_var": variance, "weight": weight, "bias": bias}
    attributes = all(t is None or _is_constant(t) for t in tensors.values())
    inference = training is False and mean is not None and variance is not None
    facts = facts_of(node.graph)
    if not (inference and attributes and isinstance(eps, float) and facts):
        return
    facts.pending_guards.clear()
    try:
        kind = _NORMS[rank(source)]  # type: ignore[arg-type]
    except (Refused, KeyError):
        return
    facts.guards |= facts.pending_guards
    features = attribute_of(mean).shape[0]
    module = kind(features, eps, momentum, device="meta").eval()
    module.num_batches_tracked = torch.tensor(0)
    _call_module(node, module, source, **tensors)


def _is_constant(value: Any) -> bool:
    """Return whether a value is a tensor of the model that no node writes."""
    return is_attribute(value) and is_read_only(value)


def _call_module(node: fx.Node, module: nn.Module, source: Any, **tensors: Any) -> None:
    """Turn a node, in place, into a call of `module` holding the given attributes."""
    for name, value in tensors.items():
        tensor: Any = None if value is None else attribute_of(value)
        table: Any = module._buffers if name in module._buffers else module._parameters
        fits = table is module._buffers or tensor is None or isinstance(tensor, nn.Parameter)
        table[name] = tensor if fits else nn.Parameter(tensor, requires_grad=False)
    path = str(tensors["weight"].target) if tensors["weight"] else ""
    name = adopt(node.graph, path.rpartition(".")[0] or node.name, module)
    node.op, node.target, node.args, node.kwargs = "call_module", name, (source,), {}


def _of_methods_too(functions: dict[str, Function]) -> dict[Any, Function]:
    """Return the spellings of the functions of torch and of the methods of these names."""
    return functions | {getattr(torch, name): each for name, each in functions.items()}


_FUNCTIONS = _of_methods_too({
    "relu": F.relu, "relu_": F.relu, "transpose": torch.transpose, "swapaxes": torch.transpose,
    "swapdims": torch.transpose, "permute": torch.permute, "movedim": torch.movedim,
    "moveaxis": torch.movedim, "t": torch.t, "matmul": torch.matmul, "mm": torch.mm,
    "addmm": torch.addmm, "flatten": torch.flatten, "dropout": F.dropout,
    "alpha_dropout": F.alpha_dropout, "feature_alpha_dropout": F.feature_alpha_dropout,
})  # fmt: skip
_ARITHMETIC = _of_methods_too({
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
})  # fmt: skip
_LAYERS: dict[Any, Function] = {
    nn.ReLU: F.relu, nn.Dropout: F.dropout, nn.Dropout1d: F.dropout1d, nn.Dropout2d: F.dropout2d,
    nn.Dropout3d: F.dropout3d, nn.AlphaDropout: F.alpha_dropout,
    nn.FeatureAlphaDropout: F.feature_alpha_dropout,
}  # fmt: skip
_SPELLINGS = _FUNCTIONS | _ARITHMETIC | _LAYERS
# Builtins have no signature that Python could read: of most, torch knows one for their overrides.
_BUILTINS = {F.linear, *_CONVS, torch.flatten, torch.movedim, torch.t, torch.transpose}
_POSITIONAL = {*_BUILTINS, *_LAYERS.values(), F.batch_norm}
_KEYWORDS = {"axis0": "dim0", "axis1": "dim1", "train": "training"}  # of swapaxes, torch.dropout


def spell(module: fx.GraphModule) -> None:
    """Bring every node of a captured graph to its one spelling."""
    rules = (
        _function, _arithmetic, _layer, _positional, _permute, _stochastic_depth, affine_as_module,
        norm_as_module,
    )  # fmt: skip
    for node in list(module.graph.nodes):
        for rule in rules:
            rule(node)
    for node in reversed(module.graph.nodes):
        if node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)


def spelled(target: Any) -> Any:
    """Return what a captured graph calls for a function, a module's class or a method's name."""
    return _SPELLINGS.get(target, target)


def _call(node: fx.Node, target: Function, *args: Any) -> None:
    """Turn a node, in place, into a call of a function with positional arguments."""
    node.op, node.target = "call_function", target
    node.args, node.kwargs = args, {}
    node.meta.pop("is_wrapped", None)  # the mark was of the function called before


def _function(node: fx.Node) -> None:
    function = callee(node)
    if function in ("relu_", torch.relu_):
        _call(node, F.relu, *node.args, *node.kwargs.values(), True)
    elif function in _FUNCTIONS and not (function == "addmm" and len(node.args) > 3):  # beta first
        node.op, node.target = "call_function", _FUNCTIONS[function]
    elif function is getattr and node.args[1] == "mT":
        _call(node, torch.transpose, node.args[0], -2, -1)
    elif function is getattr and node.args[1] == "T" and _is_tensor(node.args[0], 2):
        _call(node, torch.t, node.args[0])  # the same at every rank that .T is meant for


def _is_tensor(value: Any, most_dimensions: int = 64) -> bool:
    fact = value.meta.get("fact") if isinstance(value, fx.Node) else None
    tensor = getattr(fact, "value", None)
    return isinstance(tensor, torch.Tensor) and tensor.dim() <= most_dimensions


def _is_number(node: fx.Node) -> bool:
    """Return whether a value is surely no tensor: without facts, a size or computed of sizes."""
    if "fact" in node.meta or not (reads := node.all_input_nodes):
        return "fact" in node.meta and not _is_tensor(node)
    name = node.args[1] if node.target is getattr else node.target
    is_size = name in ("dim", "ndim", "numel", "shape", "size")
    return is_size or (home_of(node) == "_operator" and all(map(_is_number, reads)))


def _arithmetic(node: fx.Node) -> None:
    """Turn a sum or product, by function or method, into an operator; `add` of a set is none."""
    function = _ARITHMETIC.get(callee(node))
    if function is None or (node.op == "call_method" and not _is_tensor(node.args[0])):
        return
    if all(map(_is_number, node.all_input_nodes)):
        return  # torch makes a tensor of numbers
    args = named_arguments(node, ("input", "other"))
    if len(args) == len(node.args) + len(node.kwargs) == 2 and args.keys() == {"input", "other"}:
        _call(node, function, args["input"], args["other"])


def _layer(node: fx.Node) -> None:
    kind = callee(node)
    if node.op != "call_module" or kind is None or not is_of_torch(kind):
        return
    if not node.args and set(node.kwargs) == {"input"}:
        node.args, node.kwargs = (node.kwargs["input"],), {}
    if kind in _LAYERS:
        module = module_of(node)
        settings = () if kind is nn.ReLU else (float(module.p), module.training)
        _call(node, _LAYERS[kind], *node.args, *settings, module.inplace)


@cache
def _parameters(function: Function) -> dict[str, Any]:
    """Return the names of a function's parameters and their defaults, `...` where there is none."""
    overrides = get_testing_overrides() if function in _BUILTINS else {}
    parameters = inspect.signature(overrides.get(function, function)).parameters.values()
    return {p.name: ... if p.default is p.empty else p.default for p in parameters}


def _positional(node: fx.Node) -> None:
    if node.op != "call_function" or node.target not in _POSITIONAL:
        return
    parameters = _parameters(node.target)
    args = dict(zip(parameters, node.args, strict=False))
    args |= {_KEYWORDS.get(name, name): value for name, value in node.kwargs.items()}
    complete = parameters | args
    if len(complete) == len(parameters) and ... not in complete.values():
        _call(node, node.target, *complete.values())


def _permute(node: fx.Node) -> None:
    if callee(node) is not torch.permute:
        return
    args: Any = *node.args, *(node.kwargs[k] for k in ("input", "dims") if k in node.kwargs)
    source, *order = args
    if len(order) == 1 and isinstance(order[0], list | tuple):
        order = list(order[0])
    if len(order) == 1 and isinstance(order[0], fx.Node):
        return  # a list of axes that is computed, or one axis: torch.permute takes both
    axes = (axis % len(order) if isinstance(axis, int) else axis for axis in order)
    _call(node, torch.permute, source, tuple(axes))


def _stochastic_depth(node: fx.Node) -> None:
    """Turn torchvision's, known by its name, into a dropout; both return their input here."""
    home = getattr(callee(node), "__module__", "")
    args = named_arguments(node, ("input", "p", "mode", "training"))
    if home == "torchvision.ops.stochastic_depth" and args.get("training") is False:
        _call(node, F.dropout, args["input"], args["p"], False, False)


def from_aten(graph: fx.Graph) -> None:
    """Replace, in place, each overload that stands for a function of torch by that function."""
    for node in list(graph.nodes):
        if node.target in _REWRITES:
            _REWRITES[node.target](node)


def _overload(node: fx.Node) -> None:
    function = _OVERLOADS[node.target]
    if not (node.kwargs and function.__module__ == "_operator"):  # x.add_(y, alpha=2) is no +=
        node.target = function


def _dropout(node: fx.Node) -> None:
    if node.args[2] is False:
        _call(node, F.dropout, *node.args[:2], False, False)


def _batch_norm(node: fx.Node) -> None:
    source, weight, bias, mean, variance, *settings = node.args
    _call(node, F.batch_norm, source, mean, variance, weight, bias, *settings[:3])


def _batch_norm_no_training(node: fx.Node) -> None:
    """Turn it into F.batch_norm, if none of the statistics that it returns too is read."""
    results = list(node.users)
    if any(result.target is not operator.getitem or result.args[1] != 0 for result in results):
        return
    node.args = (*node.args[:5], False, *node.args[5:])
    _batch_norm(node)
    for result in results:
        result.replace_all_uses_with(node)
        node.graph.erase_node(result)


def _convolution(node: fx.Node) -> None:
    source, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed is False and isinstance(stride, list | tuple) and 0 < len(stride) < 4:
        function = getattr(F, f"conv{len(stride)}d")
        _call(node, function, source, weight, bias, stride, padding, dilation, groups)


def _index_put(node: fx.Node) -> None:
    """Turn y.index_put_([mask], number) into y[mask] = number; who read the result reads y."""
    args: Any = node.args
    target, index, value, *accumulate = args
    # A scalar that the model's code wrote out.
    is_literal = getattr(value, "target", None) is aten.lift_fresh_copy.default
    constant = value.args[0] if is_literal else None
    tensor = attribute_of(constant) if is_attribute(constant) else None
    if tensor is None or tensor.dim() or len(index) != 1 or index[0] is None or any(accumulate):
        return
    node.replace_all_uses_with(target)
    _call(node, operator.setitem, target, index[0], tensor.item())


# Each takes the positional arguments of the function of its name, in the same order.
_OF_ONE_NAME = """
    add.Tensor addmm.default cat.default clone.default conv1d.default conv1d.padding conv2d.default
    conv2d.padding conv3d.default conv3d.padding div.Tensor flatten.using_ints matmul.default
    mm.default movedim.int movedim.intlist mul.Tensor permute.default relu.default relu_.default
    softmax.int sub.Tensor swapaxes.default t.default transpose.int where.self
"""
_OVERLOADS: dict[Any, Function] = {
    **{operator.attrgetter(name)(aten): getattr(torch, name.partition(".")[0])
       for name in _OF_ONE_NAME.split()},
    aten.linear.default: F.linear, aten.add_.Tensor: operator.iadd, aten.sub_.Tensor: operator.isub,
    aten.mul_.Tensor: operator.imul, aten.div_.Tensor: operator.itruediv,
}  # fmt: skip
_OF_DROPOUT = [
    getattr(aten, f"{kind}dropout{end}").default
    for kind in ("", "feature_", "alpha_", "feature_alpha_")
    for end in ("", "_")
]
_REWRITES: dict[Any, Callable[[fx.Node], None]] = {
    **dict.fromkeys(_OVERLOADS, _overload),
    **dict.fromkeys(_OF_DROPOUT, _dropout),
    aten.batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm_no_training,
    aten.convolution.default: _convolution,
    aten.index_put_.default: _index_put,
    # of values whose dtype and device are guarded
    aten._assert_tensor_metadata.default: lambda node: node.graph.erase_node(node),
}
