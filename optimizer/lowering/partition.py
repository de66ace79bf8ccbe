"""The parts of straight-line code that an engine or a library of kernels may take over.

A region is a run of consecutive functions that make finite numbers of moderate ones, and holds at
least one product. Everything else stays as it is: a kernel that makes a number of NaN can do no
harm where no NaN can arise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import getitem
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from optimizer.core.node import attribute_of, is_attribute, named_arguments

CONVOLUTIONS = {"conv2d": 2, "conv3d": 3}  # of so many dimensions, which channels_last is for
CONVOLUTION = {"input": None, "weight": None, "bias": None} | {
    "stride": 1, "padding": 0, "dilation": 1, "groups": 1
}  # fmt: skip
LINEAR = {"input": None, "weight": None, "bias": None}
ATTENTION = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0,
    "is_causal": False, "scale": None, "enable_gqa": False,
}  # fmt: skip
WEIGHTED = CONVOLUTIONS.keys() | {
    "conv1d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear",
    "matmul", "__matmul__", "bmm", "scaled_dot_product_attention",
}  # fmt: skip
# Each element of the result is that of one or two values, or the largest of some of one.
POINTWISE = frozenset((
    "relu", "relu6", "hardtanh", "clamp", "hardswish", "hardsigmoid", "sigmoid", "silu", "gelu",
    "tanh", "elu", "leaky_relu", "add", "__add__", "__radd__", "mul", "__mul__", "__rmul__",
    "max_pool2d", "max_pool3d",
))  # fmt: skip
_COMPUTED = POINTWISE | {  # no group_norm: OpenVINO 2025.4.1 ends the process at a sum of one
    "sub", "__sub__", "neg", "div", "__truediv__", "mish", "softmax",
    "batch_norm", "layer_norm", "normalize",
    "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "mean", "sum", "amax",
}  # fmt: skip
MOVED = frozenset((
    "cat", "chunk", "split", "getitem", "__getitem__", "reshape", "view", "flatten", "squeeze",
    "unsqueeze", "transpose", "permute", "contiguous", "dropout", "getattr", "interpolate",
    "swapaxes", "swapdims", "movedim", "channel_shuffle", "unbind",
))  # fmt: skip
_PLACED = frozenset((
    "pad", "roll", "expand", "expand_as", "stack", "unflatten", "reshape_as", "view_as",
))  # fmt: skip
# How these work, of what every engine knows: an operator that one lacks would cost the region.
_INTERPOLATE = {"input": None, "size": None, "scale_factor": None, "mode": "nearest"} | {
    "align_corners": None, "recompute_scale_factor": None, "antialias": False,
}  # fmt: skip
_PAD = {"input": None, "pad": None, "mode": "constant", "value": None}
_POOL = {"input": None, "kernel_size": None, "stride": None, "padding": 0} | {
    "ceil_mode": False, "count_include_pad": True, "divisor_override": None,
}  # fmt: skip
_KNOWN_TO_ENGINES: dict[str, tuple[dict[str, Any], str, tuple[Any, ...]]] = {
    "interpolate": (_INTERPOLATE, "mode", ("nearest", "linear", "bilinear", "trilinear")),
    "pad": (_PAD, "mode", ("constant", "reflect")),
    "avg_pool2d": (_POOL, "divisor_override", (None,)),
    "avg_pool3d": (_POOL, "divisor_override", (None,)),
}
LARGEST = 2.0**32  # of what is moderate
_EPSILON = {"layer_norm": 4, "batch_norm": 7, "normalize": 3}  # its place
_SMALLEST = 1e-12  # that keeps a norm of equal values from a division by zero


def name_of(node: fx.Node) -> str:
    """What a node calls, however it is spelled."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def constant_weight(node: fx.Node) -> fx.Node | None:
    """What reads the weight of a Linear layer or convolution, if that is one constant."""
    dimensions = {"linear": 0, **CONVOLUTIONS}.get(name_of(node))
    if dimensions is None:
        return None
    given = named_arguments(node, CONVOLUTION if dimensions else LINEAR)
    read, padding = given["weight"], given.get("padding")
    constant = is_attribute(read) and attribute_of(read).dim() == dimensions + 2
    return read if constant and not isinstance(padding, str) else None


def per_dimension(sizes: int | Sequence[int], dimensions: int) -> tuple[int, ...]:
    """One size for each dimension of an image; a single one counts for all."""
    several = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return several * dimensions if len(several) == 1 else several


def convolutions_of(module: fx.GraphModule) -> list[fx.Node]:
    """The convolutions in the code."""
    return [node for node in module.graph.nodes if name_of(node) in CONVOLUTIONS]


def extract_layers(outer: fx.GraphModule) -> None:
    """Make of each run of layers and what is between them a GraphModule that the code calls."""
    for place, nodes in enumerate(list(_regions(outer.graph))):
        extract(outer, nodes, f"region_{place}")


def _regions(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    run: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("get_attr", "placeholder"):
            continue
        if _is_moderate(node):
            run.append(node)
            continue
        yield from _trimmed(run)
        run = []


def _is_moderate(node: fx.Node) -> bool:
    """Whether it makes finite numbers of all finite numbers that are not huge."""
    name = name_of(node)
    if name not in WEIGHTED | _COMPUTED | MOVED | _PLACED:
        return False
    numbers = [abs(each) for each in _numbers(node)]
    if not all(each <= LARGEST for each in numbers):  # nor NaN
        return False
    if name in ("div", "__truediv__"):
        return not node.kwargs and bool(numbers) and min(numbers) >= 1 / LARGEST
    if name in _EPSILON:
        given = node.kwargs.get("eps", (*node.args, *[1e-5] * 8)[_EPSILON[name]])
        return isinstance(given, float) and given >= _SMALLEST
    if name in _KNOWN_TO_ENGINES:
        parameters, parameter, known = _KNOWN_TO_ENGINES[name]
        given = named_arguments(node, parameters)
        return given[parameter] in known and not given.get("antialias")
    if name == "scaled_dot_product_attention":
        mask = named_arguments(node, ATTENTION)["attn_mask"]
        return mask is None or is_attribute(mask)
    return True


def _numbers(node: fx.Node) -> list[float]:
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [each for each in leaves if isinstance(each, float | int)]


def _trimmed(run: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """The run without the moves at its ends; nothing if it has no weights."""
    kept = [place for place, node in enumerate(run) if name_of(node) not in MOVED]
    if any(name_of(node) in WEIGHTED for node in run):
        yield run[kept[0] : kept[-1] + 1]


def extract(outer: fx.GraphModule, nodes: Sequence[fx.Node], name: str) -> None:
    """Put nodes into a module of their own, with the constants that they read."""
    inside = dict.fromkeys(nodes)
    constants = dict.fromkeys(a for n in nodes for a in n.all_input_nodes if is_attribute(a))
    own = inside | constants
    inputs = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in own))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"input_{place}") for place, node in enumerate(inputs)}
    copies |= {node: graph.get_attr(str(node.target)) for node in constants}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    outer.add_submodule(name, fx.GraphModule(outer, graph))
    with outer.graph.inserting_after(nodes[-1]):
        call = outer.graph.call_module(name, tuple(inputs))
    for place, node in enumerate(outputs):
        with outer.graph.inserting_after(call):
            item = outer.graph.call_function(getitem, (call, place))
        node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        outer.graph.erase_node(node)
