"""When two tensors count as the same: in their bits, in their values, or but for rounding.

Where a model rounds nothing, as float32 and float64 show that agree, values are equal. Else
float64 is held to 1e-9 of the largest value, unless the model's own answer jumps as far when
weights, inputs and what is computed are rounded otherwise: a mask of what is just above zero, or
what two equal branches leave of one another. Narrower numbers have no such bound, as each model
loses what it loses: they are held to the answer in float64, from which a candidate may be no
farther than the model itself is, or than it comes when it is rounded otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimizer.core.inputs import map_tensors, tensors_in
from optimizer.testing._observe import (
    Inputs,
    Outcome,
    Watch,
    observe,
    same_bits,
    same_values,
    tensors_of,
)

Drawn: TypeAlias = list[Any]  # what each random operator of a call gave, in order


def at_random(see: Callable[[Any], object]) -> Watch:
    """Show what each random operator gives; attention is one, but for a dropout of nothing."""

    def see_if_drawn(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | {**kwargs}
        idle = "dropout_p" in names and not given.get("dropout_p")
        if torch.Tag.nondeterministic_seeded in func.tags and not idle:
            see(result)

    return Watch(see_if_drawn)


TOLERANCE = 1e-9
# Below this the error counts as absolute: a value that cancels to nothing has no relative error.
SMALLEST_SCALE = 1e-3
# How much worse luck a candidate may have: correct folds were seen at 22 times.
LUCK = 32
_TRIES = 16  # a value at a threshold falls to either side of it with equal odds
WIDE = torch.float64
_ATEN = torch.ops.aten
# What these compute is no number that was rounded, and may be an index.
_WHOLE = {_ATEN.floor, _ATEN.ceil, _ATEN.round, _ATEN.trunc, _ATEN.sign, _ATEN.floor_divide}

Same: TypeAlias = Callable[[torch.Tensor, torch.Tensor], bool]


def judge(
    model: nn.Module, inputs: Inputs, reference: Outcome, *, exact: bool
) -> Callable[[str], Same]:
    """For the name of each observed tensor, when another counts as the same."""
    if exact:
        return lambda name: same_bits
    dtypes = {tensor.dtype for tensor in _floating((tensors_of(model), inputs))}
    is_wide = WIDE in dtypes or not dtypes
    other = _observed_in(torch.float32 if is_wide else WIDE, model, inputs)
    if other is not None and _same_everywhere(reference, other):
        return lambda name: SameValues(model, inputs, name)
    if is_wide or other is None:
        return lambda name: Near(model, inputs, name)
    rounded = _rounded_otherwise(model, inputs)
    noise = [_observed_in(WIDE, *rounded(seed)) for seed in (1, 2)]
    for seed in (1, 2):
        with jitter(seed):
            noise.append(observe(model, inputs))
    return _as_precise(other, [each for each in noise if each is not None])


def near(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether what is finite differs by no more than `TOLERANCE` of the largest value.

    Narrower floats by four units in the last place, which is more.
    """
    allowed = max(TOLERANCE, 4 * _unit(expected))
    return _same_infinities(actual, expected) and error(actual, expected) <= allowed


