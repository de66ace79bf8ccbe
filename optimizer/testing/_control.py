"""Words about the graph itself: fan-out, extra outputs, shared and hooked layers."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from optimizer.testing._machine import Emit, Machine, Value, returned


def drop(machine: Machine) -> None:
    if len(machine.stack) > 1:
        machine.stack.pop()


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


def recomputed(change: Callable[[Machine, str], str]) -> Emit:
    """Compute the newest value once more, of what it reads by now, as `change` says if at all."""

    def emit(machine: Machine) -> None:
        text = newest(machine)
        changed = change(machine, text) if text else ""
        if changed:
            machine.stack.append(machine.history[-1])
            machine.write(changed)

    return emit


def otherwise(_: Machine, text: str) -> str:
    """With another number for the last one: half of a fraction, one index more."""
    number = re.compile(r"\b\d+(\.\d+)?\b(?!.*\b\d)")
    return number.sub(lambda n: str(float(n[0]) / 2 if n[1] else int(n[0]) + 1), text)


def anew(machine: Machine, text: str) -> str:
    """The same, with what it reads computed anew as well."""
    text = otherwise(machine, text)
    return re.sub(r"\bv\d+\b", lambda n: f"({computed(machine, n[0]) or n[0]})", text)


_FUNCTIONS = "transpose movedim tanh sigmoid relu swapaxes add mul sub mean sum softmax maximum"
_OTHERS = "movedim transpose sigmoid tanh tanh movedim sub sub add sum mean log_softmax minimum"
_ANOTHER = dict(zip(_FUNCTIONS.split(), _OTHERS.split(), strict=True))


def another(_: Machine, text: str) -> str:
    """With other functions, which take the same."""
    return re.sub(r"\w+(?=\()", lambda name: _ANOTHER.get(name[0], name[0]), text)


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


def tie(machine: Machine) -> None:
    """Let the two newest layers whose weights have one shape share the Parameter."""
    for newer, older in combinations(_weighted(machine), 2):
        one, other = (machine.model.get_parameter(f"{each}.weight") for each in (newer, older))
        if one.shape == other.shape:
            machine.write(";", finishing=f"self.{newer}.weight = self.{older}.weight")
            return


def finished(text: str, *, norms: bool = True) -> Emit:
    """Do so with the newest layer, `{}`, when all are made; with one of the `norms` if they may."""

    def emit(machine: Machine) -> None:
        for layer in machine.layers[-1:]:
            if norms or "Norm" not in repr(machine.model.get_submodule(layer)):
                machine.write(";", finishing=text.format(f"self.{layer}"))

    return emit


def narrow_scaled(machine: Machine) -> None:
    """Push an argument in float32 times a number for each of its last dimension."""
    machine.stack.append(machine.argument("narrow"))
    machine.write("{v} * self.{m}", members="self.{m} = nn.Parameter(torch.zeros({last}))")


def optional_given(machine: Machine) -> None:
    """One more argument; all but the first have a default, and are given."""
    machine.optional = "=None"
    machine.stack.append(machine.argument())


def returning(form: str) -> Emit:
    """Return the outputs as `form`, in which `{}` are their names."""
    return lambda machine: setattr(machine, "returned", form)


CONTROL: dict[str, Emit] = {
    "dup": lambda machine: machine.stack.append(machine.top),
    "swap": lambda machine: machine.stack.insert(-1, machine.stack.pop()),
    "drop": drop,
    "out": lambda machine: machine.outputs.append(machine.top),
    "again": again,
    "recompute": recomputed(lambda _, text: text),
    "recompute_otherwise": recomputed(otherwise),
    "recompute_anew": recomputed(anew),
    "recompute_another": recomputed(another),
    "recall": lambda machine: machine.stack.append(machine.history[len(machine.history) // 2]),
    "first": lambda machine: machine.stack.append(machine.history[0]),
    "write_read": write_read,
    "write_layer": write_layer,
    "write_bias": partial(write_layer, name="bias"),
    "out_weight": return_weight,
    "out_made": lambda machine: machine.outputs.append(Value("torch.zeros(3)", (3,))),
    "tie": tie,
    "hook": finished("{}.register_forward_hook(double_output)"),
    "pre_hook": finished("{}.register_forward_pre_hook(double_input)"),
    "train_layer": finished("{}.train()", norms=False),  # a norm cannot train on one row
    "arg": lambda machine: machine.stack.append(machine.argument()),
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
    # The model itself is in training mode, its layers are not.
    "training": lambda machine: machine.finishing.append("self.training = True"),
    "mapping": returning("{keyed}"),
    "listing": returning("[{}]"),
    "nested": returning("{{'first': [{}, None], 'second': (1, {{'third': 2.5}})}}"),
}


# Each keeps the shape and the dtype, and may change the numbers or the memory.
KEYWORDS = {
    "alpha": "0.5", "beta": "0.25", "rounding_mode": "'floor'",
    "memory_format": "torch.contiguous_format", "divisor_override": "3",
    "count_include_pad": "False", "accumulate": "True", "scale": "0.75", "is_causal": "True",
}  # fmt: skip
_LISTS = frozenset(("shape", "size", "dims"))
_NAMESPACES: dict[str, Any] = {"torch": torch, "F": functional, "nn": nn}


def overloads(call: ast.Call) -> list[tuple[list[str], set[str]]]:
    """What a call of torch takes by position, and by name, once for each overload that fits it."""
    if not isinstance(call.func, ast.Attribute):
        return []
    name, home = call.func.attr, ast.unparse(call.func.value)
    function, method = getattr(_NAMESPACES.get(home), name, None), home not in _NAMESPACES
    if inspect.isfunction(function) or inspect.isclass(function):
        parameters = inspect.signature(function).parameters
        placed = [name for name, each in parameters.items() if each.kind != each.KEYWORD_ONLY]
        return [] if "args" in parameters else [(placed, {*parameters})]
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or home.startswith("self.") or not (method or function):
        return []
    found = []
    for schema in [getattr(packet, each)._schema for each in packet.overloads()]:
        every = ["input" if each.name == "self" else each.name for each in schema.arguments]
        placed = every[: sum(not each.kwarg_only for each in schema.arguments)]
        fits = len(placed) >= len(call.args) + method and "Dimname" not in str(schema)
        if fits and (every[:1] == ["input"] or not method):
            found.append((placed[method:], set(every)))
    return found


def _by_name(call: ast.Call) -> None:
    """Give by name, last first, what all overloads call alike; one number is no list of them."""
    known = {tuple(placed[: len(call.args)]) for placed, _ in overloads(call)}
    names = known.pop() if len(known) == 1 else ()
    listed = any(isinstance(each, ast.Tuple | ast.List) for each in call.args)
    # Of numbers, the input has another name where it does not come first.
    if "input" not in names[1:] and (listed or _LISTS.isdisjoint(names)):
        given = [*map(ast.keyword, names, call.args)]
        call.args, call.keywords = call.args[len(names) :], [*given[::-1], *call.keywords]


def _by_position(call: ast.Call) -> None:
    """Give by position what all overloads call alike, up to the first that is left out."""
    every = {tuple(placed[len(call.args) :]) for placed, _ in overloads(call)}
    for name in every.pop() if len(every) == 1 else ():
        given = [each for each in call.keywords if each.arg == name]
        if not given:
            return
        call.args.append(given[0].value)
        call.keywords.remove(given[0])


def _with_keywords(call: ast.Call) -> None:
    """Give all of `KEYWORDS` that it takes."""
    for name, value in KEYWORDS.items():
        given = {each.arg for each in call.keywords}
        for placed, every in overloads(call):
            taken = given.union(placed[: len(call.args)])
            if name in every - taken and given <= every:
                call.keywords.append(ast.keyword(name, ast.parse(value, mode="eval").body))
                break


def respelled(change: Callable[[ast.Call], None]) -> Emit:
    """Change all calls of torch of the newest statement, and of the newest layer's making."""

    def emit(machine: Machine) -> None:
        for lines in (machine.statements, machine.members):
            tree = ast.parse(lines[-1] if lines else "")
            before = ast.unparse(tree)
            for call in [each for each in ast.walk(tree) if isinstance(each, ast.Call)]:
                change(call)
            if (after := ast.unparse(tree)) != before:
                lines[-1] = after

    return emit


