"""What is remembered of a run on meta tensors is what such a run gives, for any layer of a form."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import optimizer
from optimizer.facts.facts import Facts
from optimizer.passes.fuse import LinearReLU
from optimizer.rewrite.affine import layer_like
from tests.single_pass import Forward, rows, texts

LAYERS = """
    nn.ReLU(); nn.ReLU(inplace=True); nn.ReLU6(); nn.GELU(); nn.SiLU(); nn.Hardswish();
    nn.Hardsigmoid(); nn.Sigmoid(); nn.Tanh(); nn.LayerNorm(4); nn.LayerNorm((3, 4));
    nn.LayerNorm(4, elementwise_affine=False); nn.LayerNorm(4).double();
    nn.Linear(4, 5); nn.Linear(4, 5).double(); linear_relu(); nn.Conv1d(3, 5, 2);
    nn.Conv2d(3, 6, (3, 1), stride=2, padding=(1, 0), dilation=(1, 2), groups=3);
    nn.Conv2d(3, 6, (5, 4), bias=False); nn.Conv2d(3, 6, 5); nn.Conv2d(3, 6, 1, padding=1);
    nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last); nn.Conv2d(3, 6, 3, padding="same");
    nn.Conv2d(3, 6, 3, padding=1, padding_mode="circular"); nn.Conv2d(3, 6, 3).double();
    nn.Conv2d(3, 6, 3, padding=9, padding_mode="circular"); nn.Conv2d(1, 1, 1);
    holding(nn.Conv2d(3, 6, 3), bias=torch.ones(6).double());
    holding(nn.Conv2d(3, 6, 3), bias=torch.ones(7));
    holding(nn.Conv2d(9, 6, 3), weight=torch.ones(6, 3, 1, 1));
    holding(nn.Conv2d(3, 6, 3, groups=3, bias=False), weight=torch.ones(5, 1, 3, 3));
    holding(nn.Conv2d(3, 6, (5, 4)), stride=(-1, 1)); holding(nn.Conv2d(3, 6, 3), dilation=(0, 1));
    holding(nn.Conv2d(3, 6, 3), padding=(-1, 0)); nn.Conv3d(3, 5, 2, padding=1);
    nn.BatchNorm1d(3).eval(); nn.BatchNorm2d(3).eval(); nn.BatchNorm2d(1).eval(); nn.BatchNorm1d(3);
    nn.BatchNorm1d(3, track_running_stats=False).eval()
"""
INPUTS = """
    torch.randn(2, 4); torch.randn(2, 3); torch.randn(2, 3, 4); torch.randn(2, 3, 5, 4);
    torch.randn(4); torch.tensor(1.0); torch.randn(0, 3, 4); torch.randn(4, 3, 2).transpose(0, 2);
    torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last); torch.randn(2, 3, 1, 1);
    torch.randn(2, 1, 5, 4); torch.randn(2, 1, 5, 4).to(memory_format=torch.channels_last);
    torch.randn(2, 3, 0, 4); torch.randn(0, 3, 5, 4); torch.randn(2, 3, 5, 4).double();
    torch.ones(2, 3, 5, 4).long(); torch.randn(2, 3, 5, 4, 3); torch.randn(1, 3, 4).expand(2, 3, 4);
    torch.ones(2, 3, 4).long(); torch.ones(2, 3, 4).bool(); torch.randn(2, 3, 4).double();
    torch.randn(2, 3, 4).bfloat16(); torch.randn(2, 3, 4, dtype=torch.complex64)
