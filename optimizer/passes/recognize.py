"""What is spelled out in several operators, and torch has as one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.nn import functional as F

from optimizer.core.errors import require
from optimizer.core.node import arg, attribute_of, callee, is_attribute, named_arguments, run_nodes
from optimizer.core.ops import PERMUTATIONS, alike, iadd, imul, isub, itruediv
from optimizer.facts.facts import fact, is_read_only, is_unchanged, rank, tensor
from optimizer.rewrite.contract import call, rewrite
from optimizer.rewrite.edit import erase_run, insert_function, insert_module

PRODUCTS = (
    operator.mul, imul, torch.mul, "mul", "mul_", operator.truediv, itruediv, torch.div, "div",
    "div_",
)  # fmt: skip
ARITHMETIC = frozenset((
    *PRODUCTS, operator.add, iadd, torch.add, "add", "add_", operator.sub, isub, torch.sub, "sub",
    "sub_", operator.pow, torch.pow, "pow", F.relu6, nn.ReLU6, F.hardtanh, nn.Hardtanh, torch.clamp,
    "clamp", "clamp_", torch.sigmoid, F.sigmoid, nn.Sigmoid, "sigmoid", "sigmoid_", torch.tanh,
    F.tanh, nn.Tanh, "tanh", "tanh_", F.hardsigmoid, nn.Hardsigmoid,
))  # fmt: skip
_MOST_CALLS = 12  # of a spelling
_PLACES = torch.tensor(
    [each / 4 + 0.03 for each in range(-33, 34)] + [-1e300, -1e30, -1e3, 1e3, 1e30, 1e300],
    dtype=torch.float64,
    device="cpu",
)
Native: TypeAlias = tuple[Callable[..., torch.Tensor], dict[str, str]]
_NATIVE: tuple[Native, ...] = (
    (F.silu, {}), (F.hardswish, {}), (F.hardsigmoid, {}), (F.gelu, {"approximate": "tanh"}),
)  # fmt: skip
_THERE = torch.stack([function(_PLACES, **settings) for function, settings in _NATIVE])
MATMULS = (operator.matmul, torch.matmul)
SOFTMAXES = (torch.softmax, F.softmax, nn.Softmax, "softmax")
MASKS = (operator.add, torch.masked_fill, torch.where, "masked_fill", "where")
MOST_IN_HALF = 1 << 14  # scores


@rewrite(call(*PRODUCTS, name="root"), numerics="rounding", phase="simplify")
def recognize_activations(root: fx.Node) -> fx.Node | None:
    """Call the operator of torch that computes in one step what is spelled out in several.

    x * sigmoid(x) -> silu(x), and so hardswish, hardsigmoid and gelu, however they are written.

    Every call between x and the result computes with x and numbers only, and at many places x,
    small and large, all of it in float64 is what the operator makes of x, to the twelfth digit:
    both are the same function of x. None of what it makes is read elsewhere, and x, which the
    operator keeps for gradients, is not written later. The operators compute in float32 or better
    and round once; integers, which a spelling takes, they reject. GELU by erf is not among them:
    F.gelu of an x that has overflowed to +inf is NaN on CPUs in float32, where the spelling keeps
    +inf.
    """
    for x, inner in _readings(root):
        match = _native(root, x, inner)
        if match is None:
            continue
        function, settings = match
        _require_alone(root, inner, (x,))
        require(tensor(x).is_floating_point(), "its input is not floating point")
        result = function(tensor(x), **settings)
        require(alike(result, tensor(root)), "the result would differ in layout")
        native = insert_function(root, function, (x,), **settings)
        erase_run(root, inner)
        return native
    return None


def _readings(root: fx.Node) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """Yield each value that a call computes of, with numbers only, and the calls between."""
    inner, read = set[fx.Node](), {*root.all_input_nodes}
    while read and len(inner) < _MOST_CALLS:
        last = max(read)
        if len(read) == 1:
            yield last, inner
        if callee(last) not in ARITHMETIC:
            return
        inner, read = inner | {last}, read - {last} | {*last.all_input_nodes}


def _native(root: fx.Node, x: fx.Node, inner: set[fx.Node]) -> Native | None:
    """Return the operator that makes of `_PLACES` what a run of calls does, if one does."""
    *_, (_, value) = run_nodes(sorted({root, *inner}), {x: _PLACES.clone()})  # it may be written
    if value.dtype != _PLACES.dtype:  # multiplied with a complex number
        return None
    near = torch.isclose(value, _THERE, rtol=1e-12, atol=1e-12).all(1).tolist()
    return _NATIVE[near.index(True)] if any(near) else None


def _require_alone(root: fx.Node, inner: set[fx.Node], read: Sequence[fx.Node]) -> None:
    """Refuse if what `root` is computed of, or its input, is read or written elsewhere."""
    run = {root, *inner}
    alone = all(run.issuperset(node.users) for node in inner)
    alone &= all(arg(node, 0) in inner for node in run if fact(node).writes)
    require(alone, "what it computes on the way is read elsewhere")
    require(all(is_unchanged(each, min(inner)) for each in read), "its input is written later")


@rewrite(
    call(*MATMULS, args=(call(*SOFTMAXES, name="weights"),), name="root"),
    numerics="rounding",
    phase="simplify",
)
def recognize_attention(weights: fx.Node, root: fx.Node) -> fx.Node | None:
    """Call torch's attention, which never holds all scores at once, where it is spelled out.

    softmax(scale * q @ k.T) @ v -> scaled_dot_product_attention(q, k, v, scale=scale).

    A number that q, the transposed k or the scores are multiplied with scales the scores. None
    of what is computed on the way is read elsewhere. What it reads is not written after, nor its
    result, both of which torch's attention keeps for gradients. What matmul makes is contiguous,
    what torch's attention makes is laid out as q. A query whose scores are all -inf has NaN for a
    result in eager and zeros in torch's: a mask may do that and is refused; without one they have
    overflowed, or q or k is infinite. Timed on CPUs, it pays in four dimensions with heads of one
    size, in half precision where there are few scores.
    """
    scalings = list[tuple[Any, Any]]()
    scores = _unscaled(weights.all_input_nodes[0], scalings)
    require(callee(scores) not in MASKS, "a mask may hide all keys from a query")
    by_name = len(root.args) != 2 or len(getattr(scores, "args", ())) != 2
    if by_name or callee(scores) not in MATMULS or not isinstance(root.args[1], fx.Node):
        return None
    q, k = (_unscaled(each, scalings) for each in scores.args)
    read, inner = (q, k, root.args[1]), {weights, scores, *(each for each, _ in scalings)}
    require(all(rank(each) == 4 for each in read), "it has not four dimensions")
    settings = named_arguments(weights, ("input", "dim", "dtype"))
    if weights.op == "call_module":
        settings = {"dim": attribute_of(weights).dim}
    over_keys = settings.get("dim") in (-1, 3) and settings.get("dtype") is None
    require(over_keys, "its softmax is over another axis or dtype")
    _require_alone(root, inner, read)
    require(is_read_only(root), "its result is written")
    sizes, strides = zip(*((tensor(n).shape, tensor(n).stride()) for n in read), strict=True)
    dense = strides[0][3] == strides[1][2] == strides[2][3] == 1
    # Where one of (1, 1) is empty later, torch does not repeat q as matmul repeats both.
    alike = sizes[0][:2] == sizes[1][:2] == sizes[2][:2] != (1, 1) and sizes[0][3] == sizes[2][3]
    few = tensor(q).dtype.itemsize >= 4 or tensor(scores).numel() <= MOST_IN_HALF
    require(dense and alike and few, "torch has no faster kernel for it")
    scale = 1.0
    for scaling, number in scalings:
        if isinstance(number, fx.Node):
            q = insert_function(root, scaling.target, (q, number))
        else:
            scale = scaling.target(scale, number)
    k = insert_function(root, torch.transpose, (k, -2, -1))
    attended = insert_function(
        root, F.scaled_dot_product_attention, (q, k, root.args[1]), scale=scale
    )
    return insert_function(root, "contiguous", (attended,))


def _unscaled(node: Any, scalings: list[tuple[Any, Any]]) -> Any:
    """Return a value without the numbers that scale it; add the calls that do, and the numbers."""
    while callee(node) in (operator.mul, operator.truediv):
        value, number = node.args
        if node.target is operator.mul and not _is_number(number):
            value, number = number, value
        if not _is_number(number) or not isinstance(value, fx.Node):
            break
        scalings.append((node, number))
        node = value
    return node


def _is_number(value: Any) -> bool:
    """Return whether a value is one number in every call; a computed one comes from sizes."""
    if not isinstance(value, fx.Node):
        return type(value) in (int, float) and value != 0
    inputs = (each.meta["fact"].value for each in fact(value).inputs)
    sized = all(isinstance(each, torch.Tensor) for each in inputs)
    return sized and type(fact(value).value) in (int, float)


@rewrite(
    call(operator.matmul, torch.matmul, torch.mm, torch.addmm, name="product"),
    numerics="exact",
    phase="simplify",
)
def recognize_linear(product: fx.Node) -> fx.Node | None:
    """Call a product with a matrix of the model a Linear, which other passes fold into.

    x @ w.T -> Linear(x), b + x @ w.T -> Linear(x), for tensors w and b of the model.

    A Linear computes x @ weight.T, and on a matrix with a bias addmm, by these very kernels. So
    weight is the transpose of the right matrix: the model's own parameter if the forward
    transposes it, else a view with the strides of one. Nothing may write numbers that are shared.
    """
    terms: tuple[Any, ...] = product.args
    terms = terms if product.target is torch.addmm else (None, *terms)
    if len(terms) != 3 or not isinstance(terms[1], fx.Node):
        return None
    bias, source, right = terms
    moved = isinstance(right, fx.Node) and callee(right) in PERMUTATIONS
    matrix = arg(right, 0) if moved and right.all_input_nodes == [arg(right, 0)] else right
    if not (is_attribute(matrix) and (bias is None or is_attribute(bias))):
        return None
    require(not product.kwargs, "its terms are scaled, or the result is written elsewhere")
    param = attribute_of(matrix)
    require(param.dim() == 2, "the model's tensor is no matrix")
    weight = (param if right is matrix else right.target(param, *right.args[1:])).detach().t()
    if (weight.shape, weight.stride()) == (param.shape, param.stride()):
        weight = param  # the model's tensor, where it is the same view
    row = bias is None or attribute_of(bias).shape == weight.shape[:1]
    require(row, "what is added is no bias, one number for each output")
    require(all(is_read_only(n) for n in (matrix, bias) if n), "the forward may write the matrix")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta").eval()
    linear.weight = _parameter(weight, param)
    if bias is not None:
        linear.bias = _parameter(attribute_of(bias), attribute_of(bias))
    return insert_module(product, linear, (source,), f"{matrix.target}_linear", like=product)


def _parameter(value: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    """Return a parameter that asks for a gradient if `like` does: kernels are chosen by that."""
    return value if isinstance(value, nn.Parameter) else nn.Parameter(value, like.requires_grad)
