"""What is remembered of a run on meta tensors is what such a run gives, for any layer of a form."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import optimizer
from optimizer.facts import facts as _known_results
from optimizer.facts.facts import Facts
from optimizer.passes.fuse import LinearReLU
from optimizer.rewrite.affine import layer_like

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
    "LinearReLU": lambda: layer_like(nn.Linear(4, 5), LinearReLU),
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


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_remembered_of_a_layer_is_right(name: str, kind: str) -> None:
    layer, value = LAYERS[name](), INPUTS[kind]()

    ruled = agrees(layer, value)

    assert ruled or RULED.get(name) != kind


@pytest.mark.parametrize("one", INPUTS)
@pytest.mark.parametrize("function", [operator.add, torch.mul, operator.sub, torch.sub, torch.dot])
def test_what_is_remembered_of_a_sum_is_right(function: Callable[..., Any], one: str) -> None:
    ruled = {other for other in INPUTS if agrees(function, INPUTS[one](), INPUTS[other]())}

    assert "an image" in ruled or one != "an image" or function is not torch.mul


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
    layer.weight = torch.ones(rows, 4)
    return layer


def with_statistics(dtype: torch.dtype) -> nn.Module:
    layer = nn.BatchNorm2d(3).eval()
    layer.running_mean = torch.zeros(3, dtype=dtype)
    return layer


def reflecting(*padding: int) -> nn.Module:
    layer = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")
    return with_setting(layer, _reversed_padding_repeated_twice=padding)


# Two layers, the first of which was run, and what both are given: why the other is run as well.
PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "mode": (lambda: nn.BatchNorm2d(3).eval(), lambda: nn.BatchNorm2d(3), "an image"),
    "random numbers": (lambda: nn.Dropout(), lambda: nn.Dropout(), "an image"),
    "statistics, which are written": (
        lambda: nn.BatchNorm2d(3), lambda: nn.BatchNorm2d(3), "an image",
    ),
    "dtype of the weights": (
        lambda: nn.Linear(4, 5), lambda: nn.Linear(4, 5).double(), "three axes",
    ),
    "strides of the weights": (
        lambda: nn.Conv2d(3, 6, 3), LAYERS["Conv2d in channels last"], "an image",
    ),
    "dtype of the statistics": (
        lambda: with_statistics(torch.float32), lambda: with_statistics(torch.float64), "an image",
    ),
    "a tensor that is no parameter": (
        lambda: with_plain_weight(5), lambda: with_plain_weight(7), "three axes",
    ),
    "padding": (lambda: reflecting(1, 1, 1, 1), lambda: reflecting(2, 2, 1, 1), "an image"),
    "a user's setting": (lambda: Rows(1), lambda: Rows(2), "three axes"),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_layer_of_another_form_or_with_an_effect_is_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_known_results, "_layouts", {})
    known, other, kind = PAIRS[name]
    observed(known(), INPUTS[kind]())

    assert observed(other(), INPUTS[kind]())[1] == 1


@pytest.mark.parametrize("layer", [nn.Identity(), nn.Dropout().eval(), nn.Flatten(0)])
def test_a_view_is_no_new_tensor_the_second_time_either(layer: nn.Module) -> None:
    for _ in range(2):
        node, _ = observed(layer, torch.ones(2, 3))
        assert node.meta["fact"].storages == node.args[0].meta["fact"].storages
        assert not node.meta["fact"].writes


def test_a_sum_that_is_written_over_a_value_is_another_than_one_that_is_not() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.add(x, x)
            torch.add(x, x, out=y)
            return y

    graph = optimizer.capture(Sums(), torch.ones(2)).graph

    facts = [node.meta["fact"] for node in graph.nodes if node.op == "call_function"]
    assert [bool(each.writes) for each in facts] == [False, True]


def test_so_many_results_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.facts.facts._MOST_LAYOUTS", 0)
    x = torch.ones(2, 3, 1, 7, 1)

    assert [observed(nn.GELU(), x)[1] for _ in range(2)] == [1, 1]
