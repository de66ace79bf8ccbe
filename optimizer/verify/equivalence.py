"""Whether two modules give the same answer, by an oracle that can tell rounding from a bug."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from optimizer.core.copy import structural_copy
from optimizer.core.errors import CaptureError, DeviceError, InputError
from optimizer.core.inputs import Call, opened
from optimizer.core.random import Again, Drawn, Own, Recorded, undrawn
from optimizer.frontend.state import Outside

# Largest difference, relative to the largest value of the output, that passes without a
# second look. Rounding in a deep network stays a hundredfold below; a wrong formula does not.
BOUNDS = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
# How much further from the float64 answer than the original's a result may be.
_WORSE_THAN_EAGER = 4.0


@dataclass(frozen=True)
class Answer:
    """What a call returned, what it left in its inputs, and the random numbers that it drew."""

    output: Any
    inputs: Any
    drawn: Drawn = field(default_factory=list)

    def numbers(self) -> Recorded | None:
        """Where another call draws the same; None where this one drew nothing."""
        return Own() if self.drawn else None


@dataclass(frozen=True)
class Difference:
    """Where two answers differ, by how much relative to the largest value, and why it counts."""

    place: str
    error: float
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


def answer(
    module: nn.Module, call: Call, *, share: bool = False, numbers: Recorded | None = None
) -> Answer:
    """Call a copy of a module on copies of its inputs; neither is changed.

    Parameters are copied as well, for a forward may write them, unless `share` says otherwise.
    Random numbers are drawn from `numbers`, where given. The caller's random state stays as it is.
    """
    copied = structural_copy(module, share=share)
    own = call.copied()
    with torch.no_grad(), Outside(copied).kept(), numbers or nullcontext():
        output = undrawn(lambda: copied(*own.args, **own.kwargs))
    return Answer(output, (own.args, own.kwargs), numbers.drawn if numbers else [])


def reference(model: nn.Module, call: Call, *, share: bool = False, draws: bool = True) -> Answer:
    """The original's answer. `draws` is whether it may draw random numbers.

    Raises:
        InputError: the model itself rejects the inputs.
    """
    try:
        return answer(model, call, share=share, numbers=Own() if draws else None)
    except (CaptureError, DeviceError):
        raise
    except Exception as error:  # whatever a user's forward raises
        reason = str(error).strip().split("\n")[0]
        raise InputError(
            f"the model itself rejects these example inputs ({type(error).__name__}: {reason}):"
            " pass inputs that it can be called with."
        ) from error


def difference(expected: Answer, actual: Answer, *, exact: bool = False) -> Difference | None:
    """The first place where two answers differ by more than rounding; None if there is none."""
    return next(_differences(expected, actual, exact=exact), None)


def largest_error(expected: Answer, actual: Answer) -> float:
    """The largest relative error of any output or input, be it rounding or not."""
    return max((each.error for each in _differences(expected, actual, exact=True)), default=0.0)


def _differences(expected: Answer, actual: Answer, *, exact: bool) -> Iterator[Difference]:
    pairs = (("output", expected.output, actual.output), ("input", expected.inputs, actual.inputs))
    for place, old, new in pairs:
        old_leaves, old_spec = pytree.tree_flatten_with_path(opened(old))
        new_leaves, new_spec = pytree.tree_flatten_with_path(opened(new))
        if old_spec != new_spec:
            yield Difference(place, float("inf"), "has another structure")
            return
        for (path, one), (_, other) in zip(old_leaves, new_leaves, strict=True):
            name = place + pytree.keystr(path)
            found = _leaf_difference(name, one, other, exact=exact or place == "input")
            if found is not None:
                yield found


def _leaf_difference(place: str, old: Any, new: Any, *, exact: bool) -> Difference | None:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        same = _equal(old, new)
        return None if same else Difference(place, float("inf"), f"is {new!r}, not {old!r}")
    for name in ("shape", "dtype", "device", "layout"):
        one, other = getattr(old, name), getattr(new, name)
        if one != other:
            return Difference(place, float("inf"), f"has {name} {other}, not {one}")
    error = relative_error(old, new)
    bound = 0.0 if exact else BOUNDS.get(old.dtype, 0.0)
    finite = f"relative error {error:.2g}, more than {bound:.2g}"
    reason = finite if math.isfinite(error) else "NaN or infinities are elsewhere"
    return Difference(place, error, reason) if error > bound else None


def _equal(old: Any, new: Any) -> bool:
    with suppress(Exception):  # two arrays, for one, are neither equal nor different
        return type(old) is type(new) and bool(old == new)
    return False


def relative_error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Largest difference over largest finite magnitude; infinite where NaN or inf differ."""
    if expected.numel() == 0:
        return 0.0
    old, new = _comparable(expected), _comparable(actual)
    finite = torch.isfinite(old)
    if not torch.equal(finite, torch.isfinite(new)):
        return float("inf")
    if not finite.all():
        if not torch.equal(old[~finite].nan_to_num(0.5), new[~finite].nan_to_num(0.5)):
            return float("inf")
        old, new = old[finite], new[finite]
    worst = (old - new).abs().max().item() if old.numel() else 0.0
    return worst / max(old.abs().max().item(), 1e-300) if worst else 0.0


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    moved = tensor.detach().to("cpu")
    return torch.view_as_real(moved.to(wide)) if tensor.is_complex() else moved.to(wide)


def compare_answers(
    model: nn.Module, call: Call, expected: Answer, actual: Answer, *, exact: bool
) -> Difference | None:
    """`difference`, with a second opinion where it finds one.

    An exact result may differ where the model itself does not repeat its bits. A rounded one
    may differ where the model amplifies rounding: then the answer in float64 decides, from
    which it may not be much further than the model's own.
    """
    found = list(_differences(expected, actual, exact=exact))
    if not found:
        return None
    if any(math.isinf(each.error) or each.place.startswith("input") for each in found):
        return found[0]
    if exact:
        again = answer(model, call, numbers=expected.numbers())
        repeats = difference(expected, again, exact=True) is None
        return found[0] if repeats else difference(expected, actual)
    return None if _as_good_as(model, call, expected, actual) else found[0]


def _as_good_as(model: nn.Module, call: Call, expected: Answer, actual: Answer) -> bool:
    try:
        double = structural_copy(model).double()
        truth = answer(double, call.map(_double), numbers=Again(expected.drawn))
    except Exception:  # a forward that names its dtype; then there is no second opinion
        return False
    leaves = (pytree.tree_leaves(opened(each.output)) for each in (truth, expected, actual))
    return all(
        relative_error(true, new) <= _WORSE_THAN_EAGER * relative_error(true, old)
        for true, old, new in zip(*leaves, strict=True)
        if isinstance(true, torch.Tensor)
    )


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()
