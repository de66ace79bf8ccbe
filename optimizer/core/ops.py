"""What is known of torch's functions by name: which write in place, and as what.

For `x += y` `operator.iadd` will not do: fx prints it as the statement `a += b`, which rebinds the
variable `a`, and a later reader of `a` would see the new value also where `a` is an integer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LINEAR_LAYERS = (
    nn.Linear, *CONVOLUTIONS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
PERMUTATIONS = (torch.permute, torch.transpose, torch.t, torch.movedim)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def recordable(
    function: Callable[Parameters, Result], operands: int | None = None
) -> Callable[Parameters, Result]:
    """Return the same function, whose calls tracers and modes see as they do those of torch's.

    Only the first `operands` are asked if they are traced: to ask a dtype takes half a microsecond.
    """

    @wraps(function)
    def apply(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if has_torch_function(args[:operands]):
            result: Result = handle_torch_function(apply, args[:operands], *args, **kwargs)
            return result
        return function(*args, **kwargs)

    return apply


def _operator(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    apply = recordable(function)
    apply.__module__ = __name__  # where fx and pickle are to find it
    return apply


INPLACE_OPERATORS = tuple(map(_operator, (
    operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift, operator.imatmul,
    operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift, operator.isub,
    operator.itruediv, operator.ixor,
)))  # fmt: skip
(
    iadd, iand, ifloordiv, ilshift, imatmul, imod, imul, ior, ipow, irshift, isub, itruediv, ixor,
) = INPLACE_OPERATORS  # fmt: skip


def _over_an_operand(
    function: Callable[[Any, Any], Any], in_place: Callable[[Any, Any], Any]
) -> Callable[[Any, Any, int], Any]:
    """Return a commutative function that overwrites an operand if both are laid out alike."""

    def apply(first: Any, second: Any, overwritten: int) -> Any:
        if not (isinstance(first, Tensor) and isinstance(second, Tensor) and alike(first, second)):
            return function(first, second)  # a number, in another call
        return in_place(second, first) if overwritten else in_place(first, second)

    apply.__name__ = apply.__qualname__ = f"{function.__name__}_over"
    return recordable(apply)


def alike(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the dtype, shape and layout that their sum has."""
    same = first.dtype == second.dtype and first.shape == second.shape
    return same and first.stride() == second.stride()


@recordable
def where_into(mask: Any, value: Any, other: Any, *, out: Any) -> Any:
    """Do as `torch.where`, but take `out` also where gradients are recorded."""
    if torch.is_grad_enabled() and (value.requires_grad or other.requires_grad):
        return out.copy_(torch.where(mask, value, other))
    return torch.where(mask, value, other, out=out)


@recordable
def where_like(mask: Any, value: Any, other: Any) -> Any:
    """Do as `torch.where`, but lay the result out as `other`, not as the mask."""
    result = torch.where(mask, value, other)
    alike = result.stride() == other.stride()
    return result if alike else torch.empty_like(other).copy_(result)


add_over = _over_an_operand(operator.add, Tensor.add_)
mul_over = _over_an_operand(operator.mul, Tensor.mul_)


# These change the shape of a tensor that earlier nodes already hold.
CHANGES_SHAPE = frozenset((
    "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_",
    "transpose_", "unsqueeze_",
))  # fmt: skip
# What a tensor says of itself without its data being read.
METADATA = frozenset((
    "__get__", "__len__", "__repr__", "__format__", "__hash__", "data_ptr", "detach", "dim",
    "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point",
    "is_same_size", "ndimension", "nelement", "numel", "requires_grad_", "size",
    "storage_offset", "stride", "type", "untyped_storage",
))  # fmt: skip
READS_DATA = frozenset((
    "__array__", "__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist",
))  # fmt: skip
FACTORIES: frozenset[Callable[..., Any]] = frozenset((
    torch.arange, torch.as_tensor, torch.asarray, torch.empty, torch.empty_strided, torch.eye,
    torch.full, torch.linspace, torch.logspace, torch.normal, torch.ones, torch.rand,
    torch.randint, torch.randn, torch.randperm, torch.scalar_tensor, torch.tensor,
    torch.tril_indices, torch.triu_indices, torch.zeros,
))  # fmt: skip
# What these make is not the same each time; what is empty holds what lay in memory.
RANDOM = (
    torch.empty, torch.empty_strided, torch.normal, torch.rand, torch.randint, torch.randn,
    torch.randperm,
)  # fmt: skip
# These return their input, or a copy where dtype, device or strides make them.
MAY_COPY = frozenset((
    "as_tensor", "asarray", "bfloat16", "bool", "byte", "cdouble", "cfloat", "chalf", "char",
    "conj_physical", "contiguous", "cpu", "cuda", "dequantize", "double", "flatten", "float",
    "half", "int", "long", "ravel", "reshape", "reshape_as", "resolve_conj", "resolve_neg",
    "short", "sum_to_size", "to", "type", "type_as",
))  # fmt: skip
# Modules that take a tensor, and make a new one.
MAKE_A_TENSOR = (nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase)
RETURN_A_TENSOR = (
    *MAKE_A_TENSOR, nn.LayerNorm, nn.GroupNorm, nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish,
    nn.Hardsigmoid, nn.Sigmoid, nn.Tanh, nn.Identity, nn.modules.dropout._DropoutNd,
    nn.modules.pooling._AvgPoolNd, nn.Flatten,
)  # fmt: skip


def writes(kind: str, target: Any) -> bool:
    """Return whether a node writes a tensor, by the name of what it calls."""
    method = kind == "call_method" and str(target).endswith("_") and not str(target).endswith("__")
    return method or target is operator.setitem or target in INPLACE_OPERATORS
