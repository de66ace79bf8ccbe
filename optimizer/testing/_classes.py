"""Tokens for what Python does around tensors: keywords, constants of numpy, NaN from within."""

from __future__ import annotations

from optimizer.testing._convolutions import conv
from optimizer.testing._elementwise import broadcast, expression
from optimizer.testing._layers import linear
from optimizer.testing._machine import KEYWORD, Emit, Machine, ranked
from optimizer.testing._outside import OUTSIDE
from optimizer.testing._python import PYTHON

HELPERS = {
    **OUTSIDE,
    **PYTHON,
    "doubled_by_keyword": """\
def doubled_by_keyword(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        doubled = {n: 2 * x if x.is_floating_point() else x for n, x in kwargs.items()}
        return forward(self, *args, **doubled)

    return wrapper
""",
    "Keyed": """\
def told_keywords(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        factor = 2.0 if "input" in kwargs else 1.0
        return forward(self, *args, **kwargs) * factor

    return wrapper


class Keyed(nn.Linear):
    @told_keywords
    def forward(self, input):
        return super().forward(input)
""",
    "Held": """\
class Held(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", weight)
""",
    "single_linear": """\
def single_linear(size, hold):
    linear = nn.Linear(size, size)
    del linear.weight, linear.bias
    hold(linear, "weight", torch.arange(size * size).reshape(size, size) % 5 - 2.0)
    hold(linear, "bias", torch.arange(size) % 3 - 1.0)
    linear.single = torch.float32
    return linear
""",
    "Grandparent": """\
class Untraceable(nn.Linear):
    def forward(self, input):
        return super().forward(input) * (1 if input.sum().isnan() else 2)


class Parent(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.before = nn.Linear(*sizes)
        self.child = Untraceable(*sizes)

    def forward(self, input):
        return self.child(self.before(input).relu())


class Grandparent(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.parent = Parent(*sizes)

    def forward(self, input):
        return self.parent(input) + 1.0
""",
}


def called(name: str) -> Emit:
    """A layer of `HELPERS` that keeps the shape, and has no weights."""

    def emit(machine: Machine) -> None:
        machine.helpers.add(name)
        machine.call(machine.add("called", f"{name}()", lambda shape: shape))

    return emit


def written_part(name: str) -> Emit:
    """A layer of `HELPERS` that gives an object, of which what it holds is written and read."""
    parts = ("{n} = self.{m}({v})", "{n}[0].mul_(2.0)", "{n}[1].add_(1.0)")

    def emit(machine: Machine) -> None:
        machine.helpers.add(name)
        layer = machine.add("called", f"{name}()", lambda shape: None)
        given = [each.replace("{m}", layer.name) for each in parts]
        expression("{v} + {n}[0] * {n}[1]", *given)(machine)

    return emit


def single(hold: str, spelling: str) -> Emit:
    """A Linear in float32 of what is above zero, which rounds nothing, times the model's own."""

    def emit(machine: Machine) -> None:
        if size := machine.top.shape[-1]:
            name = f"single{len(machine.members)}"
            machine.helpers.add("single_linear")
            machine.members += [
                f"self.{name} = single_linear({size}, {hold})",
                f"self.{name}_scale = nn.Parameter(torch.zeros({size}))",
            ]
            machine.replace(spelling.replace("{m}", name) + f" * self.{name}_scale")

    return emit


def branches(machine: Machine) -> None:
    """The top, what a convolution and what one for each channel makes of it, added."""
    shape, first = machine.top.shape, machine.top
    conv(3, padding=1)(machine)
    dense = machine.top
    machine.stack[-1] = first
    conv(3, padding=1, grouped=True)(machine)
    if dense is not first and machine.top.shape == dense.shape == shape:
        machine.replace(f"{dense.name} + {{v}} + {first.name}")


def residuals(machine: Machine) -> None:
    """Two Linear layers, each added to what it reads."""
    for _ in range(2):
        before = machine.top
        linear()(machine)
        machine.replace(f"{{v}} + {before.name}")


def decorated(machine: Machine) -> None:
    """The model's forward tells arguments given by keyword from others."""
    machine.helpers.add("doubled_by_keyword")


CLASSES: dict[str, Emit] = {
    "decorated": decorated,
    "draw_normal": expression("{v} + torch.normal(0.0, 1.0, ())"),
    "linear_keyed": linear(cls="Keyed"),
    "linear_keyed_kw": linear(cls="Keyed", spelling=KEYWORD),
    "linear_held": linear(cls="Held"),
    **{f"{name.lower()}_written": written_part(name) for name in ("Py_hides", "Unknown_Py_hides")},
    **{name.lower(): called(name) for name in OUTSIDE | PYTHON if "hides" not in name},
    "linear_grandchild": linear(cls="Grandparent"),
    "linear_single": single("nn.Module.register_buffer", "self.{m}(({v} > 0).float())"),
    "linear_plain": single("setattr", "self.{m}(({v} > 0).float()).relu()"),
    "numpy_scale": expression("{v} * np.float64(0.5)"),
    "numpy_shift": expression("{v} + np.float32(2.0)"),
    "zero_over_zero": expression("{v} + (({v} - {v}) / ({v} - {v})).nan_to_num(0.0)"),
    "blank_deviation": ranked(
        2, broadcast("{n} / {n}.std(-1, keepdim=True, correction=0)", "{n} = {v} - {v}")
    ),
    "log_negative": expression("({v}.abs() + 1.0).log() + ({v}.clamp(-1.0, 0.0) - 1.0).log()"),
    "branches": ranked(3, branches),
    "residuals": residuals,
}
