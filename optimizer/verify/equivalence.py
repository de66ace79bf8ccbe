"""Compare the answers of two modules, by an oracle that can tell rounding from a bug.

The parts of an answer are compared by their places. An array or a sparse tensor
is its elements, a distribution or a dataclass its attributes. What has no parts and no equality
of its own, such as a generator or a function, cannot be compared.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.core.context import forked_rng
from optimizer.core.copy import is_ordinary, structural_copy
from optimizer.core.errors import REJECTED, InputError, raised_as
from optimizer.core.inputs import Call, is_size, tensors_in
from optimizer.frontend.outside import Outside, restored

Function: TypeAlias = Callable[[torch.Tensor], Any]

# Largest difference, relative to the largest value of the output, that passes without a
# second look. Rounding in a deep network stays a hundredfold below; a wrong formula does not.
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDE = {float: torch.float64, complex: torch.complex128}
# How much further from the float64 answer than the original's a result may be.
_WORSE_THAN_EAGER = 4.0

_ONE_OF_ITS_KIND = (
    type, type(None), type(...), enum.Enum, ModuleType, BuiltinFunctionType, torch.dtype,
    torch.layout, torch.memory_format, torch._ops.OpOverload,
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What a call returned, what it left in its inputs, and whether it drew random numbers."""

    output: Any
    inputs: Any
    drawn: bool = False


@dataclass(frozen=True)
class Difference:
    """Where two answers differ, by how much relative to the largest value, and why it counts."""

    place: str
    error: float
    reason: str
    old: Any = field(default=None, repr=False, compare=False)
    new: Any = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class Twice(nn.Module):
    """Call a module twice, first under masks of ones: it may take another way, unless compiled."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return both outputs; the second call gets the inputs themselves."""
        first = Call(args, kwargs).copied().map(_without_gaps)
        return self.module(*first.args, **first.kwargs), self.module(*args, **kwargs)


def _without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    is_mask = not tensor.is_floating_point() and torch.equal(tensor, tensor.bool()) and tensor.any()
    return torch.ones_like(tensor) if is_mask else tensor


def answer(
    module: nn.Module,
    call: Call,
    *,
    is_pure: bool = False,
    share_parameters: bool = False,
    random: bool = True,
) -> Answer:
    """Call a copy of a module on copies of its inputs; neither is changed.

    What the user's own code changes outside the module is put back. If it `is_pure`, a call leaves
    nothing behind and needs no copy of it; a copy may `share_parameters` that no forward writes. A
    call that may draw `random` numbers gets the same ones as any other, and puts them back.
    """
    copied = module if is_pure else structural_copy(module, share_parameters=share_parameters)
    args, kwargs = call.copied()
    with torch.no_grad(), restored(Outside(copied)), ExitStack() as stack:
        has_drawn = stack.enter_context(forked_rng()) if random else bool
        return Answer(copied(*args, **kwargs), (args, kwargs), has_drawn())


def reference(model: nn.Module, call: Call, **options: bool) -> Answer:
    """Return the model's `answer`; raise an `InputError` if it rejects the inputs."""
    with raised_as(InputError, REJECTED.format("model itself")):
        return answer(model, call, **options)


def difference(expected: Answer, actual: Answer, *, exact: bool = False) -> Difference | None:
    """Return the first place where two answers differ by more than rounding, or None."""
    return next(_differences(expected, actual, exact=exact), None)


def largest_error(expected: Answer, actual: Answer) -> float:
    """Return the largest relative error of any output or input, be it rounding or not."""
    return max((each.error for each in _differences(expected, actual, exact=True)), default=0.0)


def _differences(expected: Answer, actual: Answer, *, exact: bool) -> Iterator[Difference]:
    pairs = ("output", expected.output, actual.output), ("input", expected.inputs, actual.inputs)
    for place, old, new in pairs:
        (old_leaves, old_structure), (new_leaves, new_structure) = leaves_of(old), leaves_of(new)
        if old_structure != new_structure:
            yield Difference(place, math.inf, "has another structure")
            return
        dtypes = {leaf.dtype for leaf in old_leaves.values() if isinstance(leaf, torch.Tensor)}
        # Python's numbers have the bound of the coarsest tensor beside them.
        coarsest = max((BOUNDS[dtype] for dtype in dtypes & BOUNDS.keys()), default=1e-4)
        bounds: dict[Any, float] = {} if exact else {**BOUNDS, float: coarsest, complex: coarsest}
        for (path, left), right in zip(old_leaves.items(), new_leaves.values(), strict=True):
            if part := _leaf_difference(place + path, left, right, bounds):
                yield part


