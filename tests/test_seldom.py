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
from optimizer.core.report import Rewrite
from optimizer.frontend.canonicalize import affine_as_module, from_aten
from optimizer.lowering.choose import varied
from optimizer.lowering.plan import signature_of
from optimizer.rewrite.edit import operands, overwrites, replace_later_uses, supersede
from optimizer.rewrite.pipeline import FaultyPassError, Pipeline
from optimizer.testing import Optimize, assert_equivalent
from optimizer.verify.equivalence import answer, compare_answers
from tests.level_2 import image
from tests.single_pass import Forward, rows, texts

aten = torch.ops.aten
ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
SQUARE = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


class Rows(Forward):
    """Runs a forward of a case; it has a layer, a parameter and buffers."""

    def __init__(self, function: Callable[..., Any] | str) -> None:
        torch.manual_seed(0)
        matrices = {"weight": nn.Parameter(torch.randn(4, 4)), "matrix": torch.randn(4, 4)}
        statistics = {"mean": torch.rand(4) + 1, "spread": torch.rand(4) + 1}
        layer, kernel = nn.Linear(4, 4), torch.randn(4, 2, 3)
        held: Any = {"linear": layer, "row": torch.randn(4), "kernel": kernel}
        super().__init__(function, **matrices, **statistics, **held)
        self.eval()


LINEAR = Rows("m.linear(x)")


def optimized(function: Callable[..., Any] | str, x: Any = ROWS, **options: Any) -> Any:
    """The optimized model, which gives eager's answer."""
    fast = optimizer.optimize(Rows(function), x, **{"level": 1, **options})

    torch.testing.assert_close(fast(x), Rows(function)(x))
    return fast


