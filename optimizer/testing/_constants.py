"""Tokens that combine the top with what is computed from the model's own tensors."""

from __future__ import annotations

from optimizer.testing._machine import Emit, Machine, Value, ranked


def constant(text: str, *, buffer: bool = False, before: str = "", after: str = "") -> Emit:
    """Add `text`, in which `{c}` is a new parameter or buffer, to the top `{t}`.

    `before` and `after` are statements around it; in `after`, `{v}` is its value.
    """

    def emit(machine: Machine) -> None:
        name = f"constant{len(machine.members)}"
        drawn = f"torch.zeros({machine.top.shape[-1]})"
        held = f"self.{name} = nn.Parameter({drawn})"
        machine.members.append(f"self.register_buffer({name!r}, {drawn})" if buffer else held)
        value = f"{name}_value"
        lines = (before, f"{value} = {text}", after)
        names = {"c": f"self.{name}", "v": value, "t": machine.top.name}
        machine.statements += [line.format(**names) for line in lines if line]
        machine.replace(f"{{v}} + {value}")

    return emit


def returned(machine: Machine) -> None:
    """Return what is computed from a parameter beside what is made of it."""
    constant("{c}.relu()")(machine)
    name = machine.statements[-2].partition(" =")[0]
    machine.outputs.append(Value(name, machine.top.shape[-1:]))


def plain(machine: Machine) -> None:
    """Add what is computed from a float32 tensor that is no buffer, so that no cast reaches it."""
    name = f"plain{len(machine.members)}"
    machine.members.append(f"self.{name} = torch.full(({machine.top.shape[-1]},), 0.5)")
    machine.replace(f"{{v}} + F.linear(self.{name}, self.{name})")


def literal(*writes: str) -> Emit:
    """Return a tensor of numbers that the forward names, after `writes` to it, `{n}`."""

    def emit(machine: Machine) -> None:
        name = f"literal{len(machine.statements)}"
        lines = ("{n} = torch.tensor([0.5, 2.0])", *writes)
        machine.statements += [line.replace("{n}", name) for line in lines]
        machine.outputs.append(Value(name, (2,)))

    return emit


def double(machine: Machine) -> None:
    """Return, besides the top, what stays in float64 when the model is cast."""
    size, name = machine.top.shape[-1], f"constant{len(machine.members)}"
    machine.members.append(f"self.{name} = nn.Parameter(torch.zeros({size}))")
    machine.statements.append(f"{name}_value = self.{name}.double() / 3.0 * 2.0")
    machine.outputs.append(Value(f"{name}_value", (size,)))


CONSTANTS: dict[str, Emit] = {
    "constant": constant("torch.relu({c}) * 2.0"),
    "constant_buffer": constant("0.5 * {c}.abs()", buffer=True),
    "constant_view": ranked(2, constant("{c}.unsqueeze(0)")),
    "constant_expanded": constant("(2.0 * {c}).expand(3, -1)[1]"),
    "constant_counter": constant("{c} * 2.0", buffer=True, before="{c}.add_(1.0)"),
    "constant_counter_later": constant("{c} * 2.0", buffer=True, after="{c}.add_(1.0)"),
    "constant_written": constant("{c} * 2.0", after="{v}.add_(1.0)"),
    "constant_contiguous_written": constant("{c}.abs().contiguous()", after="{v}.mul_(2.0)"),
    "constant_inplace": constant("({c} * 2.0).relu_()"),
    "constant_large": constant("(2.0 * {c}).expand(262144, -1)[{t}.size(0)]"),
    "constant_literal": literal(),
    "constant_literal_written": literal("{n}.mul_(2.0)", "{n} = {n} + 1.0"),
    "constant_plain": plain,
    "constant_random": constant("F.dropout({c}, 0.5, True)"),
    "constant_double": double,
    "constant_returned": returned,
}
