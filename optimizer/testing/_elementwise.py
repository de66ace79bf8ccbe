"""Tokens that keep the shape: ReLU, sums, products, Dropout and Identity, in every spelling."""

from __future__ import annotations

from math import prod

from optimizer.testing._machine import MAX_DEGREE, MODULE, Emit, Machine, Shape, ranked


def expression(text: str, *before: str) -> Emit:
    """`text` becomes the top, after statements `before`: `{v}` is the top, `{n}` a new name."""

    def emit(machine: Machine) -> None:
        name = f"n{len(machine.statements)}"
        for each in before:
            machine.do(each.replace("{n}", name))
        if text:
            machine.replace(text.replace("{n}", name))

    return emit


def statement(*texts: str) -> Emit:
    """`texts` are executed; the top stays."""
    return expression("", *texts)


def member(kind: str, constructor: str, *, training: bool = False, spelling: str = MODULE) -> Emit:
    """A parameterless submodule called on the top."""

    def emit(machine: Machine) -> None:
        layer = machine.add(kind, constructor, _same)
        if training:
            machine.finishing.append(f"self.{layer.name}.train()")
        machine.call(layer, spelling)

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


def squared(machine: Machine) -> None:
    if 2 * machine.top.degree <= MAX_DEGREE:
        machine.replace("{v} ** 2", degree=2 * machine.top.degree)


def broadcast(text: str, *before: str) -> Emit:
    """`expression` of something smaller that is made of the top; nothing for what is empty."""
    emit = expression(text, *before)
    return lambda machine: emit(machine) if prod(machine.top.shape) else None


def in_four(text: str) -> Emit:
    """`text` of the top in four dimensions, of which it has two at least."""

    def emit(machine: Machine) -> None:
        missing = 4 - len(machine.top.shape)
        if missing in (0, 1, 2):
            given = "{v}" + "[None]" * missing
            machine.replace(f"({text.replace('{v}', given)})" + "[0]" * missing)

    return emit


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
    "sub": binary("{w} - {v}"),
    "sub_method": binary("{w}.sub({v}, alpha=2)"),
    "rsub": expression("1.0 - {v}"),
    "rsub_torch": expression("torch.rsub({v}, 2.0, alpha=0.5)"),
    "div": binary("{w} / ({v}.abs() + 1.0)"),
    "div_scalar": expression("torch.div({v}, 4)"),
    "neg": expression("-{v}"),
    "neg_torch": expression("torch.neg({v})"),
    "neg_method": expression("{v}.neg()"),
    "abs": expression("{v}.abs()"),
    "square": squared,
    "maximum": binary("torch.maximum({w}, {v})"),
    "lerp": binary("torch.lerp({w}, {v}.type_as({w}), 0.5)"),
    "addcmul": binary("torch.addcmul({w}, {v}.tanh(), {v}.tanh(), value=0.5)"),
    "center": broadcast("{v} - {v}.mean(-1, keepdim=True)"),
    "add_row": broadcast("{v} + {v}[:1]"),
    "scale_column": broadcast("{v} * {v}[..., :1].sigmoid()"),
    "add_outer": broadcast("{v}.sum(0) + {v}"),
    "add_alpha": binary("torch.add({w}, {v}, alpha=2)"),
    "add_method": binary("{w}.add({v})"),
    "sub_plain": binary("{w}.sub({v})"),
    "swish_gate": binary("{w} * torch.sigmoid({v})"),
    "attention_scaled": ranked(2, expression("F.softmax(({v} * 0.5) @ {v}.mT, dim=-1) @ {v}")),
    "attention_narrow": in_four(
        "{v} + F.softmax({v} @ {v}.mT, dim=-1, dtype=torch.float32) @ {v}.float()"
    ),
    "attention_maps": ranked(2, expression("(w := ({v} @ {v}.mT).softmax(-1)) @ {v} + w.mean()")),
    "attention_masked": ranked(2, expression("({v} @ {v}.mT + {v}.mean()).softmax(-1) @ {v}")),
    "attention_columns": ranked(2, expression("({v} @ {v}.mT).softmax(-2) @ {v}")),
    "attention_biased": in_four(
        "(({v} @ {v}.mT) / 2 - torch.arange({v}.shape[-2])).softmax(-1) @ {v}"
    ),
    "attention_causal": in_four(
        "({v} @ {v}.mT).masked_fill(torch.ones({v}.shape[-2:-1] * 2).triu(1) > 0, -torch.inf)"
        ".softmax(-1) @ {v}"
    ),
    # The clone is for a view of what is written: torch refuses to read and write it at once.
    "iadd": binary("{w}.add_({v}.clone())"),
    "iadd_alpha": binary("{w}.add_({v}.clone(), alpha=0.5)"),
    "isub": statement("{v} -= 0.5"),
    "imul": statement("{v} *= -1.0"),
    "idiv": expression("{v}.div_(2.0)"),
    "ineg": statement("torch.neg_({v})"),
    "into": statement("torch.mul({v}, 0.5, out={v})"),
    "icopy": statement("{v}.copy_({v}.tanh())"),
    "izero": ranked(2, statement("{v}[:1].zero_()")),
    "ishift": statement("{v} += 1.0"),
    "idouble": expression("{v}.mul_(2.0)"),
    "idouble_statement": statement("{v}.mul_(2.0)"),
    "iview_statement": ranked(2, statement("{v}.transpose(0, 1).mul_(2.0)")),
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
    "plus_zero": expression("{v} + 0.0"),
    "minus_zero": expression("{v} - 0"),
    "over_one": expression("{v} / 1"),
    "power_one": expression("{v} ** 1"),
    "cast_same": expression("{v}.to({v}.dtype)"),
    "cast_wide": expression("{v}.double().to({v}.dtype)"),
    "type_as": expression("{v}.type_as({v})"),
    "detach": expression("{v}.detach()"),
    "dropout_feature": member("dropout", "nn.FeatureAlphaDropout(0.5)"),
    "dropout_F_train": expression("F.dropout({v}, 0.25, True)"),
    "droppath": expression("{v} if not self.training else {v} * 0.0"),
    "times_one": expression("{v} * 1.0"),
}
