"""Guards that few models reach: each is reached here, and the answer is eager's."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import CaptureError, InputError
from optimizer._aten import from_aten
from optimizer._check import answer, compare_answers
from optimizer._dynamo import backend
from optimizer._inputs import as_call
from optimizer._optimize import Run
from optimizer._pipeline import Pipeline
from optimizer._state import random_fingerprint, random_state_kept

aten = torch.ops.aten
ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
SQUARE = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


class Holder(nn.Module):
    """Runs a forward of a case; it has a layer, a parameter and buffers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("matrix", torch.randn(4, 4))
        self.register_buffer("row", torch.randn(4))
        self.function = function
        self.eval()

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Rows(Holder):
    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def optimized(function: Callable[..., Any], x: Any = ROWS, **options: Any) -> Any:
    """The optimized model, which gives eager's answer."""
    fast = optimizer.optimize(Rows(function), x, **{"level": 1, **options})

    torch.testing.assert_close(fast(x), Rows(function)(x))
    return fast


def read_as_python(m: Any, x: Any) -> Any:
    wide = m.matrix.ndim + m.matrix.dim() + m.matrix.size(0) + m.matrix.size()[1]
    return F.relu(x @ m.matrix) * wide


def of_its_type(m: Any, x: Any) -> Any:
    assert isinstance(m.weight, nn.Parameter)
    assert not isinstance(m.matrix, nn.Parameter)
    assert isinstance(m.linear(x), Tensor)
    return m.linear(x)


@pytest.mark.parametrize("function", [read_as_python, of_its_type])
def test_what_the_model_knows_of_its_own_tensors_is_recorded(function: Any) -> None:
    assert optimized(function).report.front_end == "symbolic"


def iterated(m: Any, x: Any) -> Any:
    return sum(row for row in x)


