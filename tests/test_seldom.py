"""Models and edits that are seldom met: the answer is eager's, or the refusal says why."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import optimizer
from optimizer import CaptureError, EquivalenceError, InputError, toolkit
from optimizer._dynamo import backend
from optimizer._optimize import Run
from optimizer.analysis import roofline
from optimizer.testing import Optimize, assert_equivalent
from tests.level_2 import image
from tests.single_pass import Forward, rows, texts

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)


class Rows(Forward):
    """Runs a forward of a case; it has a layer, a parameter and buffers."""

    def __init__(self, forward: Any) -> None:
        torch.manual_seed(0)
        matrices = {"weight": nn.Parameter(torch.randn(4, 4)), "matrix": torch.randn(4, 4)}
        statistics = {"mean": torch.rand(4) + 1, "spread": torch.rand(4) + 1}
        held: Any = {"linear": nn.Linear(4, 4), "row": torch.randn(4)}
        super().__init__(forward, **matrices, **statistics, **held, kernel=torch.randn(4, 2, 3))
        self.eval()


def optimized(model: nn.Module) -> Any:
    """The optimized model, which gives eager's answer."""
    fast = optimizer.optimize(model, ROWS, level=1)

    torch.testing.assert_close(fast(ROWS), model(ROWS))
    return fast


# Of an overload some arguments mean something else than of the function of torch.
SPELLED = texts("""
    F.linear(bias=m.row, weight=m.matrix, input=x); F.linear(x, m.matrix, m.row);
    F.conv1d(x, m.matrix[None, :3, :1], padding=1, stride=2);
    F.dropout(x, training=False, p=0.3); torch.flatten(x[None], end_dim=1);
    torch.movedim(x[None], destination=2, source=0); torch.mm(x, mat2=m.matrix);
    torch.transpose(x, 0, 1) + torch.relu(x).t() + torch.mul(x, 2, out=torch.empty_like(x)).t();
    m.linear(x.cpu()); x + m.matrix.view(torch.int32).reshape(4, 4)[0] * 0;
    F.relu(x @ m.matrix) * (m.matrix.ndim + m.matrix.dim() + m.matrix.size(0) + m.matrix.size()[1]);
    F.batch_norm(x[..., None, None, None, None], m.row, m.spread);
    torch.ops.aten.mm.default(x, m.weight);
    torch.ops.aten.addmm.default(m.weight[:3], x, m.weight);
    torch.ops.aten.add_.Tensor(torch.ops.aten.clone.default(x), x, alpha=2);
    torch.ops.aten.convolution.default(x.T[None], m.kernel, None, [1], [0], [1], True, [0], 1);
    torch.ops.aten._native_batch_norm_legit_no_training.default(
        x, m.row, m.row, m.mean, m.spread, 0.1, 1e-5)[1]
""") | {
    "its own tensors, of their types": (
        "assert isinstance(m.weight, nn.Parameter) and not isinstance(m.matrix, nn.Parameter);"
        "assert isinstance(m.linear(x), torch.Tensor); return m.linear(x)"
    )
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLED)
def test_a_rare_spelling_has_the_same_answer(name: str) -> None:
    assert optimized(Rows(SPELLED[name])).report.front_end == "symbolic"


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


def test_a_graph_of_dynamo_keeps_its_own_tensors_and_modules_and_its_autocast() -> None:
    module = fx.symbolic_trace(Rows("return (m.linear(x) + m.row,)"))
    with torch.no_grad():
        torch.testing.assert_close(backend(module, [ROWS])(ROWS), module(ROWS))
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            backend(fx.symbolic_trace(Rows("x @ m.matrix")), [ROWS])(ROWS).dtype == torch.bfloat16
        )


class OwnState(Rows):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("it has none")


def test_a_model_whose_checkpoint_or_code_cannot_be_told_is_not_refitted() -> None:
    gone = optimized(Rows("m.linear(x)"))
    gone.meta["recipe"] = b"what no pickle is"

    for fast in (optimized(OwnState("m.linear(x)")), gone):
        with pytest.raises(InputError, match="optimize"):
            fast.refit({})


def test_a_pickle_of_a_pickle_can_be_refitted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    fast = optimized(model)
    for _ in range(2):
        fast = pickle.loads(pickle.dumps(fast))

    torch.testing.assert_close(fast.refit(model.state_dict())(ROWS), model(ROWS))


def test_another_answer_is_told_where_the_model_names_its_dtype_or_is_not_recorded() -> None:
    """The first value to differ is of a graph, which there must be."""
    for forward in ("x.float() @ m.matrix", "m.linear(x) if x.sum() > 0 else x"):
        with pytest.raises(EquivalenceError, match="output") as raised:
            optimizer.check(Rows(forward), Rows(f"({forward}) + 0.1"), ROWS)
        assert "first value" not in str(raised.value)


def test_a_model_that_does_not_repeat_its_bits_is_no_judge_of_them() -> None:
    calls = itertools.count()
    fast = optimizer.optimize(Rows(lambda m, x: x + 1e-6 * next(calls)), ROWS, level=0)

    assert not any("answer" in each for each in fast.report.remarks)


def test_what_has_no_signature_is_no_pattern() -> None:
    with pytest.raises(CaptureError, match="its parameters are not known"):
        toolkit.replace_pattern(optimizer.capture(Rows("x + 1")), vars, F.relu)


def test_the_cost_of_a_factory_is_known() -> None:
    made = roofline(Rows("x + torch.zeros(x.shape, device='cpu')"), ROWS)

    assert {each.unknown for each in made.rows} == {""}


class Swallows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        positive = False
        with contextlib.suppress(Exception):
            positive = bool(x.sum() > 0)
        return x + positive


def test_a_child_that_swallows_what_cannot_be_recorded_is_called() -> None:
    model = nn.Sequential(nn.Identity(), Swallows()).eval()
    fast = optimizer.optimize(model, -ROWS, level=1)  # where it answers as if it had raised

    for x in (-ROWS, ROWS):
        torch.testing.assert_close(fast(x), model(x))


def test_a_pattern_may_read_a_parameter_and_what_stands_instead_brings_its_own() -> None:
    relu, shifted = Rows("torch.relu(x * m.weight[0])"), Rows("m.linear(x) * m.weight[0] + m.row")
    module = optimizer.capture(relu)
    with torch.no_grad():
        module.weight.mul_(2)
        expected = module.weight[0] * shifted.linear(ROWS) + shifted.row

    torch.testing.assert_close(toolkit.replace_pattern(module, relu, shifted)(ROWS), expected)


@fx.wrap
def doubled(x: Tensor) -> Tensor:
    return x * 2


def convolved(forward: Any) -> Any:
    model, inputs = Forward(forward, conv=nn.Conv2d(3, 8, 3)).eval(), (image(1, 3, 8, 8),)
    fast: Any = Optimize(2)(model, inputs)
    assert_equivalent(model, fast, inputs)
    return fast


def test_a_matrix_that_is_transposed_after_a_convolution_is_lowered() -> None:
    assert convolved("m.conv(m.conv(x).relu()[:, :3].mT).mT").meta["lowered"]


def test_a_function_of_unknown_code_is_not_lowered() -> None:
    fast = convolved(lambda m, x: doubled(m.conv(x).relu()))
    assert "runs code that may do more" in str(fast.report)


def test_what_is_lowered_to_another_answer_is_not_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_output_difference", lambda run, actual: "made up")
    fast = convolved("m.conv(x).relu()")

    assert "such a call is not lowered: its answer differs (made up)" in str(fast.report)
