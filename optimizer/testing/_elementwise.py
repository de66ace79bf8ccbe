"""Tokens that keep the shape: ReLU, sums, products, Dropout and Identity, in every spelling."""

from __future__ import annotations

from optimizer.testing._layers import Emit
from optimizer.testing._machine import Machine, Shape


def expression(text: str) -> Emit:
    """`text`, in which `{v}` is the top, becomes the top."""
    return lambda machine: machine.replace(text)


def statement(text: str) -> Emit:
    """`text`, in which `{v}` is the top, is executed; the top stays."""
    return lambda machine: machine.do(text)


def member(kind: str, constructor: str, *, training: bool = False) -> Emit:
    """A parameterless submodule called on the top."""

    def emit(machine: Machine) -> None:
        layer = machine.add(kind, constructor, _same)
        if training:
            machine.finishing.append(f"self.{layer.name}.train()")
        machine.call(layer)

    return emit


def binary(text: str) -> Emit:
    """`text` of the top `{v}` and the value below it `{w}` (the top twice if shapes differ)."""

    def emit(machine: Machine) -> None:
        below = machine.below()
        machine.combine(text, below, max(machine.top.degree, below.degree))

    return emit


def product(machine: Machine) -> None:
    below = machine.below()
    machine.combine("{v} * {w}", below, machine.top.degree + below.degree)


def residual(machine: Machine) -> None:
    """Add the oldest value of the top's shape."""
    oldest = next(value for value in machine.history if value.shape == machine.top.shape)
    degree = max(machine.top.degree, oldest.degree)
    machine.replace(f"{{v}} + {oldest.name}", degree=degree)


def _same(shape: Shape) -> Shape:
    return shape


RELUS: dict[str, Emit] = {
    "relu": member("relu", "nn.ReLU()"),
    "relu_F": expression("F.relu({v})"),
    "relu_torch": expression("torch.relu({v})"),
    "relu_method": expression("{v}.relu()"),
    "relu_kw": expression("F.relu(input={v})"),
    "relu_inplace": member("relu", "nn.ReLU(inplace=True)"),
    "relu_F_inplace": expression("F.relu({v}, inplace=True)"),
    "relu_method_inplace": expression("{v}.relu_()"),
    "relu_torch_inplace": expression("torch.relu_({v})"),
    "relu_statement": statement("{v}.relu_()"),
}

ARITHMETIC: dict[str, Emit] = {
    "add": binary("{w} + {v}"),
    "mul": product,
    "residual": residual,
    "double": expression("{v} * 2.0"),
    "halve": expression("0.5 * {v}"),
    "shift": expression("{v} + 1"),
    "add_alpha": binary("torch.add({w}, {v}, alpha=2)"),
    "add_method": binary("{w}.add({v})"),
    "leaky": expression("F.leaky_relu({v}, 0.5)"),
    "tanh": expression("torch.tanh({v})"),
    "swish": expression("{v} * torch.sigmoid({v})"),
    "swish_gate": binary("{w} * torch.sigmoid({v})"),
    "hardswish": expression("{v} * F.relu6({v} + 3, inplace=True) / 6"),
    "hardsigmoid": expression("torch.clamp({v} + 3.0, 0, 6) / 6.0"),
    "gelu": expression("{v} * 0.5 * (1 + torch.erf({v} / 2.0**0.5))"),
    "gelu_tanh": expression(
        "{v} * 0.5 * (1 + torch.tanh((2 / 3.141592653589793) ** 0.5 * ({v} + 0.044715 * {v} ** 3)))"
    ),
    # The clone is for a view of what is written: torch refuses to read and write it at once.
    "iadd": binary("{w}.add_({v}.clone())"),
    "ishift": statement("{v} += 1.0"),
    "idouble": expression("{v}.mul_(2.0)"),
    "idouble_statement": statement("{v}.mul_(2.0)"),
    "iview_statement": statement("{v}.transpose(0, 1).mul_(2.0)"),
}

IDENTITIES: dict[str, Emit] = {
    "identity": member("identity", "nn.Identity()"),
    "dropout": member("dropout", "nn.Dropout(0.5)"),
    "dropout_F": expression("F.dropout({v}, 0.5, training=self.training)"),
    "dropout_F_off": expression("F.dropout({v}, p=0.5, training=False)"),
    "dropout_torch": expression("torch.dropout({v}, 0.5, False)"),
    "dropout_inplace": member("dropout", "nn.Dropout(0.5, inplace=True)"),
    "dropout_alpha": member("dropout", "nn.AlphaDropout(0.5)"),
    "dropout_train": member("dropout", "nn.Dropout(0.5)", training=True),
    "clone": expression("{v}.clone()"),
    "contiguous": expression("{v}.contiguous()"),
    "times_one": expression("{v} * 1.0"),
}
