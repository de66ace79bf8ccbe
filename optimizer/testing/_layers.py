"""Tokens that call a layer with weights: Linear, constants, a block, in every spelling."""

from __future__ import annotations

from math import prod

from optimizer.testing._machine import KEYWORD, MODULE, Emit, Machine, Shape, fits, ranked


def linear(
    width: int | None = None,
    *,
    bias: bool = True,
    spelling: str = MODULE,
    cls: str = "nn.Linear",
    rank: int | None = None,
) -> Emit:
    """A Linear over the last dimension, `width` wide (as wide as its input if None).

    The spelling is that of a call unless the top has as many dimensions as `rank`.
    """

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        features, out = shape[-1], width or shape[-1]
        if not features or not fits((*shape[:-1], out)):
            return

        def result(shape: Shape) -> Shape | None:
            return (*shape[:-1], out) if shape[-1] == features else None

        extra = "" if bias else ", bias=False"
        machine.helpers.add(cls)
        kind = "linear" if bias else "bare"
        constructor = f"{cls}({features}, {out}{extra})"
        own = cls != "Grandparent"  # those of its layers are theirs
        weight = ("linear" * (cls != "Held"), (out, features)) if own else None  # or a buffer
        layer = machine.add(kind, constructor, result, weight)
        machine.call(layer, spelling if rank in (None, len(shape)) else MODULE)

    return emit


def constant(spelling: str, where: str = "channels") -> Emit:
    """The top combined with a tensor of the model, which has one number for each channel.

    `where` is "channels" for dimension 1, "last" for the last dimension, "row" for it and one
    dimension before, which a vector gets, and "everywhere" for a number for each position.
    """

    def emit(machine: Machine) -> None:
        shape = machine.top.shape
        channels = (*shape[1:2], *[1] * (len(shape) - 2))
        known = {"channels": channels, "last": shape[-1:], "row": (1, *shape[-1:])}
        size = known.get(where, shape[1:])
        count = 1 if where == "row" else len(size)

        def result(other: Shape) -> Shape | None:
            if other[-count:] != shape[-count:]:
                return None
            return (1,) * (len(size) - len(other)) + other

        machine.helpers.add("Constant")
        layer = machine.add("constant", f"Constant{size}", result, ("constant", size))
        machine.call(layer, spelling.replace("{c}", "self.{m}.weight"))

    return ranked(1 if where == "row" else 2, emit)


def prelu(machine: Machine) -> None:
    """A PReLU with one slope for all, which is a parameter that no affine layer absorbs."""
    layer = machine.add("prelu", "nn.PReLU()", lambda shape: shape, ("prelu", (1,)))
    machine.call(layer)


def block(machine: Machine) -> None:
    """A Sequential of layer, BatchNorm and ReLU, which `again` calls as a whole."""
    shape = machine.top.shape
    rank = len(shape)
    if rank < 2 or not prod(shape[1:]):
        return
    channels = shape[1]

    def result(shape: Shape) -> Shape | None:
        suits = len(shape) == rank and shape[1] == channels and prod(shape[1:]) > 0
        return shape if suits else None

    size = max(1, rank - 2)
    first = f"nn.Linear({channels}, {channels})"
    if rank > 2:
        first = f"nn.Conv{size}d({channels}, {channels}, 1)"
    rest = f"nn.BatchNorm{size}d({channels}, eps=0.5), nn.ReLU()"
    machine.call(machine.add("block", f"nn.Sequential({first}, {rest})", result))


LAYERS: dict[str, Emit] = {
    "linear": linear(),
    "linear1": linear(1),
    "linear4": linear(4),
    "linear_nobias": linear(bias=False),
    "linear_kw": linear(spelling=KEYWORD),
    "linear_F": linear(spelling="F.linear({v}, self.{m}.weight, self.{m}.bias)"),
    "linear_F_kw": linear(
        spelling="F.linear(input={v}, bias=self.{m}.bias, weight=self.{m}.weight)"
    ),
    "linear_F_nobias": linear(4, spelling="F.linear({v}, self.{m}.weight)"),
    "linear_matmul": linear(spelling="{v} @ self.{m}.weight.t() + self.{m}.bias"),
    "linear_addmm": linear(spelling="torch.addmm(self.{m}.bias, {v}, self.{m}.weight.t())", rank=2),
    "linear_subclass": linear(cls="Doubled"),
    "linear_opaque": linear(cls="Branching"),
    "scale": constant("self.{m}({v})"),
    "scale_last": constant("{v}.mul({c})", "last"),
    "scale_everywhere": constant("{v} * {c}", "everywhere"),
    "offset": constant("{c} - {v}"),
    "offset_row": constant("{v} + {c}", "row"),
    "prelu": prelu,
    "block": block,
}
