"""The parts of straight-line code that an engine or a library of kernels may take over.

A region is a run of functions that make finite numbers of moderate ones, also one after another,
and holds at least one product. Between them stands only what neither reads their results nor writes
what they read. All else stays: a kernel that makes a number of NaN does no harm where none arises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.utils.fuser_utils import erase_nodes, fuse_as_graphmodule, insert_subgm
from torch.utils import _pytree as pytree

from optimizer.core.node import attribute_of, is_attribute, name_of_call, named_arguments

CONVOLUTIONS = {"conv2d": 2, "conv3d": 3}  # of so many dimensions, which channels_last is for
WEIGHTED = CONVOLUTIONS.keys() | {
    "conv1d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear",
    "matmul", "bmm", "scaled_dot_product_attention",
}  # fmt: skip
# Each element of the result is that of one or two values, or the largest of some of one.
POINTWISE = frozenset((
    "relu", "hardtanh", "clamp", "hardswish", "hardsigmoid", "sigmoid", "silu", "gelu", "tanh",
    "elu", "leaky_relu", "add", "mul", "max_pool2d", "max_pool3d",
))  # fmt: skip
_COMPUTED = POINTWISE | {
    "sub", "rsub", "neg", "div", "mish", "softmax", "batch_norm", "layer_norm", "group_norm",
    "linalg_vector_norm", "clamp_min", "mean", "sum", "amax", "pow", "rsqrt", "sqrt", "addcmul",
    "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "where",
}  # fmt: skip
ENLARGED = frozenset((
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
))  # fmt: skip
MOVED = frozenset((
    "cat", "chunk", "clone", "contiguous", "expand", "flatten", "getitem", "index", "narrow",
    "permute", "reshape", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
))  # fmt: skip
KNOWN = WEIGHTED | _COMPUTED | ENLARGED | MOVED | {"pad", "roll", "stack"}
_BOUNDED = frozenset(("hardsigmoid", "layer_norm", "group_norm", "sigmoid", "softmax", "tanh"))
LARGEST = 2.0**32  # of what is moderate
_BITS, _MOST_BITS = 32, 96  # of such a number, and of all before layers may amplify it to 2**128
_DTYPES = (torch.float32, torch.bool)  # in which it is known what that leads to
_LANE = 16  # numbers in a long vector: OpenVINO ends the process at an RMSNorm of fewer
_SMALLEST = 1e-12  # that keeps a norm of equal values from a division by zero


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return what an operator of ATen is called with, by name, with the defaults of its schema."""
    target: Any = node.target
    defaults = {each.name: each.default_value for each in target._schema.arguments}
    return named_arguments(node, defaults)


def constant_weight(node: fx.Node) -> fx.Node | None:
    """Return the node of the weight of a Linear or convolution, if that is one constant."""
    dimensions = {"linear": 0, **CONVOLUTIONS}.get(name_of_call(node))
    if dimensions is None:
        return None
    args = arguments_of(node)
    read, padding = args["weight"], args.get("padding")
    constant = is_attribute(read) and attribute_of(read).dim() == dimensions + 2
    return read if constant and not isinstance(padding, str) else None


def convolutions_of(module: fx.GraphModule) -> list[fx.Node]:
    """Return the convolutions in the code."""
    return [node for node in module.graph.nodes if name_of_call(node) in CONVOLUTIONS]