REFUSED: dict[str, Callable[..., Any]] = {
    "it iterates over a traced value": iterated,
    "it asks a traced value for its keys": lambda m, x: dict(**x),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_recorded_is_told(reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        optimizer.capture(Rows(REFUSED[reason]))


class Core(nn.Module):
    """One operator of ATen on the attributes of a model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in (("weight", (4, 4)), ("row", (4,)), ("wide", (3, 4))):
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        for name in ("mean", "variance"):
            self.register_buffer(name, torch.rand(4) + 1)
        self.register_buffer("kernel", torch.randn(4, 2, 3))


def aten_graph(build: Callable[[fx.Graph, fx.Node, Callable[[str], fx.Node]], Any]) -> Any:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(build(graph, x, graph.get_attr))
    return fx.GraphModule(Core().eval(), graph)


def transposed(g: fx.Graph, name: str) -> fx.Node:
    return g.call_function(aten.permute.default, (g.get_attr(name), [1, 0]))


def normalized(g: fx.Graph, x: fx.Node, get: Callable[[str], fx.Node], place: int) -> fx.Node:
    tensors = [get(name) for name in ("row", "row", "mean", "variance")]
    whole = g.call_function(
        aten._native_batch_norm_legit_no_training.default, (x, *tensors, 0.1, 1e-5)
    )
    return g.call_function(lambda pair, i: pair[i], (whole, place)) if place else whole


ATEN: dict[str, tuple[Callable[..., Any], Tensor, bool]] = {
    "mm": (lambda g, x, a: g.call_function(aten.mm.default, (x, transposed(g, "weight"))), ROWS, 1),
    "mm of no transpose": (
        lambda g, x, a: g.call_function(aten.mm.default, (x, a("weight"))), ROWS, 0,
    ),
    "addmm of a row": (
        lambda g, x, a: g.call_function(aten.addmm.default, (a("row"), x, transposed(g, "weight"))),
        ROWS, 1,
    ),
    "addmm of a matrix": (
        lambda g, x, a: g.call_function(
            aten.addmm.default, (a("wide"), x, transposed(g, "weight"))
        ),
        ROWS, 0,
    ),
    "a transposed convolution": (
        lambda g, x, a: g.call_function(
            aten.convolution.default, (x, a("kernel"), None, [1], [0], [1], True, [0], 1)
        ),
        SQUARE[None], 0,
    ),
    "a scaled sum in place": (
        lambda g, x, a: g.call_function(
            aten.add_.Tensor, (g.call_function(aten.clone.default, (x,)), x), {"alpha": 2}
        ),
        ROWS, 0,
    ),
    "statistics that are read": (
        lambda g, x, a: g.call_function(torch.sum, (normalized(g, x, a, 1),)), ROWS, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATEN)
def test_an_overload_becomes_a_function_of_torch_only_where_that_is_the_same(name: str) -> None:
    build, x, rewritten = ATEN[name]
    module = aten_graph(build)
    expected = module(x)
    from_aten(module.graph)
    module.recompile()

    torch.testing.assert_close(module(x), expected)
    assert any(node.target is F.linear for node in module.graph.nodes) is bool(rewritten)


def test_a_layer_whose_settings_are_computed_stays_a_function() -> None:
    def function(m: Any, x: Any) -> Any:
        return F.conv1d(x, m.kernel, None, 1, x.shape[1] - 3)

    model = Rows(function)
    model.register_buffer("kernel", torch.randn(2, 3, 1))
    fast = optimizer.optimize(model, ROWS[None], level=1)

    torch.testing.assert_close(fast(ROWS[None]), model(ROWS[None]))


def test_random_states_are_kept_where_numpy_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    before = random_fingerprint()

    with random_state_kept():
        random.random()
        torch.rand(1)
        assert random_fingerprint() != before
    assert random_fingerprint() == before


def test_phases_that_never_come_to_an_end_are_cut_off() -> None:
    module: Any = optimizer.capture(Rows(lambda m, x: x + 1), ROWS)
    pipeline = Pipeline(module)
    pipeline._phase = lambda passes, phase: True  # type: ignore[method-assign]

    pipeline.run(())

    torch.testing.assert_close(module(ROWS), ROWS + 1)


def test_a_graph_of_dynamo_runs_as_it_is_under_autocast_and_after_many_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Rows(lambda m, x: x @ m.matrix)
    module = fx.symbolic_trace(model)
    monkeypatch.setattr("optimizer._dynamo._MOST", 1)

    with torch.autocast("cpu", torch.bfloat16):
        assert backend(module, [ROWS])(ROWS).dtype == torch.bfloat16
    with torch.no_grad():
        run = backend(weights_as_arguments(), [nn.Parameter(SQUARE), ROWS])
        for factor in (1.0, 2.0, 3.0):
            weight = nn.Parameter(SQUARE * factor)
            torch.testing.assert_close(run(weight, ROWS), (ROWS @ weight,))


def weights_as_arguments() -> fx.GraphModule:
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    graph.output((graph.call_function(torch.matmul, (x, weight)),))
    return fx.GraphModule(nn.Module(), graph)


def test_a_graph_of_dynamo_keeps_its_own_tensors_and_modules() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    layer = graph.call_module("linear", (x,))
    graph.output((graph.call_function(torch.add, (layer, graph.get_attr("row"))),))
    module = fx.GraphModule(Rows(iterated), graph)
    with torch.no_grad():
        torch.testing.assert_close(backend(module, [ROWS])(ROWS), module(ROWS))


def test_what_is_not_optimized_again_cannot_be_refitted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Rows(lambda m, x: m.linear(x))
    fast: Any = optimizer.optimize(model, level=1)
    assert fast(ROWS).shape == ROWS.shape
    monkeypatch.setattr(Run, "result", lambda self: left_alone())

    with pytest.raises(CaptureError, match="it is Tuesday"):
        fast.refit(model.state_dict())


def left_alone() -> Any:
    module = nn.Identity()
    object.__setattr__(module, "report", type("Report", (), {"remarks": ("it is Tuesday",)})())
    return module


class OwnState(Rows):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("it has none")


def test_a_model_whose_checkpoint_cannot_be_told_is_not_refitted() -> None:
    fast: Any = optimizer.optimize(OwnState(lambda m, x: m.linear(x)), ROWS, level=1)

    with pytest.raises(InputError, match="optimize"):
        fast.refit({})
    with pytest.raises(InputError, match="optimize"):
        copy.deepcopy(fast).refit({})


def test_a_recipe_whose_code_is_gone_is_told() -> None:
    fast: Any = optimizer.optimize(Rows(lambda m, x: m.linear(x)), ROWS, level=1)
    fast.meta["recipe"] = b"what no pickle is"

    with pytest.raises(InputError, match="optimize"):
        fast.refit({})


def test_a_difference_of_bits_counts_only_where_the_model_repeats_them() -> None:
    def answers(model: nn.Module) -> Any:
        call = as_call(ROWS)
        expected, actual = answer(model, call), answer(model, call)
        actual.output.add_(1e-7)
        return compare_answers(model, call, expected, actual, exact=True)

    calls = itertools.count()

    assert answers(Rows(lambda m, x: x * 1)) is not None
    assert answers(Rows(lambda m, x: x + 1e-6 * next(calls))) is None


def test_of_a_model_that_is_not_recorded_no_first_divergence_is_told() -> None:
    def looped(m: Any, x: Any) -> Any:
        return m.linear(x) if x.sum() > 0 else x

    fast = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(optimizer.EquivalenceError, match=r"output") as raised:
        optimizer.check(Rows(looped), fast, ROWS)
    assert "first value" not in str(raised.value)
