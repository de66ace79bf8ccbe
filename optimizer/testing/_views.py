"""Tokens that view or partly overwrite the top: transposes, permutes, masked assignment."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from optimizer.testing._elementwise import broadcast, expression, statement
from optimizer.testing._machine import Emit, Machine, Shape, fits, ranked


def permutation(text: str, order: Callable[[int], list[int]]) -> Emit:
    """`text` permutes the top as `order(rank)` says.

    In `text`, `{v}` is the top, `{dims}` the order and `{negative}` the order less the rank.
    """

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        dims = order(len(shape))
        negative = [d - len(shape) for d in dims]
        filled = text.replace("{dims}", _listed(dims)).replace("{negative}", _listed(negative))
        machine.replace(filled, tuple(shape[d] for d in dims))

    return ranked(2, emit)


def _listed(dims: list[int]) -> str:
    return ", ".join(map(str, dims))


def _first_two(rank: int) -> list[int]:
    return [1, 0, *range(2, rank)]


def _last_two(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _ends(rank: int) -> list[int]:
    return [rank - 1, *range(1, rank - 1), 0]


def _cycle(rank: int) -> list[int]:
    return [*range(1, rank), 0]


def _cycle_back(rank: int) -> list[int]:
    return [rank - 1, *range(rank - 1)]


def _reverse(rank: int) -> list[int]:
    return [*range(rank)][::-1]


def _same(rank: int) -> list[int]:
    return [*range(rank)]


def matrix_only(text: str) -> Emit:
    """`text` where the top is a matrix; `.mT`, which is the same there, elsewhere."""

    def emit(machine: Machine) -> None:
        chosen = text if len(machine.top.shape) == 2 else "{v}.mT"
        permutation(chosen, _last_two)(machine)

    return emit


def flatten(machine: Machine) -> None:
    shape = machine.top.shape
    machine.replace("{v}.flatten(1)", (shape[0], prod(shape[1:])))


def flatten_rows(machine: Machine) -> None:
    shape = machine.top.shape
    if len(shape) > 2:
        machine.replace("{v}.flatten(0, 1)", (shape[0] * shape[1], *shape[2:]))


def unsqueeze(machine: Machine) -> None:
    shape: Shape = (machine.top.shape[0], 1, *machine.top.shape[1:])
    if fits(shape):
        machine.replace("{v}.unsqueeze(1)", shape)


def merge(machine: Machine) -> None:
    """The first two axes as one, by sizes that the forward reads."""
    first, second, *rest = machine.top.shape
    sizes = "{v}.shape[0] * {v}.size(1)"
    machine.replace(
        f"{{v}}.reshape({sizes}, {_listed(rest or [1])})", (first * second, *(rest or [1]))
    )


def assignment(text: str, *, full: bool = False) -> Emit:
    """`text` overwrites part of the top `{v}`; `{w}` is the value below it, of the same shape.

    What is `full` needs a value that is not empty.
    """

    def emit(machine: Machine) -> None:
        if full and not machine.top.shape[0]:
            return
        if prod(machine.top.shape[1:]) and machine.top.shape[-1] > 0:
            machine.do(text.replace("{w}", _below(machine)))

    return emit


def _below(machine: Machine) -> str:
    """The value below; to be written to the top, which may have another dtype under autocast."""
    return machine.below().name + (".type_as({v})" if machine.autocast else "")


def gathered(between: str = "", mask: str = "{n}", after: str = "", source: str = "{w}") -> Emit:
    """What `mask` chooses of `source`, written under mask `{n}` after `between`.

    `{w}` is the value below; `after` is a statement in which `{n}_chosen` is what was chosen.
    """

    def emit(machine: Machine) -> None:
        lines = (
            "{n} = {v} > 0.5",
            f"{{n}}_chosen = {source}[{mask}]",
            f"{between}{{v}}[{{n}}] = {{n}}_chosen",
            *([after] if after else []),
        )
        below = _below(machine)
        statement(*(line.replace("{w}", below) for line in lines))(machine)

    return emit


def gathered_turned(machine: Machine) -> None:
    """What a mask chooses of a view of what is written, whose elements are elsewhere."""
    if machine.top.shape[-1:] == machine.top.shape[-2:-1]:
        gathered(source="{v}.mT")(machine)


def indexed_rows(machine: Machine) -> None:
    """Add to the first row, by its number."""
    if machine.top.shape[0]:
        statement("{n} = torch.arange({v}.dim())[:1]", "{v}[{n}] += 1.0")(machine)


VIEWS: dict[str, Emit] = {
    "t01": permutation("{v}.transpose(0, 1)", _first_two),
    "t12": permutation("{v}.transpose(-2, -1)", _last_two),
    "t01_torch": permutation("torch.transpose({v}, 0, 1)", _first_two),
    "t01_kw": permutation("torch.transpose(input={v}, dim0=0, dim1=1)", _first_two),
    "t01_swapped": permutation("{v}.transpose(1, 0)", _first_two),
    "t_negative": permutation("torch.transpose({v}, -1, -2)", _last_two),
    "t_same": permutation("{v}.transpose(0, 0)", _same),
    "t_ends": permutation("{v}.transpose(0, -1)", _ends),
    "T": matrix_only("{v}.T"),
    "t": matrix_only("{v}.t()"),
    "t_torch": matrix_only("torch.t({v})"),
    "mT": permutation("{v}.mT", _last_two),
    "swapaxes": permutation("{v}.swapaxes(0, 1)", _first_two),
    "swapdims": permutation("torch.swapdims({v}, 0, -1)", _ends),
    "movedim": permutation("{v}.movedim(0, -1)", _cycle),
    "moveaxis": permutation("torch.moveaxis({v}, -1, 0)", _cycle_back),
    "movedim_turned": permutation("torch.movedim({v}, (0, 1), (-1, 0))", _cycle),
    "movedim_pair": permutation("torch.movedim({v}, (0, 1), (1, 0))", _first_two),
    "cycle": permutation("{v}.permute({dims})", _cycle),
    "cycle_back": permutation("{v}.permute(({dims}))", _cycle_back),
    "cycle_torch": permutation("torch.permute({v}, ({dims}))", _cycle),
    "cycle_kw": permutation("{v}.permute(dims=({negative}))", _cycle),
    "cycle_computed": permutation("{v}.movedim({v}.dim() - 1, 0)", _cycle_back),
    "reverse": permutation("{v}.permute({negative})", _reverse),
    "permute_same": permutation("{v}.permute({dims})", _same),
    "flatten": ranked(2, flatten),
    "flatten_rows": flatten_rows,
    "unsqueeze": unsqueeze,
    "merge": ranked(2, merge),
    "add_size": lambda machine: machine.replace("{v} + ({v}.shape[-1] // 2 + {v}.dim())"),
}

ASSIGNMENTS: dict[str, Emit] = {
    "mask": assignment("{v}[{v} > 0.0] = 0.0"),
    "mask_half": assignment("{v}[{v} <= 0.5] = 1.5"),
    "mask_int": assignment("{v}[{v} < 0] = 0"),
    "mask_below": assignment("{v}[{w} >= 1.0] = -1.0"),
    "mask_both": assignment("{v}[({v} > 0) & ({w} < 2)] = 0.5"),
    "mask_not": assignment("{v}[~({v} > 0)] = 0.5"),
    "mask_named": expression("{v} + {n}", "{n} = {v} > 0.5", "{v}[{n}] = 0.25"),
    "mask_rows": assignment("{v}[{v}[..., 0] > 0] = 0.0"),
    "mask_gather": assignment("{v}[{v} > 1] = {w}[{v} > 1]"),
    "mask_fill": assignment("{v}.masked_fill_({v} > 0, 0.5)"),
    "mask_add": assignment("{v}[{v} > 0] += 1.0"),
    "mask_scale": assignment("{v}[{v} > 0] *= 2.0"),
    "mask_rows_add": assignment("{v}[{v}[..., 0] > 0] += 1.0"),
    "mask_row": ranked(2, assignment("{v}[{v}.flatten(1)[:, 0] > 0] = 0.5")),
    "mask_sub": assignment("{v}[{v} < -0.25] -= 0.5"),
    "mask_div": assignment("{v}[{v} >= 1] /= 2.0"),
    "mask_columns": ranked(2, assignment("{v}[:, {v}.sum(0) > 0] = 0.5", full=True)),
    "mask_scalar_tensor": assignment("{v}[{v} > 0] = torch.zeros((), dtype={v}.dtype)"),
    "mask_vector": assignment("{v}[{v} > 0] = {v}[{v} > 0].flip(0)"),
    "mask_scatter": assignment("{v}.masked_scatter_({v} > 0, {w}.clone())"),
    "mask_copy_where": assignment("{v}.copy_(torch.where({v} > 0, {w}, {v}))"),
    "mask_fill_torch": expression("torch.masked_fill({v}, {v} < -1, -1.0)"),
    "mask_nonzero": assignment("{v}[({v} > 0).nonzero(as_tuple=True)] = 0.25"),
    "mask_times": expression("{v} * ({v} > 0)"),
    "index_rows": assignment("{v}[[0]] = 0.5", full=True),
    "index_fill": assignment("{v}.index_fill_(-1, torch.tensor([0]), 0.5)"),
    "slice_step": assignment("{v}[..., ::2] *= 2.0"),
    "ellipsis": assignment("{v}[...] = {w}.clone() + 1.0"),
    "mask_put": assignment("{v}.index_put_(({v} > 0,), {v}.sum())"),
    "mask_gather_same": gathered(),
    "mask_gather_stale": gathered("{w}.mul_(2.0); "),
    "mask_gather_other": gathered(mask="{n}.flip(0)"),
    "mask_gather_read": gathered(after="{v} += {n}_chosen.sum()"),
    "mask_gather_turned": gathered_turned,
    "mask_integers": expression("{v} + {n}", "{n} = ({v} > 0) * 2", "{n}[{v} < 0] = 1.5"),
    "mask_booleans": expression("{v} + {n}", "{n} = {v} > 0", "{n}[{v} < 0] = torch.nan"),
    "mask_complex": expression("{v} + {n}.imag", "{n} = {v} * 1j", "{n}[{v} > 0] = 2.0"),
    "mask_integer_tensor": assignment("{v}[{v} > 0] = torch.ones((), dtype=torch.long)"),
    "mask_float_tensor": expression(
        "{v} + {n}", "{n} = ({v} > 0) * 2", "{n}[{v} < 0] = torch.full((), 1.5, dtype={v}.dtype)"
    ),
    # Torch casts what it writes where the mask has one True.
    "mask_one_integer": broadcast(
        "{v} + {n}",
        "{n} = ({v} > 0) * 2",
        "{n}_first = torch.arange({v}.numel()).reshape({v}.shape) < 1",
        "{n}_chosen = torch.full_like({v}, 1.5)[{n}_first]",
        "{n}[{n}_first] = {n}_chosen",
    ),
    "index_add_rows": indexed_rows,
    "mask_view": ranked(2, assignment("{v}.transpose(0, 1)[{v}.transpose(0, 1) > 0] = 0.0")),
    "slice": assignment("{v}[..., 0] = 1.0"),
    "mask_copy": lambda machine: machine.replace("{v}.masked_fill({v} > 0.0, 0.0)"),
    "where": lambda machine: machine.replace("torch.where({v} > 0, {v}, 0.0)"),
}
