"""What the facts must know for no rewrite to rest on a guess, one case for each way to be wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

import optimizer
from optimizer.core.errors import Refused
from optimizer.facts.facts import Facts, fact, is_pure, rank
from optimizer.testing import assert_equivalent

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
torch.fx.wrap("noted")
torch.fx.wrap("first_if_alone")

NOTES: list[int] = []


def noted(x: Tensor) -> Tensor:
    NOTES.append(1)
    return x * 2


def first_if_alone(x: Tensor) -> Tensor:
    return x[0] if x.shape[0] == 1 else x


class Case(NamedTuple):
    """A model, its example and later inputs, and words of the only refusal, if there is one."""

    build: Callable[[], nn.Module]
    calls: tuple[tuple[Any, ...], ...]
    refusal: str = ""


class Layers(nn.Module):
    """A linear layer with its BatchNorm, and whatever else a case needs."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, eps=0.125)
        self.conv, self.image_norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=0.125)
        for norm in (self.norm, self.image_norm):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
        self.register_buffer("kernel", torch.randn(4, 3, 3, 3))
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Unary(Layers):
    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Binary(Layers):
    def forward(self, x: Any, other: Any) -> Any:
        return self.function(self, x, other)


class Opaque(nn.Module):
    """Runs a function where neither tracing nor meta tensors reach, for it reads a value."""

    def __init__(self, function: Callable[[Any, Tensor], Any], *held: nn.Module) -> None:
        super().__init__()
        self.function, self.held = function, nn.ModuleList(held)
        self.register_forward_hook(lambda module, inputs, result: None)  # so it is called as it is

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x) if float(x.sum()) > -1e9 else x


