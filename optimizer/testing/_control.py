"""Tokens about the graph itself: fan-out, extra outputs, shared and hooked layers."""

from __future__ import annotations

from optimizer.testing._machine import Emit, Machine, Value


def duplicate(machine: Machine) -> None:
    machine.stack.append(machine.top)


def swap(machine: Machine) -> None:
    machine.stack[-2:] = machine.stack[-2:][::-1]


def drop(machine: Machine) -> None:
    if len(machine.stack) > 1:
        machine.stack.pop()


def output(machine: Machine) -> None:
    machine.outputs.append(machine.top)


def argument(machine: Machine) -> None:
    """A further argument of forward, shaped like the first."""
    value = Value(f"x{len(machine.arguments)}", machine.shape)
    machine.arguments.append(value)
    machine.stack.append(value)


def again(machine: Machine) -> None:
    """Call the newest layer that takes the top: it is then called from two places."""
    for layer in reversed(machine.layers):
        if layer.result(machine.top.shape) is not None:
            return machine.call(layer)
    return None


def tie(machine: Machine) -> None:
    """Let the two newest layers with weights of one kind and shape share the Parameter."""
    weighted = [layer for layer in reversed(machine.layers) if layer.weight is not None]
    for index, newer in enumerate(weighted):
        for older in weighted[index + 1 :]:
            if older.weight == newer.weight:
                machine.finishing.append(f"self.{newer.name}.weight = self.{older.name}.weight")
                return


def hook(registration: str) -> Emit:
    """Register a hook on the newest layer that can be seen in the output."""

    def emit(machine: Machine) -> None:
        if machine.layers:
            machine.helpers.add(registration)
            layer = machine.layers[-1].name
            machine.finishing.append(f"self.{layer}.{registration}")

    return emit


def mapping(machine: Machine) -> None:
    """Return the outputs as a mapping."""
    machine.returns_mapping = True


HOOK = "register_forward_hook(double_output)"
PRE_HOOK = "register_forward_pre_hook(double_input)"

CONTROL: dict[str, Emit] = {
    "dup": duplicate,
    "swap": swap,
    "drop": drop,
    "out": output,
    "again": again,
    "tie": tie,
    "hook": hook(HOOK),
    "pre_hook": hook(PRE_HOOK),
    "arg": argument,
    "mapping": mapping,
}