"""
LAYER, INPUT = texts(LAYERS), texts(INPUTS)
ROWS, IMAGE, VOLUME = (
    "torch.randn(2, 3, 4)",
    "torch.randn(2, 3, 5, 4)",
    "torch.randn(2, 3, 5, 4, 3)",
)
# What a second run of these must be spared.
RULED = {(layer, ROWS) for layer in [*LAYER][:9] if "inplace" not in layer}
RULED |= {
    ("nn.Conv1d(3, 5, 2)", ROWS), ("nn.Conv3d(3, 5, 2, padding=1)", "torch.randn(2, 3, 5, 4, 3)"),
    ("nn.Conv2d(3, 6, (5, 4), bias=False)", IMAGE),
    ("nn.Conv2d(3, 6, 3).double()", f"{IMAGE}.double()"),
    ("holding(nn.Conv2d(9, 6, 3), weight=torch.ones(6, 3, 1, 1))", IMAGE),
    ("nn.Conv2d(1, 1, 1)", "torch.randn(2, 1, 5, 4)"),
    ("nn.BatchNorm2d(1).eval()",
     "torch.randn(2, 1, 5, 4).to(memory_format=torch.channels_last)"),
}  # fmt: skip


def linear_relu() -> nn.Module:
    return layer_like(nn.Linear(4, 5), LinearReLU)


def made(text: str) -> Any:
    return eval(text)


def holding(layer: nn.Module, **changed: Any) -> nn.Module:
    """A layer that somebody gave another weight, bias or number than its constructor would."""
    for name, value in changed.items():
        if isinstance(value, Tensor) and name in layer._parameters:
            value = nn.Parameter(value)
        setattr(layer, name, value)
    return layer


class Counting(Facts):
    runs = 0

    def run(self, *call: Any) -> Any:
        self.runs += 1
        return super().run(*call)


def observed(called: Any, *values: Any) -> tuple[fx.Node, int]:
    """A call with its fact, and how often it was run."""
    root, facts = nn.Module(), Counting()
    graph = fx.Graph(owning_module=root)  # type: ignore[arg-type]
    given: list[Any] = []
    for value in values:
        given += [graph.placeholder("x") if isinstance(value, Tensor) else value]
        if isinstance(value, Tensor):
            facts.input(given[-1], value)
    if isinstance(called, nn.Module):
        root.layer = called
        node = graph.call_module("layer", tuple(given))
    else:
        node = graph.call_function(called, tuple(given))
    facts.evaluate(node)
    return node, facts.runs


def is_dense(value: Tensor | None) -> bool:
    return value is None or value.stride() == value.new_empty(value.shape).stride()


def agrees(called: Any, *values: Tensor) -> bool:
    """Whether the second run is spared, and then what is remembered must be right."""
    first, _ = observed(called, *values)
    node, runs = observed(called, *values)
    if runs:
        return False
    known, given = node.meta["fact"], [each.meta["fact"] for each in node.args]
    versions = [each._version for each in values]
    try:
        real = called(*values)
    except (RuntimeError, NotImplementedError):  # without data it may run
        return False
    assert known.value.is_meta
    assert (known.value.shape, known.value.dtype) == (real.shape, real.dtype)
    dense = all(map(is_dense, (*values, *getattr(called, "_parameters", {}).values())))
    norm = isinstance(called, nn.BatchNorm2d) and values[0].is_contiguous()
    laid_out = real if dense or norm else first.meta["fact"].value  # kernels without data err there
    assert known.value.stride() == laid_out.stride()
    shared = frozenset().union(*(each.storages for each in given))
    assert known.storages == given[0].storages if real is values[0] else known.storages - shared
    pairs = zip(given, values, versions, strict=True)
    written = [each.storages for each, value, version in pairs if value._version > version]
    assert known.writes == frozenset().union(*written)
    assert not known.random or not all(each.numel() for each in values)
    return True


@pytest.mark.parametrize("layer", LAYER)
def test_what_is_remembered_of_a_layer_is_right(layer: str) -> None:
    ruled = {(layer, each) for each in INPUT if agrees(made(layer), made(each))}

    assert ruled >= {pair for pair in RULED if pair[0] == layer}


@pytest.mark.parametrize("one", INPUT)
@pytest.mark.parametrize("function", [operator.add, torch.mul, operator.sub, torch.sub, torch.dot])
def test_what_is_remembered_of_a_sum_is_right(function: Callable[..., Any], one: str) -> None:
    ruled = {other for other in INPUT if agrees(function, made(one), made(other))}

    assert IMAGE in ruled or one != IMAGE or function is not torch.mul


def test_a_sum_with_a_number_or_of_three_is_run_each_time() -> None:
    value = torch.ones(2, 3)

    for given in ((value, 1), (value, value, value)):
        assert [observed(torch.add, *given)[1] for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("change", ["stride", "dilation", "padding", "groups"])
def test_a_layer_with_another_setting_is_run(change: str) -> None:
    layers = [nn.Conv2d(4, 4, 3, **{change: number}) for number in (1, 2)]  # type: ignore[arg-type]
    x = torch.ones(1, 4, 9, 9)

    shapes = [observed(layer, x)[0].meta["fact"].value.shape for layer in layers * 2]

    assert shapes == [layer(x).shape for layer in layers * 2]


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.BatchNorm2d(4).eval()])
def test_a_result_lies_as_what_a_layer_is_given(layer: nn.Module) -> None:
    image = torch.rand(2, 4, 5, 6)
    images = (image, image.contiguous(memory_format=torch.channels_last)) * 2

    strides = [observed(layer, x)[0].meta["fact"].value.stride() for x in images]

    assert strides == [layer(x).stride() for x in images]


class Rows(nn.ReLU):
    """A layer of a user's, which does as one of torch's and more."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[: self.rows] * 1


