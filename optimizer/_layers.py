"""Layers that a forward calls as functions on tensors of the model, as calls of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer._facts import Refused, is_read_only, rank, rely_on_asked
from optimizer._graph import attribute_of, callee, fresh_name, is_attribute, owner

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
    stem = path.rpartition(".")[0].replace(".", "_") or node.name
    name = fresh_name(root, stem)
    root.add_submodule(name, module)
    node.op, node.target, node.args, node.kwargs = "call_module", name, (source,), {}
