"""Tokens for what Python does around tensors: keywords, constants of numpy, NaN from within."""

from __future__ import annotations

from optimizer.testing._convolutions import conv
from optimizer.testing._elementwise import broadcast, expression
from optimizer.testing._layers import linear
from optimizer.testing._machine import KEYWORD, Emit, Machine, ranked
from optimizer.testing._outside import OUTSIDE

HELPERS = OUTSIDE | {
    "doubled_by_keyword": """\
def doubled_by_keyword(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        doubled = {n: 2 * x if x.is_floating_point() else x for n, x in kwargs.items()}
        return forward(self, *args, **doubled)

    return wrapper
""",
    "without_gradients": """\
def without_gradients(value):
    with torch.no_grad():
        return value * 2.0
""",
    "by_gradients": """\
def by_gradients(value):
    return value * 3.0 if torch.is_grad_enabled() else value * 2.0
""",
    "forked": """\
def forked(value):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return value + torch.rand((), dtype=torch.float64)
""",
    "seeded": """\
def seeded(value):
    state = torch.get_rng_state()
    torch.manual_seed(3)
    drawn = torch.rand((), dtype=torch.float64)
    torch.set_rng_state(state)
    return value + drawn
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
    "Retuned": """\
class Retuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaky = nn.LeakyReLU(0.5)

    def forward(self, input):
        self.leaky.negative_slope = 0.25
        result = self.leaky(input)
        self.leaky.negative_slope = 0.5
        return result
""",
    "Viewing": """\
class Viewing(nn.Module):
    def forward(self, input):
        return input * 2.0 if input.sum().isnan() else input.view_as(input)
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


def helped(name: str) -> Emit:
    """The top given to a function of `HELPERS`."""

    def emit(machine: Machine) -> None:
        machine.helpers.add(name)
        machine.replace(f"{name}({{v}})")

    return emit


def called(name: str) -> Emit:
    """A layer of `HELPERS` that keeps the shape, and has no weights."""

    def emit(machine: Machine) -> None:
        machine.helpers.add(name)
        machine.call(machine.add("called", f"{name}()", lambda shape: shape))

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
    "no_grad": helped("without_gradients"),
    "grad_enabled": helped("by_gradients"),
    "fork_rng": helped("forked"),
    "set_rng_state": helped("seeded"),
    "draw_normal": expression("{v} + torch.normal(0.0, 1.0, ())"),
    "linear_keyed": linear(cls="Keyed"),
    "linear_keyed_kw": linear(cls="Keyed", spelling=KEYWORD),
    "linear_held": linear(cls="Held"),
    "view_opaque": called("Viewing"),
    "retuned": called("Retuned"),
    **{name.lower(): called(name) for name in OUTSIDE},
    "linear_grandchild": linear(cls="Grandparent"),
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