def _leaf_difference(
    place: str, old: Any, new: Any, bounds: Mapping[Any, float]
) -> Difference | None:
    if type(old) in _WIDE and type(old) is type(new):
        first, second = torch.tensor([old, new], dtype=_WIDE[type(old)])
        return _tensor_difference(place, first, second, bounds.get(type(old), 0.0))
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        if type(old) is type(new):
            with suppress(Exception):  # whatever a user's class raises
                if says_nothing(old) or bool(old == new):
                    return None
        return Difference(place, math.inf, f"is {new!r}, not {old!r}", old, new)
    for name in ("shape", "dtype", "device"):
        first, second = getattr(old, name), getattr(new, name)
        if first != second:
            return Difference(place, math.inf, f"has {name} {second}, not {first}")
    real = old.dtype.to_real() if old.is_complex() else old.dtype
    return _tensor_difference(place, old, new, bounds.get(real, 0.0))


def _tensor_difference(
    place: str, old: torch.Tensor, new: torch.Tensor, bound: float
) -> Difference | None:
    whole = _WHOLE.get(old.element_size()) if is_ordinary(old) and is_ordinary(new) else None
    # The same bits are a hundred times as fast to see.
    if whole and torch.equal(old.detach().view(whole), new.detach().view(whole)):
        return None
    error = relative_error(old, new)
    # Also of equal numbers, a zero has a sign, which a division shows; that of NaN says nothing.
    signs = (torch.signbit(_comparable(each).nan_to_num()) for each in (old, new))
    if error <= bound and (bound or torch.equal(*signs)):
        return None
    reason = f"relative error {error:.2g}, more than {bound:.2g}"
    if not error:
        reason = "a zero has another sign"
    elif not math.isfinite(error):
        reason = "NaN or infinities are elsewhere"
    return Difference(place, error, reason, old, new)


def relative_error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference over the largest magnitude; inf where NaN or inf differ."""
    whole = _is_whole(expected)
    # float64 has no room for integers beyond 2**53.
    if expected.numel() == 0 or (whole and torch.equal(expected.cpu(), actual.cpu())):
        return 0.0
    old, new = _comparable(expected), _comparable(actual)
    if not torch.allclose(old, new, rtol=0.0, atol=math.inf, equal_nan=True):
        return math.inf
    worst = (old - new).nan_to_num(0.0).abs().max().item()  # NaN where neither is finite
    largest = old.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    least = sys.float_info.min if whole else 0.0
    return max(worst / max(largest, 1.0 if whole else 1e-300), least)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    moved = tensor.detach().cpu().to(_WIDE[complex if tensor.is_complex() else float])
    return torch.view_as_real(moved.resolve_conj()) if tensor.is_complex() else moved


def compare_answers(
    model: nn.Module, call: Call, expected: Answer, actual: Answer, *, exact: bool
) -> Difference | None:
    """Return a `difference`, with a second opinion where there is one.

    An exact result may differ where the model itself does not repeat its bits. A rounded one
    may differ where the model amplifies rounding: it may be not much further from the answer in
    float64 than the model's own. Integers and flags may differ as rounding would make them.
    Inputs that the model writes are rounded as outputs are.
    """
    before, old, new = (Answer((), i) for i in (tuple(call), expected.inputs, actual.inputs))
    written = {each.place for each in _differences(before, old, exact=True)}
    parts = [each for each in _differences(old, new, exact=True) if each.place not in written]
    parts += _differences(expected, actual, exact=exact)
    if not parts:
        return None
    again = answer(model, call, random=expected.drawn)
    if exact:
        repeats = difference(expected, again, exact=True) is None
        return parts[0] if repeats else difference(expected, actual)
    if difference(replace(expected, inputs=()), replace(again, inputs=())):
        return parts[0]  # a copy of the model is another model, whose opinion does not count
    choices = cache(partial(_choices, model, call, expected))
    parts = [each for each in parts if not (_is_whole(each.old) and choices().allow(each))]
    if any(math.isinf(each.error) or each.place.startswith("input") for each in parts):
        return parts[0]
    worse = _worse(model, call, expected, parts) if parts else []
    return next((each for each in worse if not choices().allow(each)), None)


def _is_whole(value: Any) -> bool:
    """Return whether a value is an integer, a flag or a tensor of them."""
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, int)


def _choices(model: nn.Module, call: Call, expected: Answer) -> _Choices:
    """Return what the model chooses in this call by values that rounding moves."""
    choices = _Choices()
    with suppress(Exception), choices:  # a mode may be more than a user's code allows
        answer(model, call, random=expected.drawn)
    return choices


def _worse(
    model: nn.Module, call: Call, expected: Answer, parts: Sequence[Difference]
) -> Sequence[Difference]:
    """Return the differences that are further from the answer in float64 than the model's own."""
    if expected.drawn:  # in float64, other numbers
        return parts
    try:
        double = structural_copy(model).double()
        wide = call.map(lambda each: each.double() if each.is_floating_point() else each.clone())
        with _Widened():  # type: ignore[no-untyped-call]
            truth, _ = leaves_of(answer(double, wide, random=False).output)
        return [each for each in parts if not _as_good(each, truth)]
    except Exception:  # whatever a user's forward raises
        return parts


