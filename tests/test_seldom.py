"""Guards that few models reach: each is reached here, and the answer is eager's."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import CaptureError, InputError, toolkit
from optimizer._dynamo import backend
from optimizer._optimize import Run
from optimizer.analysis import roofline
from optimizer.core.inputs import as_call
from optimizer.frontend.canonicalize import affine_as_module, from_aten
from optimizer.lowering.choose import varied
from optimizer.lowering.plan import Signature
from optimizer.rewrite.edit import (
    _require_takes,
    operands,
    overwrites,
    replace_later_uses,
    supersede,
)
from optimizer.rewrite.pipeline import FaultyPassError, Pipeline
from optimizer.testing import Optimize, assert_equivalent
from optimizer.verify.equivalence import answer, compare_answers
from tests.single_pass import Forward

aten = torch.ops.aten


@fx.wrap
def doubled(x: Tensor) -> Tensor:
    return x * 2


ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
SQUARE = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


class Rows(Forward):
    """Runs a forward of a case; it has a layer, a parameter and buffers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        super().__init__(
            function,
            linear=nn.Linear(4, 4),
            weight=nn.Parameter(torch.randn(4, 4)),
            matrix=torch.randn(4, 4),
            row=torch.randn(4),
            mean=torch.rand(4) + 1,
            spread=torch.rand(4) + 1,
            kernel=torch.randn(4, 2, 3),
        )
        self.eval()


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


def written_elsewhere(m: Any, x: Any) -> Any:
    return (
        torch.transpose(x, 0, 1) + torch.relu(x).t() + torch.mul(x, 2, out=torch.empty_like(x)).t()
    )


SPELLED: dict[str, Callable[..., Any]] = {
    "its own tensors, read as Python": read_as_python,
    "its own tensors, of their types": of_its_type,
    "linear by name": lambda m, x: F.linear(bias=m.row, weight=m.matrix, input=x),
    "conv1d by name": lambda m, x: F.conv1d(x, m.matrix[None, :3, :1], padding=1, stride=2),
    "dropout by name": lambda m, x: F.dropout(x, training=False, p=0.3),
    "flatten by name": lambda m, x: torch.flatten(x[None], end_dim=1),
    "movedim by name": lambda m, x: torch.movedim(x[None], destination=2, source=0),
    "mm by name": lambda m, x: torch.mm(x, mat2=m.matrix),
    "out=": written_elsewhere,
    "cpu()": lambda m, x: m.linear(x.cpu()),
    "a layer of buffers": lambda m, x: F.linear(x, m.matrix, m.row),
    "a constant of one dtype": lambda m, x: x + m.matrix.view(torch.int32).reshape(4, 4)[0] * 0,
}


@pytest.mark.parametrize("name", SPELLED)
def test_a_rare_spelling_has_the_same_answer(name: str) -> None:
    assert optimized(SPELLED[name]).report.front_end == "symbolic"


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


def aten_graph(build: Callable[[fx.Graph, fx.Node, Callable[[str], fx.Node]], Any]) -> Any:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(build(graph, x, graph.get_attr))
    return fx.GraphModule(Rows(iterated), graph)


def normalized(g: fx.Graph, x: fx.Node, get: Callable[[str], fx.Node], place: int) -> fx.Node:
    tensors = [get(name) for name in ("row", "row", "mean", "spread")]
    whole = g.call_function(
        aten._native_batch_norm_legit_no_training.default, (x, *tensors, 0.1, 1e-5)
    )
    return g.call_function(lambda pair, i: pair[i], (whole, place)) if place else whole