def written_within(machine: Machine, text: str) -> str:
    """What it reads is written when one part is computed."""
    kinds = ast.Call | ast.BinOp | ast.Compare
    parts = [ast.unparse(each) for each in ast.walk(ast.parse(text)) if isinstance(each, kinds)]
    names = {each.name for each in machine.history}
    for part in reversed(parts[1:]):  # the innermost of those that read a value
        for name in [each for each in re.findall(r"\w+", part) if each in names][:1]:
            rest = parts[0].replace(part, "{n}")
            return f"{{n}} = {part}; {name}.mul_(2.0); {rest}"
    return ""


def turned(_: Machine, text: str, *, within: bool = False) -> str:
    """What stands left and right is exchanged.

    Of the whole expression, or within it of the last operation with a number.
    """
    tree = ast.parse(text, mode="eval")
    operations = [each for each in ast.walk(tree) if isinstance(each, ast.BinOp)]
    if within:
        operations = [o for o in operations if isinstance(o.right, ast.Constant)][::-1]
    for operation in [each for each in operations[:1] if within or each is tree.body]:
        operation.left, operation.right = operation.right, operation.left
        return ast.unparse(tree)
    return ""


def into_new(machine: Machine) -> None:
    """Compute the newest value once more into a tensor that the caller gets too."""
    text = newest(machine).removesuffix(")")
    if text.startswith("torch."):
        machine.stack.append(machine.history[-1])
        returned(f"{{n}} = torch.empty_like({{v}}); {text}, out={{n}})")(machine)