SPELLED = texts("""
    F.linear(bias=m.row, weight=m.matrix, input=x); F.linear(x, m.matrix, m.row);
    F.conv1d(x, m.matrix[None, :3, :1], padding=1, stride=2);
    F.dropout(x, training=False, p=0.3); torch.flatten(x[None], end_dim=1);
    torch.movedim(x[None], destination=2, source=0); torch.mm(x, mat2=m.matrix);
    torch.transpose(x, 0, 1) + torch.relu(x).t() + torch.mul(x, 2, out=torch.empty_like(x)).t();
    m.linear(x.cpu()); x + m.matrix.view(torch.int32).reshape(4, 4)[0] * 0;
    F.relu(x @ m.matrix) * (m.matrix.ndim + m.matrix.dim() + m.matrix.size(0) + m.matrix.size()[1])
""") | {
    "its own tensors, of their types": (
        "assert isinstance(m.weight, nn.Parameter) and not isinstance(m.matrix, nn.Parameter);"
        "assert isinstance(m.linear(x), torch.Tensor); return m.linear(x)"
    )
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_a_rare_spelling_has_the_same_answer(name: str) -> None:
    assert optimized(SPELLED[name]).report.front_end == "symbolic"


@rows(
    "reason forward",
    {
        "iterated": ("it iterates over a traced value", "sum(row for row in x)"),
        "unpacked": ("it asks a traced value for its keys", "dict(**x)"),
    },
)
def test_what_cannot_be_recorded_is_told(reason: str, forward: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        optimizer.capture(Rows(forward))


def graph_of(build: Callable[[fx.Graph, fx.Node, Callable[[str], fx.Node]], Any]) -> Any:
    """What a function adds to a graph of one input, over the tensors of `Rows`."""
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x"), graph.get_attr))
    return fx.GraphModule(Rows("x"), graph)


def statistics_read(g: fx.Graph, x: fx.Node, get: Callable[[str], fx.Node]) -> fx.Node:
    tensors = [get(name) for name in ("row", "row", "mean", "spread")]
    norm = aten._native_batch_norm_legit_no_training.default
    whole = g.call_function(norm, (x, *tensors, 0.1, 1e-5))
    return g.call_function(torch.sum, (g.call_function(lambda three: three[1], (whole,)),))


@rows(
    "build x called",
    {
        "mm": (lambda g, x, a: g.call_function(aten.mm.default, (x, a("weight"))), ROWS, torch.mm),
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
            statistics_read, ROWS, aten._native_batch_norm_legit_no_training.default
        ),
    },
)  # fmt: skip
def test_an_overload_becomes_a_function_of_torch_only_where_that_is_the_same(
    build: Any, x: Tensor, called: Any
) -> None:
    module = graph_of(build)
    expected = module(x)
    from_aten(module.graph)
    module.recompile()

    torch.testing.assert_close(module(x), expected)
    assert called in [node.target for node in module.graph.nodes]


def test_a_graph_of_dynamo_runs_as_it_is_under_autocast_and_after_many_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("optimizer.frontend.dynamo._MOST", 1)
    with torch.autocast("cpu", torch.bfloat16):
        run = backend(fx.symbolic_trace(Rows("x @ m.matrix")), [ROWS])
        assert run(ROWS).dtype == torch.bfloat16

    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    graph.output((graph.call_function(torch.matmul, (x, weight)),))
    with torch.no_grad():
        run = backend(fx.GraphModule(nn.Module(), graph), [nn.Parameter(SQUARE), ROWS])
        for factor in (1.0, 2.0, 3.0):
            weight = nn.Parameter(SQUARE * factor)
            torch.testing.assert_close(run(weight, ROWS), (ROWS @ weight,))


def test_a_graph_of_dynamo_keeps_its_own_tensors_and_modules() -> None:
    module = graph_of(
        lambda g, x, a: (g.call_function(torch.add, (g.call_module("linear", (x,)), a("row"))),)
    )
    with torch.no_grad():
        torch.testing.assert_close(backend(module, [ROWS])(ROWS), module(ROWS))


def test_what_is_not_optimized_again_cannot_be_refitted(monkeypatch: pytest.MonkeyPatch) -> None:
    fast: Any = optimizer.optimize(LINEAR, level=1)
    assert fast(ROWS).shape == ROWS.shape
    left_alone = nn.Identity()
    object.__setattr__(left_alone, "report", type("Report", (), {"remarks": ("it is Tuesday",)})())
    monkeypatch.setattr(Run, "result", lambda self: left_alone)

    with pytest.raises(CaptureError, match="it is Tuesday"):
        fast.refit(LINEAR.state_dict())


class OwnState(Rows):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("it has none")


def test_a_model_whose_checkpoint_or_code_cannot_be_told_is_not_refitted() -> None:
    stateless: Any = optimizer.optimize(OwnState("m.linear(x)"), ROWS, level=1)
    gone = optimized("m.linear(x)")
    gone.meta["recipe"] = b"what no pickle is"

    for fast in (stateless, copy.deepcopy(stateless), gone):
        with pytest.raises(InputError, match="optimize"):
            fast.refit({})


def off_by(difference: float, function: Callable[..., Any], *, exact: bool) -> Any:
    model, call = Rows(function), as_call(ROWS)
    expected, actual = answer(model, call), answer(model, call)
    actual.output.add_(difference)
    return compare_answers(model, call, expected, actual, exact=exact)


def test_a_difference_counts_where_the_model_repeats_its_bits_or_names_its_dtype() -> None:
    calls = itertools.count()

    assert off_by(1e-7, lambda m, x: x * 1, exact=True) is not None
    assert off_by(1e-7, lambda m, x: x + 1e-6 * next(calls), exact=True) is None
    assert off_by(0.1, lambda m, x: x.float() @ m.matrix, exact=False) is not None


def test_of_a_model_that_is_not_recorded_no_first_divergence_is_told() -> None:
    fast = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(optimizer.EquivalenceError, match=r"output") as raised:
        optimizer.check(Rows("m.linear(x) if x.sum() > 0 else x"), fast, ROWS)
    assert "first value" not in str(raised.value)


def open_ended(*values: Tensor, scale: float = 1.0) -> Tensor:
    return values[0] * scale


def test_of_a_function_that_takes_anything_all_arguments_are_kept() -> None:
    module = graph_of(lambda g, x, a: g.call_function(open_ended, (x,), {"scale": 1.0}))
    x, node, _ = module.graph.nodes

    assert operands(node) == ((x,), {"scale": 1.0})
    assert not overwrites(x)


def test_what_has_no_signature_may_take_anything_but_is_no_pattern() -> None:
    module: Any = optimizer.capture(Rows("torch.relu(x)"))
    (node,) = toolkit.find(module, torch.relu)
    assert toolkit.insert_after(node, vars, 2).target is vars

    with pytest.raises(CaptureError, match="its parameters are not known"):
        toolkit.replace_pattern(optimizer.capture(Rows("x + 1")), vars, F.relu)


def failing(*given: Any, **options: Any) -> Any:
    raise ValueError("no such thing")


def test_a_graph_that_raises_is_told_and_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimizer.verify.check.answer", failing)
    assert "raised ValueError: no such thing" in str(optimizer.bisect(LINEAR, ROWS))

    monkeypatch.setattr("optimizer._optimize.answer", failing)
    remarks = optimized("m.linear(x)").report.remarks
    assert any("raised ValueError: no such thing" in each for each in remarks)


def test_the_cost_of_what_raises_is_unknown_and_of_a_factory_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = roofline(Rows("x + torch.zeros(x.shape, device='cpu')"), ROWS)
    assert {each.unknown for each in made.rows} == {""}

    monkeypatch.setattr("optimizer.analysis.cost._runs_a_kernel", failing)
    assert [each.unknown for each in roofline(Rows("x.relu()"), ROWS).rows][1] == "no such thing"


def test_a_phase_that_never_comes_to_an_end_is_a_faulty_pass() -> None:
    pipeline = Pipeline(optimizer.capture(Rows("x + 1"), ROWS))
    pipeline.fired = [Rewrite("spins", "add", "")]
    pipeline._attempt = lambda each: True  # type: ignore[method-assign]

    with pytest.raises(FaultyPassError, match="never come to an end"):
        pipeline.run(optimizer.all_passes())


def test_a_norm_of_six_dimensions_stays_a_function() -> None:
    x = torch.linspace(-1.0, 1.0, 64).reshape(2, 4, 2, 2, 2, 1)

    optimized("F.batch_norm(x, m.row, m.spread)", x)


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
    shifted = Rows("m.linear(x) @ m.weight + m.row")
    replaced = toolkit.replace_pattern(optimizer.capture(Rows("F.relu(x) + 1")), F.relu, shifted)

    torch.testing.assert_close(replaced(ROWS), shifted(ROWS) + 1)


def test_a_pattern_may_read_a_parameter() -> None:
    relu, absolute = Rows("torch.relu(x * m.weight[0])"), Rows("torch.abs(x * m.weight[0])")
    module = optimizer.capture(relu)
    with torch.no_grad():
        module.weight.mul_(2)

    edited = toolkit.replace_pattern(module, relu, absolute)
    torch.testing.assert_close(edited(ROWS), torch.abs(ROWS * module.weight[0]))


def test_what_nobody_reads_is_removed_and_leaves_no_reader() -> None:
    module: Any = optimizer.capture(Rows("F.relu(x) + 1"), ROWS)
    (node,) = toolkit.find(module, F.relu)
    with module.graph.inserting_after(node):
        idle = module.graph.call_function(torch.exp, (node,))

    toolkit.remove_node(idle)
    torch.testing.assert_close(module(ROWS), F.relu(ROWS) + 1)


def test_a_call_with_what_is_no_number_has_no_signature() -> None:
    assert signature_of((ROWS, object()), {}) is None
    assert signature_of((ROWS, 1), {}) is not None


def test_a_node_gives_way_where_nothing_is_known_of_the_graph() -> None:
    graph = fx.symbolic_trace(Rows("x.relu().abs()")).graph
    relu, absolute = (node for node in graph.nodes if node.op == "call_method")

    replace_later_uses(absolute, relu, after=relu)
    supersede(absolute, relu)
    assert absolute not in graph.nodes
    assert next(iter(reversed(graph.nodes))).args == (relu,)


def test_a_computed_setting_keeps_a_layer_a_function() -> None:
    module = graph_of(
        lambda g, x, a: g.call_function(
            F.conv1d, (x, a("weight"), None, g.call_method("size", (x, 0)), 0, 1, 1)
        )
    )
    node = next(iter(module.graph.find_nodes(op="call_function", target=F.conv1d)))

    affine_as_module(node)
    assert node.target is F.conv1d


def test_without_a_reference_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_reference", lambda run: None)

    assert optimized("m.linear(x).relu()", check="each").report.fired


@fx.wrap
def doubled(x: Tensor) -> Tensor:
    return x * 2


def convolved(forward: Callable[..., Any]) -> Any:
    model = Forward(forward, conv=nn.Conv2d(3, 8, 3)).eval()
    fast: Any = Optimize(2)(model, (image(1, 3, 8, 8),))
    assert_equivalent(model, fast, (image(1, 3, 8, 8),))
    return fast


def test_a_matrix_that_is_transposed_after_a_convolution_is_lowered() -> None:
    assert convolved(lambda m, x: m.conv(m.conv(x).relu()[:, :3].mT).mT).meta["lowered"]


def test_a_function_of_unknown_code_is_not_lowered() -> None:
    fast = convolved(lambda m, x: doubled(m.conv(x).relu()))
    assert "runs code that may do more" in str(fast.report)


def test_what_is_lowered_to_another_answer_is_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_output_difference", lambda run, actual: "made up")
    fast = convolved(lambda m, x: m.conv(x).relu())

    assert "such a call is not lowered: its answer differs (made up)" in str(fast.report)


def test_indices_are_timed_as_they_are() -> None:
    indices = torch.tensor([1, 2])

    assert varied(indices) is indices