def extract_regions(outer: fx.GraphModule) -> None:
    """Replace each region by a call of a GraphModule of its own, with the constants it reads."""
    for place, nodes in enumerate(list(_regions(outer.graph))):
        read = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if is_attribute(a))
        constants, inside = [], set(nodes)
        for each in read:
            with outer.graph.inserting_before(nodes[0]):
                constants.append(outer.graph.node_copy(each))
            each.replace_all_uses_with(constants[-1], inside.__contains__)
        region, inputs, outputs = fuse_as_graphmodule(
            outer, [*constants, *nodes], f"region_{place}", always_return_tuple=True
        )
        insert_subgm(outer, region, inputs, outputs, nodes[-1])
        # The call looks up no constant that its region alone reads: of 128, that took 0.1 ms.
        erase_nodes(outer, [*(each for each in read if not each.users), *constants, *nodes])


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the runs with weights, without what moves or enlarges at their ends."""
    ends = MOVED | ENLARGED  # to enlarge DeepLab's answer takes OpenVINO 3 ms of 23 more than torch
    run: dict[fx.Node, float] = {}  # and how many bits the values of each may take
    for node in graph.nodes:
        if node.op in ("get_attr", "placeholder"):
            continue
        is_part = name_of_call(node) == "getitem" and node.args[0] not in run  # of a tuple outside
        is_moderate = _is_moderate(node) and not is_part
        read = (each for inside in run for each in inside.all_input_nodes)
        may_write = node.meta["aliased"] and any(each.meta["aliased"] for each in read)
        if not (is_moderate or may_write) and run.keys().isdisjoint(node.all_input_nodes):
            continue  # the region is called after it
        if not is_moderate or _bits_of_result(node, run) > _MOST_BITS:
            inner = [place for place, each in enumerate(run) if name_of_call(each) not in ends]
            if any(name_of_call(each) in WEIGHTED for each in run):
                yield list(run)[inner[0] : inner[-1] + 1]
            run = {}
        if is_moderate:
            run[node] = _bits_of_result(node, run)


def _is_moderate(node: fx.Node) -> bool:
    """Return whether a node makes finite numbers of all that are finite and not huge."""
    name, made = name_of_call(node), getattr(node.meta.get("val"), "dtype", torch.bool)
    is_place = not (made.is_floating_point or made == torch.bool)  # as in a cache
    if name not in KNOWN or node.meta["aliased"] or is_place:
        return False
    leaves = pytree.tree_leaves((node.args, node.kwargs)) if name not in MOVED else []
    numbers = [each for each in leaves if isinstance(each, float | int)]
    if not all(abs(each) <= LARGEST for each in numbers):  # nor NaN
        return False
    return name not in _ONLY_WHERE or _ONLY_WHERE[name](arguments_of(node))


def _keeps_from_zero(divisor: Any) -> bool:
    """Return whether a divisor is at least so large that no number becomes huge, or NaN."""
    if not isinstance(divisor, fx.Node):
        return bool(abs(divisor) >= 1 / LARGEST)
    if name_of_call(divisor) in ("expand", "sqrt"):
        return _keeps_from_zero(divisor.args[0])
    if name_of_call(divisor) not in ("add", "clamp_min"):
        return False
    value, least, *alpha = arguments_of(divisor).values()
    enough = isinstance(least, float) and least >= _SMALLEST and alpha in ([], [1])
    is_norm = bool(_path_to_norm(value, ("expand", "mean", "sum")))  # so not below zero
    return enough and (name_of_call(divisor) == "clamp_min" or is_norm)


def _bits_of_result(node: fx.Node, run: Mapping[fx.Node, float]) -> float:
    """Return the logarithm of the largest number that a node makes, but for what weights do.

    The numbers that enter a run have as many as a moderate one.
    """

    def bits(value: Any) -> float:
        if not isinstance(value, fx.Node):
            return math.log2(max(1.0, abs(value)))
        is_mask = getattr(value.meta.get("val"), "dtype", None) == torch.bool
        return 0.0 if is_mask or is_attribute(value) else run.get(value, _BITS)

    name, leaves = name_of_call(node), pytree.tree_leaves((node.args, node.kwargs))
    kinds = fx.Node if name in WEIGHTED | MOVED | ENLARGED else fx.Node | float | int
    operands = [bits(each) for each in leaves if isinstance(each, kinds)]
    if name in _BOUNDED or _is_normalized(node):
        return 0.0
    if name == "div":
        value, divisor, *_ = arguments_of(node).values()
        return bits(value) + (_BITS if isinstance(divisor, fx.Node) else bits(1 / divisor))
    if name == "scaled_dot_product_attention":  # means of values, by what scores make
        query, key, mean = map(bits, node.args[:3])
        return query + key if query + key > _MOST_BITS else mean
    if name in WEIGHTED or name in ("addcmul", "mul"):
        return sum(operands)
    return max(operands, default=_BITS) * (2 if name == "pow" else 1)


def _is_normalized(node: fx.Node) -> bool:
    """Return whether a value is divided by its own norm, or multiplied with the inverse."""
    if name_of_call(node) not in ("div", "mul"):
        return False
    first, second, *_ = arguments_of(node).values()
    if name_of_call(node) == "div":
        return _is_norm_of(first, second)
    pairs = [p for p in ((first, second), (second, first)) if name_of_call(p[1]) == "rsqrt"]
    return any(_is_norm_of(value, inverse.args[0]) for value, inverse in pairs)


def _is_norm_of(value: Any, divisor: Any) -> bool:
    path = _path_to_norm(divisor, ("add", "clamp_min", "expand", "mean", "sqrt", "sum"))
    # Of a lower rank, it may be the norm of other rows; a sum with another value is no norm.
    ranks = ([each.meta["val"].dim() for each in node.all_input_nodes] for node in path)
    aligned = (rank == [value.meta["val"].dim()] for rank in ranks)
    return bool(path) and path[-1].args[0] is value and all(aligned)


def _path_to_norm(value: Any, through: Sequence[str]) -> list[fx.Node]:
    """Return the calls from a value back to the norm or square that it is made of, if it is."""
    path = []
    while name_of_call(value) in through:
        path.append(value)
        value = value.args[0]
    return [*path, value] if name_of_call(value) in ("linalg_vector_norm", "pow") else []


def _is_outside(mask: fx.Node | None) -> bool:
    """Return whether no mask is made inside: an engine asks outside if each query has a key."""
    if mask is None or is_attribute(mask):
        return True
    source = mask.args[0] if name_of_call(mask) == "expand" else mask  # a number may be huge
    return mask.meta["val"].dtype == torch.bool and name_of_call(source) not in KNOWN


_NORMS, _MEANS = ("batch_norm", "group_norm", "layer_norm"), ("avg_pool2d", "avg_pool3d")
_ONLY_WHERE: dict[str, Callable[[dict[str, Any]], bool]] = {
    **dict.fromkeys(_NORMS, lambda args: args["eps"] >= _SMALLEST),
    **dict.fromkeys(_MEANS, lambda args: args["divisor_override"] is None),  # OpenVINO lacks it
    "div": lambda args: not args.get("rounding_mode") and _keeps_from_zero(args["other"]),
    "index": lambda args: all(i is None or is_attribute(i) for i in args["indices"]),
    "mean": lambda args: (
        name_of_call(args["self"]) != "pow" or args["self"].meta["val"].shape[-1] >= _LANE
    ),
    "pad": lambda args: args["mode"] in ("constant", "reflect"),
    "pow": lambda args: args["exponent"] == 2,
    "rsqrt": lambda args: _keeps_from_zero(args["self"]),
    "scaled_dot_product_attention": lambda args: (  # of constants, OpenVINO answers wrongly
        not any(map(is_attribute, (args["key"], args["value"]))) and _is_outside(args["attn_mask"])
    ),
    "sqrt": lambda args: _keeps_from_zero(args["self"]),
    "where": lambda args: "index_copy" in map(name_of_call, args["condition"].all_input_nodes),
}


def makes_no_nan(region: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether a region is one of float32 and masks on the CPU, with moderate constants."""
    read = region.graph.find_nodes(op="get_attr")
    weights = [attribute_of(n) for n in read if any(name_of_call(u) != "index" for u in n.users)]
    in_float32 = all(each.is_cpu and each.dtype in _DTYPES for each in (*inputs, *weights))
    return in_float32 and all(map(is_moderate, weights))


