"""The shape rules that stand in for a run on meta tensors agree with a run, or say nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizer.core.inputs import storages_in
from optimizer.facts.propagation import Facts
from optimizer.facts.shape_rules import known_outcome
from optimizer.passes.fuse import LinearReLU

ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.Tanh,
)  # fmt: skip
LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in ACTIVATIONS},
    "in place": lambda: nn.ReLU(inplace=True),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "LayerNorm of two": lambda: nn.LayerNorm((3, 4)),
    "LayerNorm without weights": lambda: nn.LayerNorm(4, elementwise_affine=False),
    "LayerNorm in float64": lambda: nn.LayerNorm(4).double(),
    "Linear": lambda: nn.Linear(4, 5),
    "LinearReLU": lambda: LinearReLU.of(nn.Linear(4, 5)),
    "Linear in float64": lambda: nn.Linear(4, 5).double(),
    "Conv1d": lambda: nn.Conv1d(3, 5, 2),
    "Conv2d": lambda: nn.Conv2d(3, 6, (3, 1), stride=2, padding=(1, 0), dilation=(1, 2), groups=3),
    "Conv2d of one pixel": lambda: nn.Conv2d(3, 6, (5, 4), bias=False),
    "Conv2d of more than there is": lambda: nn.Conv2d(3, 6, 5),
    "Conv2d of a border": lambda: nn.Conv2d(3, 6, 1, padding=1),
    "Conv2d in channels last": lambda: nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last),
    "Conv2d, same": lambda: nn.Conv2d(3, 6, 3, padding="same"),
    "Conv2d, circular": lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"),
    "Conv2d, circular by too much": lambda: nn.Conv2d(3, 6, 3, padding=9, padding_mode="circular"),
    "Conv2d in float64": lambda: nn.Conv2d(3, 6, 3).double(),
    "Conv2d with another bias": lambda: with_other(nn.Conv2d(3, 6, 3), bias=torch.ones(6).double()),
    "Conv2d with a long bias": lambda: with_other(nn.Conv2d(3, 6, 3), bias=torch.ones(7)),
    "Conv2d with another weight": lambda: with_other(
        nn.Conv2d(9, 6, 3), weight=torch.ones(6, 3, 1, 1)
    ),
    "Conv2d with groups that leave some": lambda: with_other(
        nn.Conv2d(3, 6, 3, groups=3, bias=False), weight=torch.ones(5, 1, 3, 3)
    ),
    "Conv2d that steps back": lambda: with_setting(nn.Conv2d(3, 6, (5, 4)), stride=(-1, 1)),
    "Conv2d that stretches by nothing": lambda: with_setting(nn.Conv2d(3, 6, 3), dilation=(0, 1)),
    "Conv2d that crops": lambda: with_setting(nn.Conv2d(3, 6, 3), padding=(-1, 0)),
    "Conv2d of one channel": lambda: nn.Conv2d(1, 1, 1),
    "Conv3d": lambda: nn.Conv3d(3, 5, 2, padding=1),
    "BatchNorm1d": lambda: nn.BatchNorm1d(3).eval(),
    "BatchNorm2d": lambda: nn.BatchNorm2d(3).eval(),
    "BatchNorm2d of one channel": lambda: nn.BatchNorm2d(1).eval(),
    "BatchNorm1d in training": lambda: nn.BatchNorm1d(3),
    "BatchNorm1d without statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False).eval(),
}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "a matrix": lambda: torch.randn(2, 4),
    "rows": lambda: torch.randn(2, 3),
    "three axes": lambda: torch.randn(2, 3, 4),
    "an image": lambda: torch.randn(2, 3, 5, 4),
    "a vector": lambda: torch.randn(4),
    "a number": lambda: torch.tensor(1.0),
    "nothing": lambda: torch.randn(0, 3, 4),
    "transposed": lambda: torch.randn(4, 3, 2).transpose(0, 2),
    "channels last": lambda: torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last),
    "an image of one pixel": lambda: torch.randn(2, 3, 1, 1),
    "one channel": lambda: torch.randn(2, 1, 5, 4),
    "one channel last": lambda: torch.randn(2, 1, 5, 4).to(memory_format=torch.channels_last),
    "an image of no rows": lambda: torch.randn(2, 3, 0, 4),
    "no images": lambda: torch.randn(0, 3, 5, 4),
    "an image in float64": lambda: torch.randn(2, 3, 5, 4, dtype=torch.float64),
    "an image of integers": lambda: torch.ones(2, 3, 5, 4, dtype=torch.int64),
    "a volume": lambda: torch.randn(2, 3, 5, 4, 3),
    "expanded": lambda: torch.randn(1, 3, 4).expand(2, 3, 4),
    "integers": lambda: torch.ones(2, 3, 4, dtype=torch.int64),
    "flags": lambda: torch.ones(2, 3, 4, dtype=torch.bool),
    "float64": lambda: torch.randn(2, 3, 4, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(2, 3, 4, dtype=torch.bfloat16),
    "complex": lambda: torch.randn(2, 3, 4, dtype=torch.complex64),
}


def with_other(layer: nn.Module, **tensors: Tensor) -> nn.Module:
    """A layer that somebody gave another weight or bias."""
    for name, tensor in tensors.items():
        setattr(layer, name, nn.Parameter(tensor))
    return layer


def with_setting(layer: nn.Module, **settings: Any) -> nn.Module:
    """A layer of which somebody changed a number that its constructor would refuse."""
    vars(layer).update(settings)
    return layer


RULED = {
    "Conv1d": "three axes",
    "Conv2d": "an image",
    "Conv2d of one pixel": "an image",
    "Conv2d in float64": "an image in float64",
    "Conv2d with another weight": "an image",
    "Conv2d of one channel": "one channel",
    "Conv3d": "a volume",
    "BatchNorm2d of one channel": "one channel last",
    **{kind.__name__: "three axes" for kind in ACTIVATIONS},
}


def agrees(called: Any, *values: Tensor) -> bool:
    """Whether there is a rule, and then it must be right."""
    given = list(map(Facts().to_meta, values))
    outcome = known_outcome(called, *given)
    if outcome is None:
        return False
    (known, effect), versions = outcome, [each._version for each in values]
    real = called(*values)
    assert known.is_meta
    assert (known.shape, known.dtype, known.stride()) == (real.shape, real.dtype, real.stride())
    assert (known is given[0]) == (real is values[0])
    pairs = zip(given, values, versions, strict=True)
    written = [each for each, value, version in pairs if value._version > version]
    assert effect == (storages_in(written), False)
    return True


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_rule_for_a_layer_is_what_the_layer_gives(name: str, kind: str) -> None:
    layer, value = LAYERS[name](), INPUTS[kind]()

    ruled = agrees(layer, value)

    assert ruled or RULED.get(name) != kind


@pytest.mark.parametrize("one", INPUTS)
@pytest.mark.parametrize("function", [operator.add, torch.mul, operator.sub, torch.sub, torch.dot])
def test_a_rule_for_a_sum_is_what_the_sum_gives(function: Callable[..., Any], one: str) -> None:
    ruled = {other for other in INPUTS if agrees(function, INPUTS[one](), INPUTS[other]())}

    assert "an image" in ruled or one != "an image" or function is not torch.mul


def test_a_sum_with_a_number_or_of_three_has_no_rule() -> None:
    value = torch.ones(2, 3, device="meta")

    assert known_outcome(torch.add, value, 1) is None
    assert known_outcome(torch.add, value, value, value) is None
