"""Tokens that change the shape: reshapes, slices, and what joins several values to one."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from torch import broadcast_shapes

from optimizer.testing._machine import MAX_DEGREE, Emit, Machine, Shape, fits, ranked


def reshaped(text: str, result: Callable[[Shape], Shape | None]) -> Emit:
    """`text` gives the top the shape that `result` says; nothing where that is None or large.

    In `text`, `{n}` is the size of dimension 1.
    """

    def emit(machine: Machine) -> None:
        shape = result(machine.top.shape)
        if shape is not None and fits(shape) and len(shape) > 0:
            size = str(machine.top.shape[1]) if len(machine.top.shape) > 1 else ""
            machine.replace(text.replace("{n}", size), shape)

    return emit


def indexed(text: str, dim: int, size: Callable[[int], int], minimum: int = 1) -> Emit:
    """`text` makes `size(n)` of the `n`, at least `minimum`, of one dimension; 0 removes it."""

    def result(shape: Shape) -> Shape | None:
        if len(shape) <= max(dim, 0) or shape[dim] < minimum:
            return None
        kept = size(shape[dim])
        place = dim % len(shape)
        return (*shape[:place], *([kept] if kept else []), *shape[place + 1 :])

    return reshaped(text, result)


def joined(text: str, result: Callable[[Shape], Shape], *, product: bool = False) -> Emit:
    """`text` joins the top `{v}` and the value below it `{w}`, which has the same shape."""

    def emit(machine: Machine) -> None:
        below, shape = machine.below(), result(machine.top.shape)
        degrees = machine.top.degree, below.degree
        degree = sum(degrees) if product else max(degrees)
        if fits(shape) and degree <= MAX_DEGREE:
            machine.combine(text, below, degree, shape)

    return emit


def _flat(shape: Shape) -> Shape:
    return (prod(shape),)


def _rows(shape: Shape) -> Shape | None:
    return (prod(shape[:-1]), shape[-1]) if prod(shape) else None


def _columns(shape: Shape) -> Shape | None:
    return (shape[0], prod(shape[1:])) if prod(shape) else None


def _halves(shape: Shape) -> Shape | None:
    even = len(shape) > 1 and shape[1] > 0 and shape[1] % 2 == 0
    return (shape[0], 2, shape[1] // 2, *shape[2:]) if even else None


def _squeezed(shape: Shape) -> Shape | None:
    return (shape[0], *shape[2:]) if len(shape) > 1 and shape[1] == 1 else None


def _shuffled(shape: Shape) -> Shape | None:
    return shape if _halves(shape) else None


def _wider(shape: Shape) -> Shape:
    return (*shape[:-1], 2 * shape[-1])


def _square(shape: Shape) -> Shape:
    return (*shape[:-1], shape[-2])


RESHAPES: dict[str, Emit] = {
    "reshape_flat": reshaped("{v}.reshape(-1)", _flat),
    "reshape_rows": reshaped("{v}.reshape(-1, {v}.size(-1))", _rows),
    "view_columns": reshaped("{v}.contiguous().view({v}.shape[0], -1)", _columns),
    "reshape_torch": reshaped("torch.reshape({v}, {v}.shape)", lambda shape: shape),
    "unflatten": reshaped("{v}.unflatten(1, (2, -1))", _halves),
    "shuffle": reshaped("{v}.unflatten(1, (2, {n} // 2)).transpose(1, 2).flatten(1, 2)", _shuffled),
    "squeeze": reshaped("{v}.squeeze(1)", _squeezed),
    "flatten_all": reshaped("torch.flatten({v})", _flat),
    "flatten_module": reshaped("torch.flatten({v}, start_dim=-1)", lambda shape: shape),
    "none_last": reshaped("{v}[..., None]", lambda shape: (*shape, 1)),
    "none_first": reshaped("{v}[None]", lambda shape: (1, *shape)),
    "expand": reshaped("{v}[:1].expand({v}.shape) + {v}", lambda s: s if s[0] else None),
    "repeat": reshaped("torch.repeat_interleave({v}, 2, dim=-1)", _wider),
}

SLICES: dict[str, Emit] = {
    "head": indexed("{v}[:, :-1]", 1, lambda n: n - 1, 2),
    "first_channel": indexed("{v}[:, :1]", 1, lambda n: 1),
    "tail": indexed("{v}[:, 1:]", 1, lambda n: n - 1, 2),
    "every_other": indexed("{v}[..., ::2]", -1, lambda n: (n + 1) // 2),
    "narrow": indexed("{v}.narrow(-1, 1, 1)", -1, lambda n: 1, 2),
    "select": ranked(2, indexed("{v}.select(1, 0)", 1, lambda n: 0)),
    "pick": ranked(2, indexed("{v}[..., -1]", -1, lambda n: 0)),
    "list_index": indexed("{v}[:, [0, 0]]", 1, lambda n: 2),
    "flip": reshaped("{v}.flip(-1)", lambda shape: shape),
    "roll": reshaped("torch.roll({v}, 1, -1)", lambda shape: shape),
    "pad": reshaped("F.pad({v}, (1, 0))", lambda s: (*s[:-1], s[-1] + 1)),
    "pad_even": reshaped("F.pad({v}, (1, 1))", lambda s: (*s[:-1], s[-1] + 2)),
    "pad_kw": ranked(
        2,
        reshaped("F.pad({v}, pad=(0, 0, 1, 1), value=0.0)", lambda s: (*s[:-2], s[-2] + 2, s[-1])),
    ),
    "pad_ones": reshaped("F.pad({v}, (1, 1), value=1.0)", lambda s: (*s[:-1], s[-1] + 2)),
    "chunk_swapped": ranked(
        2, reshaped("torch.cat({v}.chunk(2, 1)[::-1], dim=1)", lambda s: s if s[1] else None)
    ),
}


def stretched(machine: Machine) -> None:
    """Add the top to the value below it, where one can be repeated to match the other."""
    below = machine.stack[-2:][0]
    try:
        shape = tuple(broadcast_shapes(below.shape, machine.top.shape))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return
    if fits(shape):
        degree = max(below.degree, machine.top.degree)
        machine.combine("{w} + {v}", below, degree, shape)


JOINS: dict[str, Emit] = {
    "cat": joined("torch.cat([{w}, {v}], -1)", _wider),
    "cat_kw": ranked(
        2, joined("torch.cat(dim=1, tensors=({v}, {w}))", lambda s: (s[0], 2 * s[1], *s[2:]))
    ),
    "add_stretched": stretched,
    "stack": joined("torch.stack(({w}, {v}), 1)", lambda s: (s[0], 2, *s[1:])),
    "matmul": ranked(2, joined("{w} @ {v}.mT", _square, product=True)),
    "matmul_torch": ranked(
        2, joined("torch.matmul({w}, {v}.transpose(-1, -2))", _square, product=True)
    ),
    "einsum": ranked(
        2, joined("torch.einsum('...ij,...kj->...ik', {w}, {v})", _square, product=True)
    ),
    "attention": ranked(
        3,
        joined(
            "torch.softmax({v} @ {w}.transpose(-2, -1) * 0.5, dim=-1) @ {w}",
            lambda shape: shape,
            product=True,
        ),
    ),
    "attention_F": ranked(
        3,
        joined("F.scaled_dot_product_attention({v}, {w}, {w})", lambda shape: shape, product=True),
    ),
}