def is_moderate(tensor: torch.Tensor) -> bool:
    """Return whether values are finite and not huge; of a mask, whether each query has a key."""
    if tensor.dtype == torch.bool:
        return bool(tensor.any(-1).all())
    return bool(torch.linalg.vector_norm(tensor).item() <= LARGEST)


def for_moderate(region: fx.GraphModule, program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a region that runs by a program that may lose NaN, for moderate inputs alone.

    Kernels make 0 of NaN in a ReLU. A norm is beyond the bound where an element is NaN, infinite
    or huge; of others, which a region makes only finite numbers of, a product with a float32
    weight overflows only where layers amplify 10^28-fold.
    """
    run, run_region = as_function(program), as_function(region)
    return lambda *inputs: (run if all(map(is_moderate, inputs)) else run_region)(*inputs)


def as_function(module: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a module computes with the weights and submodules that it has now, without hooks.

    A call through a module looks its parts up by failing accesses: after a forward, whose data
    filled the caches, three modules within one another took 0.25 ms of mobilenet_v3_large's call.
    """
    if not isinstance(module, fx.GraphModule):
        return module.forward if isinstance(module, nn.Module) else module
    attributes = vars(module) | module._parameters | module._buffers
    parts = {name: each for name, each in module._modules.items() if each is not None}
    attributes |= {name: as_function(each) for name, each in parts.items()}
    return functools.partial(type(module).forward, SimpleNamespace(**attributes))
