"""Tokens that pool: windows of every kind over the last dimensions, and whole dimensions."""

from __future__ import annotations

from math import prod

from optimizer.testing._machine import MODULE, Emit, Machine, Shape, fits, ranked


def pool(
    kind: str,
    kernel: int = 2,
    *,
    stride: int | None = None,
    padding: int = 0,
    dilation: int = 1,
    options: str = "",
    spelling: str = MODULE,
) -> Emit:
    """`nn.<kind>Pool<d>d`, or `F.<kind>_pool<d>d` where `{F}` is in the spelling."""
    step = stride or kernel
    window = dilation * (kernel - 1) + 1

    def emit(machine: Machine) -> None:
        rank = len(machine.top.shape)
        dimensions = max(1, rank - 2)

        def result(shape: Shape) -> Shape | None:
            space = [(n + 2 * padding - window) // step + 1 for n in shape[-dimensions:]]
            # torch refuses some windows that are larger than what they slide over.
            if len(shape) != rank or not prod(shape) or min(shape[-dimensions:]) < window:
                return None
            if "ceil_mode" in options:
                space = [-(-(n + 2 * padding - window) // step) + 1 for n in shape[-dimensions:]]
                # A window that would begin in the padding on the right is left out.
                space = [
                    count - ((count - 1) * step >= n + padding)
                    for count, n in zip(space, shape[-dimensions:], strict=True)
                ]
            return (*shape[:-dimensions], *space)

        given = {"stride": (stride, None), "padding": (padding, 0), "dilation": (dilation, 1)}
        extra = "".join(f", {k}={v}" for k, (v, default) in given.items() if v != default)
        call = spelling.replace("{F}", f"F.{kind.lower()}_pool{dimensions}d")
        call = call.replace("{options}", f"{kernel}{extra}{options}")
        if "{m}" not in call:
            if (shape := result(machine.top.shape)) is not None:
                machine.replace(call, shape)
            return
        constructor = f"nn.{kind}Pool{dimensions}d({kernel}{extra}{options})"
        machine.call(machine.add("pool", constructor, result), call)

    return ranked(2, emit)


def adaptive(kind: str, size: int, spelling: str = "") -> Emit:
    """The last dimensions to `size` each, by averages or maxima."""

    def emit(machine: Machine) -> None:
        rank = len(machine.top.shape)
        dimensions = max(1, rank - 2)

        def result(shape: Shape) -> Shape | None:
            fitting = len(shape) == rank and prod(shape) > 0
            return (*shape[:-dimensions], *[size] * dimensions) if fitting else None

        if (shape := result(machine.top.shape)) is None or not fits(shape):
            return
        if spelling:
            machine.replace(spelling.replace("{d}", str(dimensions)), shape)
            return
        machine.call(machine.add("pool", f"nn.Adaptive{kind}Pool{dimensions}d({size})", result))

    return ranked(2, emit)


def reduction(text: str, dim: int = -1, *, keep: bool = False) -> Emit:
    """`text` reduces one dimension, to size 1 if it keeps it."""

    def emit(machine: Machine) -> None:
        shape = [*machine.top.shape]
        if shape[dim] == 0:
            return
        shape[dim : (dim + 1) or None] = [1] if keep else []
        machine.replace(text, tuple(shape))

    return emit if keep else ranked(2, emit)


POOLS: dict[str, Emit] = {
    "max_pool": pool("Max"),
    "max_pool_padded": pool("Max", 3, stride=1, padding=1),
    "max_pool_dilated": pool("Max", stride=1, dilation=2),
    "max_pool_ceil": pool("Max", 2, options=", ceil_mode=True"),
    "max_pool_F": pool("Max", stride=1, spelling="{F}({v}, {options})"),
    "max_pool_F_kw": pool("Max", spelling="{F}(input={v}, kernel_size={options})"),
    "max_pool_indices": pool(
        "Max", stride=1, spelling="{F}({v}, {options}, return_indices=True)[0]"
    ),
    "avg_pool": pool("Avg"),
    "avg_pool_padded": pool("Avg", stride=1, padding=1),
    "avg_pool_zeros": pool("Avg", padding=1),
    "avg_pool_inside": pool("Avg", stride=1, padding=1, options=", count_include_pad=False"),
    "avg_pool_ceil": pool("Avg", options=", ceil_mode=True"),
    "avg_pool_F": pool("Avg", stride=1, spelling="{F}({v}, {options})"),
    "adaptive_avg": adaptive("Avg", 1),
    "adaptive_avg_F": adaptive("Avg", 2, "F.adaptive_avg_pool{d}d({v}, 2)"),
    "adaptive_max": adaptive("Max", 2),
    "adaptive_max_F": adaptive("Max", 1, "F.adaptive_max_pool{d}d({v}, output_size=1)"),
    "mean": reduction("{v}.mean(-1)"),
    "mean_keep": reduction("torch.mean({v}, dim=-1, keepdim=True)", keep=True),
    "sum": reduction("{v}.sum(1)", 1),
    "sum_keep": reduction("torch.sum({v}, 0, keepdim=True)", 0, keep=True),
    "amax": reduction("{v}.amax(dim=-1)"),
    "max_values": reduction("{v}.max(-1, keepdim=True).values", keep=True),
}
