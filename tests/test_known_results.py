"""What is remembered of a run on meta tensors is what such a run gives, for any layer of a form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from optimizer.facts.facts import Facts
from optimizer.passes.fuse import LinearReLU
from optimizer.rewrite.affine import layer_like
from tests.single_pass import rows, texts

LAYERS = """
    nn.ReLU(); nn.ReLU(inplace=True); nn.GELU(); nn.Hardsigmoid(); nn.Tanh(); nn.Identity();
    nn.LayerNorm(4); nn.LayerNorm((3, 4)); nn.LayerNorm(4).double(); nn.Dropout(); nn.Flatten(0);
    nn.Linear(4, 5); nn.Linear(4, 5).double(); linear_relu(); nn.Conv1d(3, 5, 2);
    nn.Conv2d(3, 6, (3, 1), stride=2, padding=(1, 0), dilation=(1, 2), groups=3);
    nn.Conv2d(3, 6, 3); nn.Conv2d(3, 6, 3, stride=2); nn.Conv2d(3, 6, 3, dilation=2);
    nn.Conv2d(3, 6, 3, groups=3); nn.Conv2d(3, 6, 3, padding="same"); nn.Conv2d(3, 6, 3).double();
    nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last); nn.Conv2d(3, 6, 5, bias=False);
    nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"); nn.Conv2d(1, 1, 1);
    holding(nn.Conv2d(3, 6, 3), bias=torch.ones(6).double());
    holding(nn.Conv2d(3, 6, 3), bias=torch.ones(7)); holding(nn.Conv2d(3, 6, 3), dilation=(0, 1));
    holding(nn.Conv2d(9, 6, 3), weight=torch.ones(6, 3, 1, 1)); nn.Conv3d(3, 5, 2, padding=1);
    reflecting(1); reflecting(2); with_plain_weight(5); with_plain_weight(7); Rows(1); Rows(2);
    nn.BatchNorm1d(3).eval(); nn.BatchNorm2d(3).eval(); nn.BatchNorm2d(1).eval(); nn.BatchNorm1d(3);
    nn.BatchNorm2d(3); nn.BatchNorm1d(3, track_running_stats=False).eval();
    holding(nn.BatchNorm2d(3).eval(), running_mean=torch.zeros(3).double())
"""
INPUTS = """
    torch.randn(2, 4); torch.randn(2, 3, 4); torch.randn(2, 3, 5, 4); torch.tensor(1.0);
    torch.randn(0, 3, 4); torch.randn(4, 3, 2).transpose(0, 2); torch.randn(2, 3, 1, 1);
    torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last); torch.randn(2, 1, 5, 4);
    torch.randn(2, 3, 5, 4).double(); torch.ones(2, 3, 5, 4).long(); torch.randn(2, 3, 5, 4, 3);
    torch.randn(1, 3, 4).expand(2, 3, 4); torch.randn(2, 3, 4).bfloat16()
"""


def linear_relu() -> nn.Module:
    return layer_like(nn.Linear(4, 5), LinearReLU)


def holding(layer: nn.Module, **changed: Any) -> nn.Module:
    """A layer that somebody gave another weight, bias or number than its constructor would."""
    for name, value in changed.items():
        setattr(layer, name, nn.Parameter(value) if name in layer._parameters else value)
    return layer


def with_plain_weight(size: int) -> nn.Module:
    layer = nn.Linear(4, 5, bias=False)
    del layer.weight
    return holding(layer, weight=torch.ones(size, 4))


def reflecting(by: int) -> nn.Module:
    layer = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")
    return holding(layer, _reversed_padding_repeated_twice=(by, by, 1, 1))


class Rows(nn.ReLU):
    """A layer of a user's, which does as one of torch's and more."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[: self.rows] * 1


class Counting(Facts):
    runs = 0

    def run(self, *call: Any) -> Any:
        self.runs += 1
        return super().run(*call)


def told(called: Any, *values: Tensor) -> tuple[tuple[Any, ...], int]:
    """All that the facts tell of a call, and how often it was run for that."""
    facts, root = Counting(), nn.Module()
    graph = fx.Graph(owning_module=root)  # type: ignore[arg-type]
    given = tuple(graph.placeholder("x") for _ in values)
    for each, value in zip(given, values, strict=True):
        facts.input(each, value)
    if isinstance(called, nn.Module):
        root.layer = called
    is_layer = isinstance(called, nn.Module)
    node = graph.call_module("layer", given) if is_layer else graph.call_function(called, given)
    facts.evaluate(node)
    fact = node.meta["fact"]
    layout = None if fact.error else (fact.value.shape, fact.value.stride(), fact.value.dtype)
    shared = [fact.storages >= each.meta["fact"].storages for each in given]
    return (layout, shared, bool(fact.writes), fact.random), facts.runs


def test_what_is_remembered_is_what_a_run_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [eval(text) for text in texts(INPUTS)]
    calls = [(eval(text), each) for text in texts(LAYERS) for each in inputs]
    calls += [(torch.add, one, other) for one in inputs for other in inputs]
    memory: dict[Any, Any] = {}
    alone = []
    for called in calls:
        monkeypatch.setattr("optimizer.facts.facts._layouts", single := dict[Any, Any]())
        alone.append(told(*called)[0])
        memory = single | memory

    monkeypatch.setattr("optimizer.facts.facts._layouts", memory)
    together = [told(*called) for called in calls]

    assert [each for each, _ in together] == alone
    assert sum(not runs for _, runs in together) > 150


IMAGE = torch.rand(2, 4, 5, 6)
LAST = IMAGE.contiguous(memory_format=torch.channels_last)


@rows(
    "layer image",
    {
        "relu": (nn.ReLU(), IMAGE),
        "relu, channels last": (nn.ReLU(), LAST),
        "a norm": (nn.BatchNorm2d(4).eval(), IMAGE),
        "a norm, channels last": (nn.BatchNorm2d(4).eval(), LAST),
        "a norm of one channel, channels last": (nn.BatchNorm2d(1).eval(), LAST[:, :1].clone()),
    },
)
def test_a_result_lies_as_the_layer_lays_it(layer: nn.Module, image: Tensor) -> None:
    for _ in range(2):
        (layout, *_), _ = told(layer, image)
        assert layout[1] == layer(image).stride()


def test_so_many_results_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.facts.facts._MOST_LAYOUTS", 0)
    x = torch.ones(2, 3, 1, 7, 1)

    assert [told(nn.GELU(), x)[1] for _ in range(2)] == [1, 1]
