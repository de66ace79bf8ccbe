"""Tokens that keep the shape and bend the values, in the spellings that models use.

None is steep anywhere: a rounding error that goes in must not come out as a difference.
"""

from __future__ import annotations

from optimizer.testing._elementwise import expression, member, statement
from optimizer.testing._machine import Emit

ACTIVATIONS: dict[str, Emit] = {
    "sigmoid": expression("{v}.sigmoid()"),
    "tanh": expression("torch.tanh({v})"),
    "leaky": expression("F.leaky_relu({v}, 0.5)"),
    "leaky_module": member("leaky", "nn.LeakyReLU(0.25)"),
    "leaky_inplace": expression("F.leaky_relu_({v}, 0.5)"),
    "relu6": member("relu6", "nn.ReLU6()"),
    "relu6_F": expression("F.relu6({v})"),
    "clamp": expression("{v}.clamp(-1.0, 2.0)"),
    "clamp_min": expression("torch.clamp({v}, min=0)"),
    "clamp_max": expression("{v}.clamp(max=1.0)"),
    "clamp_statement": statement("{v}.clamp_(min=-1.0)"),
    "hardtanh": member("hardtanh", "nn.Hardtanh(-2.0, 1.0, inplace=True)"),
    "elu": member("elu", "nn.ELU(inplace=True)"),
    "selu": expression("F.selu({v})"),
    "silu": member("silu", "nn.SiLU()"),
    "silu_inplace": member("silu", "nn.SiLU(inplace=True)"),
    "relu6_inplace": member("relu6", "nn.ReLU6(inplace=True)"),
    "hardswish_inplace": member("hardswish", "nn.Hardswish(inplace=True)"),
    "silu_F": expression("F.silu({v}, inplace=True)"),
    "mish": expression("F.mish({v})"),
    "softplus": member("softplus", "nn.Softplus()"),
    "gelu_module": member("gelu", "nn.GELU()"),
    "gelu_F": expression("F.gelu({v}, approximate='tanh')"),
    "hardswish_module": member("hardswish", "nn.Hardswish()"),
    "hardsigmoid_F": expression("F.hardsigmoid({v})"),
    "softmax": expression("{v}.softmax(-1)"),
    "softmax_kw": expression("F.softmax(input={v}, dim=0)"),
    "softmax_narrow": expression("{v} + F.softmax({v}, -1, dtype=torch.float32)"),
    "softmax_module": member("softmax", "nn.Softmax(dim=-1)"),
    "log_softmax": expression("F.log_softmax({v}, dim=-1)"),
    "swish": expression("{v} * torch.sigmoid({v})"),
    "hardswish": expression("{v} * F.relu6({v} + 3, inplace=True) / 6"),
    "hardsigmoid": expression("torch.clamp({v} + 3.0, 0, 6) / 6.0"),
    "gelu": expression("{v} * 0.5 * (1 + torch.erf({v} / 2.0**0.5))"),
    "gelu_tanh": expression(
        "{v} * 0.5 * (1 + torch.tanh((2 / 3.141592653589793) ** 0.5 * ({v} + 0.044715 * {v} ** 3)))"
    ),
}
