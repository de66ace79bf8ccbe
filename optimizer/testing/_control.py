"""Tokens about the graph itself: fan-out, extra outputs, shared and hooked layers."""

from __future__ import annotations

import re
from functools import partial

from optimizer.testing._machine import Emit, Layer, Machine, Value


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
    machine.stack.append(machine.argument())


def narrow_argument(machine: Machine) -> None:
    """Add an argument in float32, which is promoted."""
    if machine.top.shape == machine.shape:
        machine.replace(f"{{v}} + {machine.argument('narrow').name}")


def mask_argument(machine: Machine) -> None:
    """Assign under a mask that is given."""
    if machine.top.shape == machine.shape:
        machine.do(f"{{v}}[{machine.argument('mask').name}] = 0.5")


def index_argument(machine: Machine) -> None:
    """Take the rows that are given by number."""
    if machine.top.shape[0] == machine.shape[0]:
        machine.replace(f"{{v}}[{machine.argument('index').name}]")


def option(text: str, default: str = "") -> Emit:
    """`text`, in which `{o}` is an argument, `{n}` assigned; defaults are left out."""

    def emit(machine: Machine) -> None:
        if default or machine.top.shape == machine.shape:
            given = machine.default(default) if default else machine.argument().name
            *before, last = text.replace("{o}", given).replace("{n}", f"is_{given}").split("; ")
            machine.statements += before
            machine.replace(last)

    return emit


def again(machine: Machine) -> None:
    """Call the newest layer that takes the top: it is then called from two places."""
    for layer in reversed(machine.layers):
        if layer.result(machine.top.shape) is not None:
            return machine.call(layer)
    return None


def _weighted(machine: Machine) -> list[Layer]:
    """The layers with weights, the newest first."""
    return [layer for layer in reversed(machine.layers) if layer.weight is not None]


def _newest(machine: Machine) -> str:
    """How the newest value was computed, if it was."""
    start = f"{machine.history[-1].name} = "
    texts = [text for text in machine.statements if text.startswith(start)]
    return texts[-1].removeprefix(start) if texts else ""


def recompute(machine: Machine, *, halved: bool = False) -> None:
    """Compute the newest value once more, of what it reads by now; or with half of its number."""
    text = _newest(machine)
    if halved:
        text = re.sub(r"\b\d+\.\d+\b(?!.*\b\d\.)", lambda n: str(float(n[0]) / 2), text)
    if text:
        machine.stack.append(machine.history[-1])
        machine.replace(text.replace("{", "{{").replace("}", "}}"))


def recall(machine: Machine) -> None:
    """Push a value of before."""
    machine.stack.append(machine.history[len(machine.history) // 2])


def keyword_only(machine: Machine) -> None:
    """The model has an argument that is given by name alone, and is not given."""
    name = f"named{len(machine.defaults)}"
    machine.defaults += ["*"] * {"*", "*more"}.isdisjoint(machine.defaults) + [f"{name}=0.5"]
    machine.replace(f"{{v}} * {name}")


def write_read(machine: Machine) -> None:
    """Write to the last that the newest value was computed from."""
    floating = [each for each in machine.arguments if each.kind == "value"]
    names = {each.name for each in [*machine.history[:-1], *floating]}
    read = [each for each in re.findall(r"\b[vx]\d*\b", _newest(machine)) if each in names]
    machine.statements += [f"{name}.mul_(2.0)" for name in read[-1:]]


def write_layer(machine: Machine, *, bias: bool = False) -> None:
    """Write to the weight of the newest layer that has one, or to the bias."""
    name, start = ("bias", "linear") if bias else ("weight", "")
    for layer in [each for each in _weighted(machine) if each.name.startswith(start)][:1]:
        machine.statements.append(f"self.{layer.name}.{name}.mul_(2.0)")


def return_weight(machine: Machine) -> None:
    """Let the caller have the weight of the newest layer that has one."""
    for layer in _weighted(machine)[:1]:
        assert layer.weight is not None
        machine.outputs.append(Value(f"self.{layer.name}.weight", layer.weight[1]))


def return_made(machine: Machine) -> None:
    """Let the caller have a tensor that the forward makes of nothing."""
    machine.outputs.append(Value("torch.zeros(3)", (3,)))


def tie(machine: Machine) -> None:
    """Let the two newest layers with weights of one kind and shape share the Parameter."""
    weighted = _weighted(machine)
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


def further_arguments(machine: Machine) -> None:
    """The model counts with whether it is given more than it names."""
    if "*" in machine.defaults:
        return
    if "*more" not in machine.defaults:
        machine.defaults.append("*more")
    machine.replace("{v} * (2.0 if more else 1.0)")


def narrow_scaled(machine: Machine) -> None:
    """Push an argument in float32 times a number for each of its last dimension."""
    size, name = machine.shape[-1], f"narrow{len(machine.members)}"
    machine.stack.append(machine.argument("narrow"))
    machine.members.append(f"self.{name} = nn.Parameter(torch.zeros({size}))")
    machine.replace(f"{{v}} * self.{name}")


def training(machine: Machine) -> None:
    """The model itself is in training mode, its layers are not."""
    machine.finishing.append("self.training = True")


def returning(form: str) -> Emit:
    """Return the outputs as `form`, in which `{}` are their names."""

    def emit(machine: Machine) -> None:
        machine.returned = form

    return emit


HOOK = "register_forward_hook(double_output)"
PRE_HOOK = "register_forward_pre_hook(double_input)"

CONTROL: dict[str, Emit] = {
    "dup": duplicate,
    "swap": swap,
    "drop": drop,
    "out": output,
    "again": again,
    "recompute": recompute,
    "recompute_otherwise": partial(recompute, halved=True),
    "recall": recall,
    "write_read": write_read,
    "write_layer": write_layer,
    "write_bias": partial(write_layer, bias=True),
    "out_weight": return_weight,
    "out_made": return_made,
    "tie": tie,
    "hook": hook(HOOK),
    "pre_hook": hook(PRE_HOOK),
    "arg": argument,
    "arg_narrow": narrow_argument,
    "arg_mask": mask_argument,
    "arg_tested": option("{v} + {o} if {o} is not None else {v}"),
    "arg_tested_before": option("{n} = {o} is None; {v} if {n} else {v} + {o}"),
    "optional_before": option("{n} = {o} is not None; {v} + {o} if {n} else {v}", "None"),
    "arg_index": index_argument,
    "optional": option("{v} if {o} is None else {v} + {o}", "None"),
    "more": further_arguments,
    "keyword_only": keyword_only,
    "flag": option("{v} * 2.0 if {o} else {v}", "True"),
    "number": option("{v} * {o}", "0.5"),
    "arg_narrow_scaled": narrow_scaled,
    # What it says is said of the whole model: see `Spec`.
    "autocast": lambda machine: None,
    "training": training,
    "mapping": returning("{keyed}"),
    "listing": returning("[{}]"),
    "nested": returning("{{'first': [{}, None], 'second': (1, {{'third': 2.5}})}}"),
}