ATEN: dict[str, tuple[Callable[..., Any], Tensor, Any]] = {
    "mm": (
        lambda g, x, a: g.call_function(aten.mm.default, (x, a("weight"))), ROWS, torch.mm,
    ),
    "addmm": (
        lambda g, x, a: g.call_function(aten.addmm.default, (a("weight"), x, a("weight"))),
        SQUARE, torch.addmm,
    ),
    "a transposed convolution": (
        lambda g, x, a: g.call_function(
            aten.convolution.default, (x, a("kernel"), None, [1], [0], [1], True, [0], 1)
        ),
        SQUARE[None], aten.convolution.default,
    ),
    "a scaled sum in place": (
        lambda g, x, a: g.call_function(
            aten.add_.Tensor, (g.call_function(aten.clone.default, (x,)), x), {"alpha": 2}
        ),
        ROWS, aten.add_.Tensor,
    ),
    "statistics that are read": (
        lambda g, x, a: g.call_function(torch.sum, (normalized(g, x, a, 1),)),
        ROWS, aten._native_batch_norm_legit_no_training.default,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATEN)
def test_an_overload_becomes_a_function_of_torch_only_where_that_is_the_same(name: str) -> None:
    build, x, called = ATEN[name]
    module = aten_graph(build)
    expected = module(x)
    from_aten(module.graph)
    module.recompile()

    torch.testing.assert_close(module(x), expected)
    assert called in [node.target for node in module.graph.nodes]


def test_a_graph_of_dynamo_runs_as_it_is_under_autocast_and_after_many_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Rows(lambda m, x: x @ m.matrix)
    module = fx.symbolic_trace(model)
    monkeypatch.setattr("optimizer.frontend.dynamo._MOST", 1)

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


def open_ended(*values: Tensor, scale: float = 1.0) -> Tensor:
    return values[0] * scale


def hand_made(function: Callable[..., Any], **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    node = graph.call_function(function, (graph.placeholder("x"),), kwargs)
    graph.output(node)
    return node


def test_of_a_function_that_takes_anything_all_arguments_are_kept() -> None:
    node = hand_made(open_ended, scale=1.0)

    assert operands(node) == (node.args, {"scale": 1.0})
    assert not overwrites(node.all_input_nodes[0])


def test_what_has_no_signature_may_take_anything() -> None:
    _require_takes(vars, (1, 2), {})

    with pytest.raises(CaptureError, match="its parameters are not known"):
        toolkit.replace_pattern(optimizer.capture(Rows(lambda m, x: x + 1)), vars, F.relu)


def failing(*given: Any, **options: Any) -> Any:
    raise ValueError("no such thing")


def test_bisect_tells_of_a_graph_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.verify.check.answer", failing)
    culprit = optimizer.bisect(Rows(lambda m, x: m.linear(x)), ROWS)

    assert "raised ValueError: no such thing" in str(culprit)


def test_a_graph_that_raises_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer._optimize.answer", failing)
    fast: Any = optimizer.optimize(Rows(lambda m, x: m.linear(x)), ROWS, level=1)

    assert any("raised ValueError: no such thing" in each for each in fast.report.remarks)
    torch.testing.assert_close(fast(ROWS), Rows(lambda m, x: m.linear(x))(ROWS))


def test_there_is_no_second_opinion_on_a_model_that_names_its_dtype() -> None:
    model, call = Rows(lambda m, x: x.float() @ m.matrix), as_call(ROWS)
    expected, actual = answer(model, call), answer(model, call)
    actual.output.add_(0.1)

    assert compare_answers(model, call, expected, actual, exact=False) is not None


def test_a_phase_that_never_comes_to_an_end_is_a_faulty_pass() -> None:
    module: Any = optimizer.capture(Rows(lambda m, x: x + 1), ROWS)
    pipeline = Pipeline(module)
    pipeline._attempt = lambda each: True  # type: ignore[method-assign]

    with pytest.raises(FaultyPassError, match="never come to an end"):
        pipeline.run(optimizer.all_passes())


def test_a_norm_of_six_dimensions_stays_a_function() -> None:
    x = torch.linspace(-1.0, 1.0, 64).reshape(2, 4, 2, 2, 2, 1)

    optimized(lambda m, x: F.batch_norm(x, m.row, m.spread), x)


class Swallows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            positive = bool(x.sum() > 0)
        except Exception:
            positive = False
        return x + positive


def test_a_child_that_swallows_what_cannot_be_recorded_is_called() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Swallows()).eval()
    fast = optimizer.optimize(model, ROWS, level=1)

    for x in (ROWS, -ROWS, ROWS + 9):
        torch.testing.assert_close(fast(x), model(x))


def test_a_pickle_of_a_pickle_can_be_refitted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    fast = optimizer.optimize(model, ROWS, level=1)
    for _ in range(2):
        fast = pickle.loads(pickle.dumps(fast))

    torch.testing.assert_close(fast.refit(model.state_dict())(ROWS), model(ROWS))


def test_a_replacement_brings_its_layers_and_tensors() -> None:
    module = optimizer.capture(Rows(lambda m, x: F.relu(x) + 1), ROWS)
    shifted = Rows(lambda m, x: m.linear(x) @ m.weight + m.row)
    replaced = toolkit.replace_pattern(module, F.relu, shifted)

    torch.testing.assert_close(replaced(ROWS), shifted(ROWS) + 1)


def test_what_nobody_reads_is_removed_and_leaves_no_reader() -> None:
    module: Any = optimizer.capture(Rows(lambda m, x: F.relu(x) + 1), ROWS)
    (node,) = toolkit.find(module, F.relu)
    with module.graph.inserting_after(node):
        idle = module.graph.call_function(torch.exp, (node,))

    toolkit.remove_node(idle)
    torch.testing.assert_close(module(ROWS), F.relu(ROWS) + 1)


def test_the_cost_of_a_factory_is_that_of_any_device() -> None:
    costs = roofline(Rows(lambda m, x: x + torch.zeros(x.shape, device="cpu")), ROWS)

    assert [cost.unknown for cost in costs.rows] == [""] * len(costs.rows)


def test_a_call_with_what_is_no_number_has_no_signature() -> None:
    assert Signature.of((ROWS, object()), {}) is None
    assert Signature.of((ROWS, 1), {}) is not None


def test_a_node_gives_way_where_nothing_is_known_of_the_graph() -> None:
    graph = fx.symbolic_trace(Rows(lambda m, x: x.relu().abs())).graph
    relu, absolute = (node for node in graph.nodes if node.op == "call_method")

    replace_later_uses(absolute, relu, after=relu)
    supersede(absolute, relu)
    assert absolute not in graph.nodes
    assert next(iter(reversed(graph.nodes))).args == (relu,)


def test_what_is_lowered_to_another_answer_is_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(1, 3, 8, 8)
    monkeypatch.setattr(Run, "_output_difference", lambda run, actual: "made up")
    fast = optimizer.optimize(model, x, level=2, tune_seconds=0.0)

    assert "such a call is not lowered: its answer differs (made up)" in str(fast.report)
    torch.testing.assert_close(fast(x), model(x))


IMAGE = torch.linspace(-1.0, 1.0, 192).reshape(1, 3, 8, 8)


def convolved(function: Callable[..., Any]) -> nn.Module:
    return Forward(function, conv=nn.Conv2d(3, 8, 3)).eval()


def test_a_matrix_that_is_transposed_after_a_convolution_is_lowered() -> None:
    model = convolved(lambda m, x: m.conv(m.conv(x).relu()[:, :3].mT).mT)
    fast = Optimize(2)(model, (IMAGE,))

    assert fast.meta["lowered"]
    assert_equivalent(model, fast, (IMAGE,))


def test_a_function_of_unknown_code_is_not_lowered() -> None:
    model = convolved(lambda m, x: doubled(m.conv(x).relu()))
    fast = Optimize(2)(model, (IMAGE,))

    assert "runs code that may do more" in str(fast.report)
    assert_equivalent(model, fast, (IMAGE,))


def test_without_a_reference_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_reference", lambda run: None)

    assert optimized(lambda m, x: m.linear(x).relu(), check="each").report.fired


def test_the_cost_of_what_raises_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.analysis.cost._runs_a_kernel", failing)
    costs = roofline(Rows(lambda m, x: x.relu()), ROWS).rows
    assert {each.unknown for each in costs} == {"no such thing"}


def test_indices_are_timed_as_they_are() -> None:
    indices = torch.tensor([1, 2])

    assert varied(indices) is indices


def scaled(function: Callable[[Tensor], Tensor]) -> nn.Module:
    """A function of x * weight, as a pattern and as what has it."""
    weight = nn.Parameter(torch.tensor([2.0, -1.0, 0.5, 3.0]))
    return Forward(lambda m, x: function(x * m.weight), weight=weight).eval()


def test_a_pattern_may_read_a_parameter() -> None:
    module = optimizer.capture(scaled(torch.relu))
    with torch.no_grad():
        module.weight.mul_(2)
    edited = toolkit.replace_pattern(module, scaled(torch.relu), scaled(torch.abs))

    torch.testing.assert_close(edited(ROWS), torch.abs(ROWS * module.weight))


def test_a_computed_setting_keeps_a_layer_a_function() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    stride = graph.call_method("size", (x, 0))
    weight = graph.get_attr("weight")
    node = graph.call_function(F.conv1d, (x, weight, None, stride, 0, 1, 1))

    affine_as_module(node)
    assert node.target is F.conv1d
