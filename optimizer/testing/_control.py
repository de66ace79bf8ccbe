"""Words about the graph itself: fan-out, extra outputs, shared and hooked layers."""

from __future__ import annotations

import re
from functools import partial

from torch import nn

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
    machine.stack.append(machine.argument())


def given(text: str, kind: str) -> Emit:
    """`text`, in which `{a}` is a further argument of this kind, where it is as long as the top."""

    def emit(machine: Machine) -> None:
        if machine.top.shape[0] == machine.shape[0]:
            name = machine.argument(kind).name
            if not machine.write(text.replace("{a}", name)):
                machine.arguments.pop()

    return emit


def option(text: str, default: str = "") -> Emit:
    """`text`, in which `{o}` is an argument; defaults are left out."""

    def emit(machine: Machine) -> None:
        if default or machine.top.shape == machine.shape:
            name = machine.default(default) if default else machine.argument().name
            machine.write(text.replace("{o}", name))

    return emit


def again(machine: Machine) -> None:
    """Call the newest layer that takes the top: it is then called from two places."""
    any(machine.write(f"self.{layer}({{v}})") for layer in reversed(machine.layers))


def _weighted(machine: Machine, name: str = "weight") -> list[str]:
    """The layers with such a parameter, the newest first."""
    modules = {layer: machine.model.get_submodule(layer) for layer in reversed(machine.layers)}
    return [n for n, m in modules.items() if isinstance(getattr(m, name, None), nn.Parameter)]


def newest(machine: Machine) -> str:
    """How the newest value was computed."""
    return computed(machine, machine.history[-1].name)


def computed(machine: Machine, name: str) -> str:
    """How a value was computed, if it was."""
    texts = [text for text in machine.statements if text.startswith(f"{name} = ")]
    return texts[-1].removeprefix(f"{name} = ") if texts else ""


def recompute(machine: Machine, *, otherwise: bool = False, anew: bool = False) -> None:
    """Compute the newest value once more, of what it reads by now, or that anew as well.

    Otherwise with another number for the last that it names: half of a fraction, one index more.
    """
    text = newest(machine)
    if otherwise:
        number = re.compile(r"\b\d+(\.\d+)?\b(?!.*\b\d)")
        text = number.sub(lambda n: str(float(n[0]) / 2 if n[1] else int(n[0]) + 1), text)
    if anew:
        text = re.sub(r"\bv\d+\b", lambda n: f"({computed(machine, n[0]) or n[0]})", text)
    if text:
        machine.stack.append(machine.history[-1])
        machine.write(text)