def _as_good(part: Difference, truth: Mapping[str, Any]) -> bool:
    """Return whether the new value is hardly further from the true one than the old."""
    true = torch.as_tensor(truth[part.place.removeprefix("output")])
    if _is_whole(part.old):  # by how many differ: by how much says little
        old, new = (float((true != each).sum()) for each in (part.old, part.new))
    else:
        old, new = (relative_error(true, each) for each in (part.old, part.new))
    return new <= _WORSE_THAN_EAGER * old < math.inf


class _Widened(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compute in float64 where a forward names a narrower dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {name: torch.float64 if v in BOUNDS else v for name, v in (kwargs or {}).items()}
        return func(*args, **wide)


aten = torch.ops.aten
_STEPS = frozenset((
    aten.gt, aten.ge, aten.lt, aten.le, aten.round, aten.floor, aten.ceil, aten.trunc, aten.sign,
    aten.bucketize, aten.quantize_per_tensor,
))  # fmt: skip
_SLOPES = frozenset((aten.clamp, aten.clamp_min, aten.clamp_max, aten._to_copy))


class _Choices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keep what the calls in a block choose by values that rounding moves.

    An `argmax` over a million values, a mask `x > 0` or an image in bytes is another one at a place
    or two when its input moves by rounding. What an index points at must then be as large, and what
    follows its input upwards or downwards must lie between what the input gives when it moves.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # What was chosen, and which others may be when its source moves by rounding.
        self._choices: list[tuple[torch.Tensor, Callable[[torch.Tensor], bool]]] = []
        # What grows, or falls, with a source, and whether in steps; by the identity of the result,
        # which is kept as long as its identity is.
        self._followed: dict[int, tuple[torch.Tensor, torch.Tensor, Function, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], torch.Tensor):
            if func.overloadpacket in _STEPS | _SLOPES:
                self._follow(func, args, kwargs or {}, result)
            elif args[0].is_floating_point():
                self._point(func, args, kwargs or {}, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: torch.Tensor) -> None:
        start = args[0], args[0].clone(), lambda value: value, False
        _, source, inner, in_steps = self._followed.get(id(args[0]), start)
        if not source.is_floating_point():
            return

        def function(value: torch.Tensor) -> Any:
            return func(inner(value), *args[1:], **kwargs)

        def allows(new: torch.Tensor) -> bool:
            """Return whether `new` lies between the results for a source moved by rounding."""
            room = _room(source)
            ends = [_as_numbers(function(source + move)) for move in (-room, room)]
            return bool(((torch.minimum(*ends) <= new) & (new <= torch.maximum(*ends))).all())

        in_steps |= func.overloadpacket in _STEPS or not result.is_floating_point()
        self._followed[id(result)] = result, source, function, in_steps
        if in_steps:
            self._choices.append((result, allows))

    def _point(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        arguments = {each.name: each.default_value for each in func._schema.arguments}
        arguments |= dict(zip(arguments, args, strict=False)) | kwargs
        for index in tensors_in(result):
            if index.dtype is torch.int64 and "dim" in arguments:
                allows = partial(_points_alike, args[0].clone(), arguments["dim"], index)
                self._choices.append((index, allows))

    def allow(self, part: Difference) -> bool:
        """Return whether the new output may stand for the old one, which was chosen."""
        if not part.place.startswith("output"):
            return False
        with suppress(Exception):  # of another shape than what was chosen, or no number
            old, new = _as_numbers(part.old).flatten(), _as_numbers(part.new)
            return any(
                torch.equal(_as_numbers(result).flatten(), old)
                and allows(new.reshape(result.shape))
                for result, allows in self._choices
            )
        return False


def _room(source: torch.Tensor) -> float:
    """Return how far rounding moves a value."""
    finite = source[source.isfinite()].abs()
    return BOUNDS.get(source.dtype, 0.0) * (finite.max().item() if finite.numel() else 0.0)


def _points_alike(
    source: torch.Tensor, dim: int | None, index: torch.Tensor, new: torch.Tensor
) -> bool:
    """Return whether `new` points at values as large, along a dimension or in the whole."""
    if dim is None:
        source, index, new, dim = source.flatten(), index.flatten(), new.flatten(), 0
    if not ((new >= 0) & (new < source.shape[dim])).all():
        return False
    if index.dim() < source.dim():
        index, new = index.unsqueeze(dim), new.unsqueeze(dim)
    moved = source.gather(dim, new.long()) - source.gather(dim, index)
    return bool((moved.abs() <= _room(source)).all())


def _as_numbers(value: Any) -> torch.Tensor:
    tensor = torch.as_tensor(value)
    return tensor.dequantize() if tensor.is_quantized else tensor.to(torch.float64)


def leaves_of(value: Any) -> tuple[dict[str, Any], pytree.TreeSpec]:
    """Return the leaves of a tree by their places, and its structure, with every object opened."""
    opened = _opened(value, ())
    try:
        leaves, structure = pytree.tree_flatten_with_path(opened)
    except ValueError:  # a class was registered without names for its parts
        parts, structure = pytree.tree_flatten(opened)
        leaves = [((pytree.SequenceKey(place),), part) for place, part in enumerate(parts)]
    return {pytree.keystr(path): leaf for path, leaf in leaves}, structure


def incomparable(value: Any) -> Iterator[str]:
    """Yield the place of each leaf of which equality says nothing, and what is there."""
    for place, leaf in leaves_of(value)[0].items():
        if says_nothing(leaf):
            yield f"{place} is a {type(leaf).__name__}, which cannot be compared"
        elif not isinstance(leaf, torch.Tensor) or leaf.element_size() == 1 or not leaf.numel():
            continue
        elif not (leaf == leaf).any():  # which NaN alone is not
            yield f"{place} is NaN everywhere, which hides what differs: pass other example inputs"


def says_nothing(leaf: Any) -> bool:
    """Return whether a leaf is equal to itself alone, and made anew in each call."""
    equality: Any = type(leaf).__eq__  # a tensor has one of its own
    return equality is object.__eq__ and not isinstance(leaf, _ONE_OF_ITS_KIND)


def _opened(value: Any, around: tuple[int, ...]) -> Any:
    def opened(leaf: Any) -> Any:
        if id(leaf) in around:
            return f"what holds it, {len(around) - around.index(id(leaf))} up"
        parts = _parts(leaf)
        return leaf if parts is None else {type(leaf).__name__: _opened(parts, (*around, id(leaf)))}

    return pytree.tree_map(opened, value, is_leaf=is_size)


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
