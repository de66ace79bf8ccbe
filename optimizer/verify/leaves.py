"""The parts of an answer that can be compared: tensors, numbers and texts, by their places.

Objects are opened: an array is its elements, a sparse tensor its indices and values, a
distribution or a dataclass its attributes. What has no parts and no equality of its own, such as
a generator or a function, cannot be compared.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

_ONE_OF_ITS_KIND = (
    type, type(None), type(...), enum.Enum, ModuleType, BuiltinFunctionType, torch.dtype,
    torch.layout, torch.memory_format, torch._ops.OpOverload,
)  # fmt: skip
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def leaves_of(value: Any) -> tuple[dict[str, Any], pytree.TreeSpec]:
    """Return the leaves of a tree by their places, and its structure, with every object opened."""
    found, structure = pytree.tree_flatten_with_path(_opened(value, ()))
    return {pytree.keystr(path): leaf for path, leaf in found}, structure


def incomparable(value: Any) -> Iterator[str]:
    """Yield the place of each leaf of which equality says nothing, and what is there."""
    for place, leaf in leaves_of(value)[0].items():
        if says_nothing(leaf):
            yield f"{place} is a {type(leaf).__name__}, which cannot be compared"
        elif _is_nan(leaf):
            yield f"{place} is NaN everywhere, which hides what differs: pass other example inputs"


def _is_nan(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.element_size() == 1 or not leaf.numel():
        return False
    return not (leaf == leaf).any()  # which NaN alone is not


def says_nothing(leaf: Any) -> bool:
    """Return whether a leaf is equal to itself alone, and made anew in each call."""
    equality: Any = type(leaf).__eq__
    by_identity = equality is object.__eq__ and not isinstance(leaf, _ONE_OF_ITS_KIND)
    return by_identity and not isinstance(leaf, torch.Tensor)


def _opened(value: Any, around: tuple[int, ...]) -> Any:
    def opened(leaf: Any) -> Any:
        if id(leaf) in around:
            return f"what holds it, {len(around) - around.index(id(leaf))} up"
        parts = _parts(leaf)
        return leaf if parts is None else {type(leaf).__name__: _opened(parts, (*around, id(leaf)))}

    return pytree.tree_map(opened, value)


def _parts(leaf: Any) -> dict[str, Any] | None:
    """Return what a leaf consists of; None where it is one thing."""
    if isinstance(leaf, torch.Tensor):
        return _parts_of_tensor(leaf)
    if type(leaf).__module__ == "numpy":
        return _parts_of_array(leaf)
    if isinstance(leaf, (FunctionType, *_ONE_OF_ITS_KIND)):
        return None
    if is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name, None) for field in fields(leaf)}
    return dict(vars(leaf)) if hasattr(leaf, "__dict__") else None


def _parts_of_tensor(tensor: torch.Tensor) -> dict[str, Any] | None:
    if tensor.is_nested:  # it may have no shape
        return {"layout": str(tensor.layout), "rows": list(tensor.unbind())}
    common = {"shape": tuple(tensor.shape), "layout": str(tensor.layout)}
    if tensor.layout in _SPARSE:
        whole = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
        return common | {name: getattr(whole, name)() for name in _SPARSE[tensor.layout]}
    if tensor.is_quantized:
        return common | {"dtype": str(tensor.dtype), "values": tensor.dequantize()}
    if tensor.layout is not torch.strided:
        return common | {"values": tensor.to_dense()}
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that names its parts
        names, _ = tensor.__tensor_flatten__()
        return common | {name: getattr(tensor, name) for name in names}
    return None


def _parts_of_array(array: Any) -> dict[str, Any] | None:
    """Return a numpy array or number as a tensor, or as Python's objects where torch has none."""
    if not hasattr(array, "tolist"):
        return None
    try:
        values: Any = torch.as_tensor(array.copy())
    except TypeError:  # texts, dates, objects
        values = array.tolist()
    return {"dtype": str(array.dtype), "shape": array.shape, "values": values}