def recall(machine: Machine) -> None:
    """Push a value of before."""
    machine.stack.append(machine.history[len(machine.history) // 2])


def keyword_only(machine: Machine) -> None:
    """The model has an argument that is given by name alone, and is not given."""
    starred = ["*"] * {"*", "*more"}.isdisjoint(machine.defaults)
    name = f"named{len(machine.defaults)}"
    machine.defaults += [*starred, f"{name}=0.5"]
    machine.scope[name] = 0.5
    machine.write(f"{{v}} * {name}")


def further_arguments(machine: Machine) -> None:
    """The model counts with whether it is given more than it names."""
    if "*" in machine.defaults:
        return
    if "*more" not in machine.defaults:
        machine.defaults.append("*more")
    machine.scope["more"] = ()
    machine.write("{v} * (2.0 if more else 1.0)")


def write_read(machine: Machine) -> None:
    """Write to the last that the newest value was computed from."""
    floating = [each for each in machine.arguments if each.kind == "value"]
    names = {each.name for each in [*machine.history[:-1], *floating]}
    read = [each for each in re.findall(r"\b[vx]\d*\b", newest(machine)) if each in names]
    for name in read[-1:]:
        machine.write(f"{name}.mul_(2.0);")


def write_layer(machine: Machine, *, name: str = "weight") -> None:
    """Write to the weight of the newest layer that has one, or to the bias."""
    for layer in _weighted(machine, name)[:1]:
        machine.write(f"self.{layer}.{name}.mul_(2.0);")


def return_weight(machine: Machine) -> None:
    """Let the caller have the weight of the newest layer that has one."""
    for layer in _weighted(machine)[:1]:
        weight = machine.model.get_parameter(f"{layer}.weight")
        machine.outputs.append(Value(f"self.{layer}.weight", tuple(weight.shape)))


def return_made(machine: Machine) -> None:
    """Let the caller have a tensor that the forward makes of nothing."""
    machine.outputs.append(Value("torch.zeros(3)", (3,)))


def tie(machine: Machine) -> None:
    """Let the two newest layers whose weights have one shape share the Parameter."""
    weighted = _weighted(machine)
    shapes = [machine.model.get_parameter(f"{layer}.weight").shape for layer in weighted]
    for index, newer in enumerate(weighted):
        for older, shape in zip(weighted[index + 1 :], shapes[index + 1 :], strict=True):
            if shape == shapes[index]:
                machine.write(";", finishing=f"self.{newer}.weight = self.{older}.weight")
                return


def finished(text: str, *, norms: bool = True) -> Emit:
    """Do so with the newest layer, `{}`, when all are made; with one of the `norms` if they may."""

    def emit(machine: Machine) -> None:
        for layer in machine.layers[-1:]:
            if norms or "norm" not in layer:
                machine.write(";", finishing=text.format(f"self.{layer}"))

    return emit


def narrow_scaled(machine: Machine) -> None:
    """Push an argument in float32 times a number for each of its last dimension."""
    machine.stack.append(machine.argument("narrow"))
    machine.write("{v} * self.{m}", members="self.{m} = nn.Parameter(torch.zeros({last}))")


def optional_given(machine: Machine) -> None:
    """One more argument; all but the first have a default, and are given."""
    machine.optional = "=None"
    argument(machine)


def training(machine: Machine) -> None:
    """The model itself is in training mode, its layers are not."""
    machine.finishing.append("self.training = True")


def returning(form: str) -> Emit:
    """Return the outputs as `form`, in which `{}` are their names."""

    def emit(machine: Machine) -> None:
        machine.returned = form

    return emit


CONTROL: dict[str, Emit] = {
    "dup": duplicate,
    "swap": swap,
    "drop": drop,
    "out": output,
    "again": again,
    "recompute": recompute,
    "recompute_otherwise": partial(recompute, otherwise=True),
    "recompute_anew": partial(recompute, otherwise=True, anew=True),
    "recall": recall,
    "first": lambda machine: machine.stack.append(machine.history[0]),
    "write_read": write_read,
    "write_layer": write_layer,
    "write_bias": partial(write_layer, name="bias"),
    "out_weight": return_weight,
    "out_made": return_made,
    "tie": tie,
    "hook": finished("{}.register_forward_hook(double_output)"),
    "pre_hook": finished("{}.register_forward_pre_hook(double_input)"),
    "train_layer": finished("{}.train()", norms=False),  # a norm cannot train on one row
    "arg": argument,
    "arg_narrow": given("{v} + {a}", "narrow"),
    "arg_mask": given("{v}[{a}] = 0.5;", "mask"),
    "arg_tested": option("{v} + {o} if {o} is not None else {v}"),
    "arg_tested_before": option("{n} = {o} is None; {v} if {n} else {v} + {o}"),
    "optional_before": option("{n} = {o} is not None; {v} + {o} if {n} else {v}", "None"),
    "arg_index": given("{v}[{a}]", "index"),
    "optional_given": optional_given,
    "optional": option("{v} if {o} is None else {v} + {o}", "None"),
    "more": further_arguments,
    "keyword_only": keyword_only,
    "flag": option("{v} * 2.0 if {o} else {v}", "True"),
    "number": option("{v} * {o}", "0.5"),
    "option_alpha": option("{v}.add({v}, alpha={o})", "2"),
    "option_dim": option("{v}.softmax({o})", "-2"),
    "option_drop": option("F.dropout({v}, 0.5, {o})", "False"),
    "option_slope": option("F.leaky_relu({v}, {o})", "0.1"),
    "arg_narrow_scaled": narrow_scaled,
    # What it says is said of the whole model: see `Spec`.
    "autocast": lambda machine: None,
    "training": training,
    "mapping": returning("{keyed}"),
    "listing": returning("[{}]"),
    "nested": returning("{{'first': [{}, None], 'second': (1, {{'third': 2.5}})}}"),
}