def with_plain_weight(rows: int) -> nn.Module:
    layer = nn.Linear(4, 5, bias=False)
    del layer.weight
    return holding(layer, weight=torch.ones(rows, 4))


REFLECTING = "holding(nn.Conv2d(3, 6, 3, padding=1, padding_mode='reflect'), {}=({}, {}, 1, 1))"
REFLECTED = [REFLECTING.format("_reversed_padding_repeated_twice", n, n) for n in (1, 2)]
NORM = "holding(nn.BatchNorm2d(3).eval(), running_mean=torch.zeros(3, dtype=torch.{}))"
# Two layers, the first of which was run, and what both are given: why the other is run as well.
PAIRS: dict[str, tuple[str, str, str]] = {
    "mode": ("nn.BatchNorm2d(3).eval()", "nn.BatchNorm2d(3)", IMAGE),
    "random numbers": ("nn.Dropout()", "nn.Dropout()", IMAGE),
    "statistics, which are written": ("nn.BatchNorm2d(3)", "nn.BatchNorm2d(3)", IMAGE),
    "dtype of the weights": ("nn.Linear(4, 5)", "nn.Linear(4, 5).double()", ROWS),
    "strides of the weights": (
        "nn.Conv2d(3, 6, 3)", "nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)", IMAGE
    ),
    "dtype of the statistics": (NORM.format("float32"), NORM.format("float64"), IMAGE),
    "a tensor that is no parameter": ("with_plain_weight(5)", "with_plain_weight(7)", ROWS),
    "padding": (*REFLECTED, IMAGE),
    "a user's setting": ("Rows(1)", "Rows(2)", ROWS),
}  # fmt: skip


@rows("known other given", PAIRS)
def test_a_layer_of_another_form_or_with_an_effect_is_run(
    known: str, other: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimizer.facts.facts._layouts", {})
    observed(made(known), made(given))

    assert observed(made(other), made(given))[1] == 1


@pytest.mark.parametrize("layer", [nn.Identity(), nn.Dropout().eval(), nn.Flatten(0)])
def test_a_view_is_no_new_tensor_the_second_time_either(layer: nn.Module) -> None:
    for _ in range(2):
        node, _ = observed(layer, torch.ones(2, 3))
        assert node.meta["fact"].storages == node.args[0].meta["fact"].storages
        assert not node.meta["fact"].writes


def test_a_sum_that_is_written_over_a_value_is_another_than_one_that_is_not() -> None:
    model = Forward("y = torch.add(x, x); torch.add(x, x, out=y); return y")
    graph = optimizer.capture(model, torch.ones(2)).graph

    facts = [node.meta["fact"] for node in graph.nodes if node.op == "call_function"]
    assert [bool(each.writes) for each in facts] == [False, True]


def test_so_many_results_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.facts.facts._MOST_LAYOUTS", 0)
    x = torch.ones(2, 3, 1, 7, 1)

    assert [observed(nn.GELU(), x)[1] for _ in range(2)] == [1, 1]