class Log(nn.Module):
    """Keeps a list, so that it is called as it is, and runs on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return x * len(self.calls)


def hooked_linear() -> nn.Module:
    linear = nn.Linear(4, 4)
    linear.register_forward_hook(lambda m, given, y: y[0] if y.shape[0] == 1 else y)
    return linear


def unary(
    function: Callable[..., Any], refusal: str, *inputs: Any, **members: Callable[[], Any]
) -> Case:
    def build() -> nn.Module:
        return Unary(function, **{name: make() for name, make in members.items()})

    return Case(build, tuple((each,) for each in inputs or (ROWS, ROWS * 2)), refusal)


def view_by_an_opaque_child(m: Any, x: Any) -> Any:
    y = x * 2
    view = m.child(y)
    y[y < 0] = 0.0
    return view


def source_written_by_an_opaque_child(m: Any, x: Any) -> Any:
    y, mask = x.clone(), x > 0
    m.child(x)
    y[mask] = 0.0
    return y


def row_number(m: Any, x: Any) -> Any:
    y = x * 2
    y[x.shape[0] - 1] = 0.0
    return y


def zeros_then_view(m: Any, x: Any) -> Any:
    y = m.linear(x).relu()
    view = y.transpose(0, 1)
    view[view > 0.5] = 0.0
    return view.transpose(0, 1), y


def write_before(m: Any, x: Any) -> Any:
    y, mask = x.clone(), x > 0
    y[0] = 5.0
    y[mask] = 0.0
    return y


def filled_cache(m: Any, x: Any, cache: Any) -> Any:
    cache["x"] = x * 2
    return x.exp()


def longer_cache(m: Any, x: Any, cache: Any) -> Any:
    cache.append(x * 2)
    return x.exp()


def masked_by_a_number(m: Any, x: Any, number: Any) -> Any:
    y = x * number + 1
    y[x < 0] = 0.0
    return y


SINGLE, SEVERAL = torch.randn(1, 4, 4), torch.randn(3, 4, 4)
IN_CONTAINER = "of tensors inside the input 'x'"
VARIES = "its rank depends on sizes"
CASES: dict[str, Case] = {
    "a view that only an opaque child knows of": unary(
        view_by_an_opaque_child,
        "would see the write",
        child=lambda: Opaque(lambda m, y: y[:2]),
    ),
    "a copy whose source an opaque child writes": unary(
        source_written_by_an_opaque_child, "", child=lambda: Opaque(lambda m, x: x.add_(1.0))
    ),
    "a copy that was written before": unary(write_before, ""),
    "a view of what a pass replaced": unary(zeros_then_view, "would see the write"),
    "a row number": unary(row_number, "is not a tensor"),
    "a rank that a wrapped function may change": unary(
        lambda m, x: m.norm(m.linear(first_if_alone(x))), VARIES, SINGLE, SEVERAL
    ),
    "a rank that a hook may change": unary(
        lambda m, x: m.norm(m.linear(m.child(x))),
        "has no known shape",
        *(SINGLE, SEVERAL),
        child=hooked_linear,
    ),
    "a rank inside a dict": unary(
        lambda m, x: m.norm(m.linear(x["x"])), IN_CONTAINER, {"x": ROWS}, {"x": SEVERAL}
    ),
    "a rank inside a list": unary(
        lambda m, x: m.norm(m.linear(x[0])) + x[1], IN_CONTAINER, [ROWS, ROWS], [SEVERAL, SEVERAL]
    ),
    "a dict that is filled": Case(
        lambda: Binary(filled_cache), ((ROWS, {}), (ROWS, {"x": ROWS})), ""
    ),
    "a list that is appended to": Case(
        lambda: Binary(longer_cache), ((ROWS, []), (ROWS, [ROWS])), ""
    ),
    "a number among the inputs": Case(
        lambda: Binary(masked_by_a_number), ((ROWS, 2), (ROWS * 2, -3)), ""
    ),
    "a buffer for a weight, written before": unary(
        lambda m, x: (m.kernel.mul_(2), m.image_norm(F.conv2d(x, m.kernel)))[1],
        "",
        torch.randn(2, 3, 5, 5),
    ),
}


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_right_at_later_calls_too(name: str, example: bool) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build().eval()
    eager = copy.deepcopy(model)

    fast = optimizer.optimize(
        model, copy.deepcopy(case.calls[0]) if example else None, check=None, level=1
    )

    for call in case.calls:
        one, other = copy.deepcopy(call), copy.deepcopy(call)
        with torch.no_grad():
            expected, actual = (eager(*one), one), (fast(*other), other)
        assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
        torch.testing.assert_close(pytree.tree_leaves(actual), pytree.tree_leaves(expected))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refusal])
def test_the_report_says_what_is_not_known(name: str) -> None:
    case = CASES[name]

    fast = optimizer.optimize(
        case.build().eval(), copy.deepcopy(case.calls[0]), check=None, level=1
    )

    assert any(case.refusal in refused.reason for refused in fast.report.refused)


def test_a_layer_that_an_opaque_child_may_write_is_not_folded() -> None:
    model = (
        Unary(lambda m, x: (m.child(x), m.image_norm(m.conv(x)))[1]).eval().requires_grad_(False)
    )
    model.child = Opaque(lambda m, x: m.held[0].weight.mul_(2.0), model.conv)
    eager, x = copy.deepcopy(model), torch.randn(2, 3, 5, 5)

    fast = optimizer.optimize(model, x, check=None, level=1)

    assert [refused.reason for refused in fast.report.refused] == [
        "the forward writes their tensors"
    ]
    torch.testing.assert_close(fast(x), eager(x))


def test_what_a_refused_rewrite_asked_binds_nobody() -> None:
    model = Unary(lambda m, x: m.norm(m.linear(x)) + m.linear(-x).relu()).eval()

    fast = optimizer.optimize(model, SEVERAL, check=None, level=1)

    assert set(fast.report.counts()) == {"fuse_linear_relu"}
    torch.testing.assert_close(fast(ROWS), model(ROWS))


def test_a_tensor_made_on_another_default_device_counts() -> None:
    def masked(m: Any, x: Any) -> Any:
        y, other = x * 2, torch.zeros(x.shape[0])
        y[x > 0] = 0.0
        return y + other.numel()

    with torch.device("meta"):
        fast = optimizer.optimize(
            Unary(masked).to_empty(device="cpu").eval(), ROWS, check=None, level=1
        )

    assert [refused.reason for refused in fast.report.refused] == [
        "the tensors may live on different devices"
    ]


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_a_mask_may_lie_on_another_device_than_what_it_chooses(device: Any) -> None:
    def masked(m: Any, x: Any) -> Any:
        y = torch.zeros(x.shape, device=device)
        y[x > 0] = 1.0
        return x + y.dim()

    model = Unary(masked).eval()

    fast = optimizer.optimize(model, ROWS, check=None, level=1)

    assert torch.equal(fast(ROWS), model(ROWS))


def dead(function: Callable[..., Any], **members: Any) -> nn.Module:
    return Unary(lambda m, x: (function(m, x), x.exp())[1], **members).eval()


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        NOTES.append(1)
        return weight * 2


def parametrized() -> nn.Module:
    linear = nn.Linear(4, 4)
    parametrize.register_parametrization(linear, "weight", Scaled())
    return linear


DEAD: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module]]] = {
    "a wrapped function": (lambda m, x: noted(x), nn.Identity),
    "a parametrization": (lambda m, x: m.child(x), parametrized),
}


@pytest.mark.parametrize("name", DEAD)
def test_python_code_of_unknown_effect_runs_though_nobody_reads_its_value(name: str) -> None:
    function, make = DEAD[name]
    fast = optimizer.optimize(dead(function, child=make()), ROWS, check=None, level=1)
    NOTES.clear()

    fast(ROWS)

    assert NOTES == [1]


def test_a_hook_inside_a_layer_of_torch_meets_data_and_is_not_dead() -> None:
    seen: list[str] = []
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    layer.linear1.register_forward_hook(
        lambda module, given, result: seen.append(result.device.type)
    )

    fast = optimizer.optimize(dead(lambda m, x: m.child(x), child=layer), ROWS, check=None, level=1)
    assert "meta" not in seen

    seen.clear()
    fast(ROWS)
    assert seen == ["cpu"]


def test_a_child_that_keeps_a_list_is_called_though_nobody_reads_its_value() -> None:
    model = dead(lambda m, x: m.child(x), child=Log())
    fast = optimizer.optimize(model, ROWS, check=None, level=1)

    fast(ROWS)
    fast(ROWS)

    assert fast.model.child.calls == [1, 1]
    assert model.child.calls == []


@pytest.mark.parametrize(("package", "trusted"), [("torch.nn", True), ("torch_like.nn", False)])
def test_code_is_trusted_by_the_name_of_its_package(package: str, trusted: bool) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    globals_of_the_package = {"__name__": package}
    double = FunctionType(double.__code__, globals_of_the_package)
    double.__module__ = package
    graph = optimizer.capture(nn.ReLU(), torch.ones(2))
    relu = next(node for node in graph.graph.nodes if node.op == "call_function")
    relu.target, relu.args = double, relu.args[:1]

    assert is_pure(relu) is trusted


@pytest.mark.parametrize("written", [False, True])
def test_without_example_inputs_a_weight_is_a_layers_if_only_layers_read_it(written: bool) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        if written:
            m.weight.mul_(2)
        return F.linear(x, m.weight)

    captured = optimizer.capture(Unary(forward, weight=nn.Buffer(torch.ones(4, 4))))

    assert any(node.op == "call_module" for node in captured.graph.nodes) is not written


@pytest.mark.parametrize("learns", [False, True])
def test_a_copy_without_data_has_parameters_and_buffers_where_the_module_does(learns: bool) -> None:
    def held(module: nn.Module) -> list[tuple[str, type, bool]]:
        tensors = [*module.named_parameters(), *module.named_buffers()]
        return [(name, type(each), each.requires_grad) for name, each in tensors]

    layer = nn.BatchNorm1d(3).requires_grad_(learns)

    assert held(Facts().to_meta(layer)) == held(layer)


def test_facts_tell_a_tensor_from_a_later_one_in_its_place() -> None:
    facts = Facts()

    for size in range(20):
        assert facts.to_meta(torch.empty(size)).shape == (size,)


def test_a_sum_that_is_written_over_a_value_writes_it() -> None:
    def doubled(m: Any, x: Tensor) -> Tensor:
        y = x.exp()
        torch.add(x, x, out=y)
        return y

    nodes = optimizer.capture(Unary(doubled), ROWS).graph.nodes
    exp, add = (node for node in nodes if node.op.startswith("call"))

    assert fact(add).writes == fact(add).storages == fact(exp).storages


def test_a_rank_depends_on_sizes_if_that_of_one_operand_does() -> None:
    captured = optimizer.capture(Binary(lambda m, x, other: x.squeeze(0) + other), (ROWS, ROWS))
    add = next(node for node in captured.graph.nodes if node.name == "add")

    with pytest.raises(Refused, match="depends on sizes"):
        rank(add)


class Flattening(nn.Module):
    """Reshapes in a way that tracing cannot look into, unless it is told to."""

    def __init__(self, opaque: bool) -> None:
        super().__init__()
        self.opaque, self.calls = opaque, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.opaque
        return x.reshape(-1)


class WritesAReshaped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        before, flat = torch.relu(x), self.inner(x)
        flat.add_(1.0)
        return before.reshape(-1) * torch.relu(x).reshape(-1)


@pytest.mark.parametrize("flatten", [nn.Flatten(0), Flattening(False), Flattening(True)])
def test_what_is_copied_in_the_example_may_be_a_view_in_another_call(
    flatten: Any,
) -> None:
    model = WritesAReshaped(flatten).eval()
    copied = torch.linspace(-1, 1, 24).reshape(4, 6).t()
    viewed = torch.linspace(-1, 1, 48)[::2].view(6, 4)

    fast = optimizer.optimize(model, copied, check=None, level=1)

    one, other = (torch.empty_strided((6, 4), (8, 2)).copy_(viewed) for _ in range(2))
    assert torch.equal(fast(one), model(other))
    assert torch.equal(one, other)


class TakesRows(nn.Module):
    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x), torch.relu(x)[rows]


def test_rows_that_are_copied_by_number_may_be_one_that_is_viewed_in_another_call() -> None:
    x, row = torch.linspace(-1, 1, 6).view(3, 2), torch.tensor(1)

    model = TakesRows().eval()

    fast = optimizer.optimize(model, (x, torch.tensor([2, 0])), check=None, level=1)

    assert_equivalent(model, fast, (x, row))


class DrawsTwice(nn.Module):
    """What two calls of `draw` in training mode differ by."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        super().__init__()
        self.eval()
        self.first, self.second = nn.Dropout(), nn.Dropout()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.first, x) - self.draw(self.second, x)


@pytest.mark.parametrize(
    "draw",
    [
        lambda layer, x: layer(x),
        lambda layer, x: F.dropout(x, 0.5, True),
        lambda layer, x: F.alpha_dropout(x, 0.5, True),
        lambda layer, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    ],
    ids=["module", "function", "alpha", "attention"],
)
def test_what_draws_nothing_of_an_empty_example_may_draw_later(draw: Callable[..., Any]) -> None:
    fast = optimizer.optimize(DrawsTwice(draw), torch.ones(0, 2, 8, 8), check=None, level=1)

    torch.manual_seed(0)
    assert fast.report.counts().get("eliminate_common_subexpressions", 0) == 0
    assert fast(torch.ones(1, 2, 8, 8)).any()