def _same_infinities(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    finite = expected.isfinite()
    return same_values(actual[~finite], expected[~finite])


def _tensors(model: nn.Module, inputs: Inputs) -> Mapping[str, torch.Tensor]:
    return observe(model, inputs).tensors()


@dataclass(frozen=True)
class Near:
    """`near`; or within twice what a model's answer `name` jumps when it is rounded otherwise."""

    model: nn.Module
    inputs: Inputs
    name: str
    observed: Callable[[nn.Module, Any], Mapping[str, torch.Tensor]] = _tensors
    __name__ = "near"

    def __call__(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        if near(actual, expected):
            return True
        if not _same_infinities(actual, expected):
            return False
        distance = _distance(actual, expected)
        return any(distance <= 2 * jump for jump in self._jumps(expected))

    def _jumps(self, expected: torch.Tensor) -> Iterator[float]:
        rounded = _rounded_otherwise(self.model, self.inputs)
        for seed in range(1, _TRIES + 1):
            with jitter(seed):
                moved = self.observed(*rounded(seed)).get(self.name)
            if moved is not None and moved.shape == expected.shape:
                yield _distance(moved, expected)


def jitter(seed: int) -> Watch:
    """Round all that operators compute otherwise, backward too.

    What cancels exactly in the model's own order hides from other inputs that it is lost in
    another: of a softmax that saturates, the gradient of what it sums.
    """
    generator = torch.Generator().manual_seed(seed)

    def see(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = not any(each.alias_info for each in func._schema.returns)
        of_others = any(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(args))
        if made and of_others and func._overloadpacket not in _WHOLE:
            for value in _floating(result):
                value.copy_(_moved(value, generator))

    return Watch(see)


def _keeping(values: list[torch.Tensor]) -> Watch:
    """Keep all numbers that operators compute: what rounds may cancel in the end."""
    return Watch(lambda func, args, kwargs, made: values.extend(map(torch.clone, _floating(made))))


@dataclass(frozen=True)
class SameValues(Near):
    """`same_values`; or `Near`, where only these inputs hide that the model rounds."""

    __name__ = "same_values"

    def __call__(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        if same_values(actual, expected):
            return True
        both = {dtype: copy.deepcopy(self.model).to(dtype) for dtype in (WIDE, torch.float32)}
        rounds = any(self._rounds(both, seed) for seed in range(_TRIES))
        return rounds and super().__call__(actual, expected)

    def _rounds(self, both: Mapping[torch.dtype, nn.Module], seed: int) -> bool:
        """Whether any operator does with other signs and powers of two in the inputs.

        Small ones too: of large ones, what saturates tells nothing.
        """
        generator = torch.Generator().manual_seed(seed)
        low = -2 if seed % 2 else -6

        def other(tensor: torch.Tensor) -> torch.Tensor:
            powers = torch.randint(low, 2, tensor.shape, generator=generator)
            signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
            return tensor * (signs * 2.0**powers).to(tensor.dtype)

        inputs = _mapped(other, self.inputs)
        drawn, every = _drawn(self.model, inputs), []
        for dtype, model in both.items():
            given, values = _exactly(dtype, inputs), list[torch.Tensor]()
            if given is None or _repeated(model, given, drawn, _keeping(values)) is None:
                return True
            every.append(values)
        return not _all_same(*every)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value, where `expected` is finite."""
    return _distance(actual, expected) / _scale(expected)


@dataclass(frozen=True)
class AsPrecise:
    """Whether a tensor is as near to the `truth` as another, or differs by less than `noise`."""

    truth: torch.Tensor
    noise: float
    __name__ = "as_precise"

    def __call__(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        if self.truth.shape != expected.shape:
            return True  # rounding decided how many were chosen
        overflown = self.truth.isfinite() & ~expected.isfinite()
        if expected.is_floating_point():  # so near to the largest number, luck decides
            edge = torch.finfo(expected.dtype).max / LUCK
            overflown |= ~actual.isfinite() & (_scale(self.truth) > edge)
        actual, expected, truth = (t[~overflown] for t in (actual, expected, self.truth))
        finite = expected.isfinite() & truth.isfinite()
        if not same_values(actual[~finite], expected[~finite]):
            return False
        units = 4 * _unit(expected) * _scale(truth)
        allowed = LUCK * max(_distance(expected, truth), self.noise) + units
        return _distance(actual, truth) <= allowed


def _as_precise(truth: Outcome, noisy: list[Outcome]) -> Callable[[str], Same]:
    true = truth.tensors()

    def same(name: str) -> Same:
        others = [each.tensors()[name] for each in noisy if name in each.tensors()]
        moved = [_distance(o, true[name]) for o in others if o.shape == true[name].shape]
        return AsPrecise(true[name], max(moved, default=0.0))

    return lambda name: same(name) if name in true else near


def _observed_in(dtype: torch.dtype, model: nn.Module, inputs: Inputs) -> Outcome | None:
    """The outcome in another precision, of the same random numbers.

    None where the inputs are lost in it, or the model names the dtype that it computes in.
    """
    given = _exactly(dtype, inputs)
    if given is None:
        return None
    return _repeated(copy.deepcopy(model).to(dtype), given, _drawn(model, inputs))


def _exactly(dtype: torch.dtype, inputs: Inputs) -> Inputs | None:
    """The inputs in another precision; None where they are lost in it."""
    changed: Inputs = _mapped(lambda tensor: tensor.to(dtype), inputs)
    pairs = zip(pytree.tree_leaves(changed), pytree.tree_leaves(inputs), strict=True)
    tensors = [(a.to(b.dtype), b) for a, b in pairs if isinstance(b, torch.Tensor)]
    return changed if all(same_values(*pair) for pair in tensors) else None


def _drawn(model: nn.Module, inputs: Inputs) -> Drawn:
    drawn: Drawn = []
    with at_random(lambda result: drawn.append(map_tensors(torch.clone, result))):
        observe(model, inputs)
    return drawn


def _repeated(
    model: nn.Module,
    inputs: Inputs,
    drawn: Drawn,
    within: AbstractContextManager[Any] | None = None,
) -> Outcome | None:
    """What a model in another precision does with random numbers that were drawn; or None."""
    numbers = iter(drawn)

    def repeat(result: Any) -> None:
        for tensor, before in zip(tensors_in(result), tensors_in(next(numbers)), strict=True):
            tensor.copy_(before)

    given = at_random(repeat) if drawn else nullcontext()
    with given, suppress(RuntimeError), within or nullcontext():
        return observe(model, inputs)
    return None


def _rounded_otherwise(
    model: nn.Module, inputs: Inputs
) -> Callable[[int], tuple[nn.Module, Inputs]]:
    """For a seed, each weight and each input times about 1; the model is one copy for all seeds."""
    copied = copy.deepcopy(model)
    pairs = [*zip(tensors_of(copied), tensors_of(model), strict=True)]

    def rounded(seed: int) -> tuple[nn.Module, Inputs]:
        moved = partial(_moved, generator=torch.Generator().manual_seed(seed))
        for tensor, weight in pairs:
            if weight.is_floating_point():
                tensor.data = moved(weight)
        return copied, _mapped(moved, inputs)

    return rounded


def _moved(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(tensor.shape, generator=generator, dtype=WIDE)
    return (tensor * (1 + torch.finfo(tensor.dtype).eps * drawn)).to(tensor.dtype)


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """`values` with every tensor of floating-point numbers changed; one given twice stays one."""
    done: dict[int, torch.Tensor] = {}

    def changed(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return value
        if id(value) not in done:
            done[id(value)] = change(value)
        return done[id(value)]

    return pytree.tree_map(changed, values)


def _same_everywhere(one: Outcome, other: Outcome) -> bool:
    return _all_same([*one.tensors().values()], [*other.tensors().values()])


def _all_same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and same_values(_wide(a), _wide(b))
        for a, b in zip(one, other, strict=True)
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else WIDE)


def _floating(values: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(values)
    return [each for each in leaves if isinstance(each, torch.Tensor) and each.is_floating_point()]


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    finite = expected.isfinite()
    difference = (_wide(actual[finite]) - _wide(expected[finite])).abs()
    largest = float(difference.max()) if difference.numel() else 0.0
    # max() of a NaN is NaN, which compares as smaller: a NaN out of nothing is no agreement.
    return largest if largest == largest else float("inf")


def _unit(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _scale(expected: torch.Tensor) -> float:
    finite = _wide(expected[expected.isfinite()])
    return max(float(finite.abs().max()), SMALLEST_SCALE) if finite.numel() else SMALLEST_SCALE