# The functions of layers, and what these take of them after the input.
_OF_LAYERS = {
    "Linear": "linear weight bias",
    "Conv": "conv{d}d weight bias stride padding dilation groups",
    "ConvTranspose": "conv_transpose{d}d weight bias stride padding output_padding groups dilation",
    "BatchNorm": "batch_norm running_mean running_var weight bias training momentum eps",
    "AvgPool": "avg_pool{d}d kernel_size stride padding ceil_mode count_include_pad",
    "LeakyReLU": "leaky_relu negative_slope inplace",
    "Dropout": "dropout p training inplace",
}


def by_function(machine: Machine) -> None:
    """Call, in the place of the newest layer, the function of its tensors and settings."""
    found = re.fullmatch(r"(\w+ = )self\.(\w+)\((\w+)\)", (machine.statements or [""])[-1])
    layer = machine.model.get_submodule(found[2]) if found else None
    named = re.fullmatch(r"(\D+?)(\d?)d?", type(layer).__name__)
    function, *names = _OF_LAYERS.get(named[1] if named else "", "").split() or [""]
    values = [getattr(layer, name, None) for name in names]
    missing = None in (*values[:1], getattr(layer, "momentum", 0))  # which functions must be told
    if missing or not (found and named and values):
        return
    given = [
        f"self.{found[2]}.{name}" if isinstance(value, torch.Tensor) else repr(value)
        for name, value in zip(names, values, strict=True)
    ]
    call = f"F.{function.format(d=named[2])}({', '.join([found[3], *given])})"
    machine.statements[-1] = found[1] + call


RESPELLED: dict[str, Emit] = {
    "by_name": respelled(_by_name),
    "by_position": respelled(_by_position),
    "with_keywords": respelled(_with_keywords),
    "written_within": recomputed(written_within),
    "turned": recomputed(turned),
    "turned_within": recomputed(partial(turned, within=True)),
    "into_new": into_new,
    "by_function": by_function,
}
