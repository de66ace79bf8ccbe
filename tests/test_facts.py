"""What the facts must know for no rewrite to rest on a guess, one case for each way to be wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

import optimizer
from optimizer.core.errors import Refused
from optimizer.core.ops import MAY_COPY
from optimizer.facts.facts import Facts, fact, is_pure, rank
from optimizer.testing import assert_equivalent
from tests.single_pass import Forward, ForwardOfTwo

ROWS = torch.linspace(-2.0, 3.0, 12).reshape(3, 4)
TWICE = ((ROWS,), (ROWS * 2,))
torch.fx.wrap("noted")
torch.fx.wrap("first_if_alone")

NOTES: list[int] = []


def noted(x: Tensor) -> Tensor:
    NOTES.append(1)
    return x * 2


def first_if_alone(x: Tensor) -> Tensor:
    return x[0] if x.shape[0] == 1 else x


def doubled(weight: Tensor) -> None:
    weight.mul_(2.0)


class Layers(Forward):
    """Two layers with their BatchNorms, and whatever else a case needs."""

    def __init__(self, function: Callable[..., Any] | str, **members: Any) -> None:
        one, other = nn.BatchNorm1d(4, eps=0.125), nn.BatchNorm2d(4, eps=0.125)
        for norm in (one, other):
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
        held: Any = {"linear": nn.Linear(4, 4), "norm": one, "kernel": torch.randn(4, 3, 3, 3)}
        held |= {"conv": nn.Conv2d(3, 4, 3), "image_norm": other}
        super().__init__(function, **held, **members)
        self.eval()


class OfTwo(Layers, ForwardOfTwo):
    pass


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


NORMED = "m.norm(m.linear({}))"
SINGLE, SEVERAL, IMAGE = torch.randn(1, 4, 4), torch.randn(3, 4, 4), torch.randn(2, 3, 5, 5)
SEES, IN_CONTAINER = "would see the write", "of tensors inside the input 'x'"
# How a model is made, its example and later inputs, and words of the only refusal, if any.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[Any, ...], ...], str]] = {
    "a view that only an opaque child knows of": (
        lambda: Layers("y = x * 2; view = m.child(y); y[y < 0] = 0.0; return view",
                       child=Opaque(lambda m, y: y[:2])),
        TWICE, SEES,
    ),
    "a view of a view that only an opaque child knows of": (
        lambda: Layers("y = x * 2; view = m.child(y).t(); y[y < 0] = 0.0; return view",
                       child=Opaque(lambda m, y: y[:2])),
        TWICE, SEES,
    ),
    "a copy whose source an opaque child writes": (
        lambda: Layers("y, mask = x.clone(), x > 0; m.child(x); y[mask] = 0.0; return y",
                       child=Opaque(lambda m, x: x.add_(1.0))),
        TWICE, "",
    ),
    "a copy that was written before": (
        lambda: Layers("y, mask = x.clone(), x > 0; y[0] = 5.0; y[mask] = 0.0; return y"),
        TWICE, "",
    ),
    "a view of what a pass replaced": (
        lambda: Layers("y = m.linear(x).relu(); view = y.transpose(0, 1); view[view > 0.5] = 0.0;"
                       "return view.transpose(0, 1), y"),
        TWICE, SEES,
    ),
    "a row number": (
        lambda: Layers("y = x * 2; y[x.shape[0] - 1] = 0.0; return y"), TWICE, "is not a tensor"
    ),
    "a rank that a wrapped function may change": (
        lambda: Layers(lambda m, x: m.norm(m.linear(first_if_alone(x)))),
        ((SINGLE,), (SEVERAL,)), "its rank depends on sizes",
    ),
    "a rank that a hook may change": (
        lambda: Layers(NORMED.format("m.child(x)"), child=hooked_linear()),
        ((SINGLE,), (SEVERAL,)), "has no known shape",
    ),
    "a rank inside a dict": (
        lambda: Layers(NORMED.format("x['x']")), (({"x": ROWS},), ({"x": SEVERAL},)), IN_CONTAINER
    ),
    "a rank inside a list": (
        lambda: Layers(NORMED.format("x[0]") + " + x[1]"),
        (([ROWS, ROWS],), ([SEVERAL, SEVERAL],)), IN_CONTAINER,
    ),
    "a dict that is filled": (
        lambda: OfTwo("z['x'] = x * 2; return x.exp()"), ((ROWS, {}), (ROWS, {"x": ROWS})), ""
    ),
    "a list that is appended to": (
        lambda: OfTwo("z.append(x * 2); return x.exp()"), ((ROWS, []), (ROWS, [ROWS])), ""
    ),
    "a number among the inputs": (
        lambda: OfTwo("y = x * z + 1; y[x < 0] = 0.0; return y"), ((ROWS, 2), (ROWS * 2, -3)), ""
    ),
    "a buffer for a weight, written before": (
        lambda: Layers("m.kernel.mul_(2); return m.image_norm(F.conv2d(x, m.kernel))"),
        ((IMAGE,),), "",
    ),
}  # fmt: skip


def optimized(model: nn.Module, *inputs: Any) -> Any:
    return optimizer.optimize(model, inputs or None, check=None, level=1)


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_right_at_later_calls_too(name: str, example: bool) -> None:
    build, calls, refusal = CASES[name]
    torch.manual_seed(0)
    model = build()
    eager = copy.deepcopy(model)

    fast = optimized(model, *copy.deepcopy(calls[0] if example else ()))

    assert not example or any(refusal in each.reason for each in fast.report.refused) or not refusal
    for call in calls:
        one, other = copy.deepcopy(call), copy.deepcopy(call)
        with torch.no_grad():
            expected, actual = (eager(*one), one), (fast(*other), other)
        assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
        torch.testing.assert_close(pytree.tree_leaves(actual), pytree.tree_leaves(expected))


def test_a_layer_that_an_opaque_child_may_write_is_not_folded() -> None:
    model = Layers("m.child(x); return m.image_norm(m.conv(x))").requires_grad_(False)
    model.child = Opaque(lambda m, x: m.held[0].weight.mul_(2.0), model.conv)
    eager = copy.deepcopy(model)

    fast = optimized(model, IMAGE)

    assert [each.reason for each in fast.report.refused] == ["the forward writes their tensors"]
    torch.testing.assert_close(fast(IMAGE), eager(IMAGE))


def test_a_layer_whose_weight_a_hook_of_another_writes_is_not_folded() -> None:
    model = Layers("return m.child(x) + m.image_norm(m.conv(x))").requires_grad_(False)
    model.child = nn.Conv2d(3, 4, 3)
    model.child.weight = model.conv.weight
    model.child.register_forward_hook(lambda m, given, y: doubled(m.weight))
    eager = copy.deepcopy(model)

    fast = optimized(model, IMAGE)

    torch.testing.assert_close(fast(IMAGE), eager(IMAGE))


def test_what_a_refused_rewrite_asked_binds_nobody() -> None:
    model = Layers("m.norm(m.linear(x)) + m.linear(-x).relu()")

    fast = optimized(model, SEVERAL)

    assert set(fast.report.counts()) == {"fuse_linear_relu"}
    torch.testing.assert_close(fast(ROWS), model(ROWS))


def test_a_tensor_made_on_another_default_device_counts() -> None:
    text = "y, z = x * 2, torch.zeros(x.shape[0]); y[x > 0] = 0.0; return y + z.numel()"

    with torch.device("meta"):
        fast = optimized(Layers(text).to_empty(device="cpu"), ROWS)

    reasons = [refused.reason for refused in fast.report.refused]
    assert reasons == ["the tensors may live on different devices"]


@pytest.mark.parametrize("device", ["'meta'", "torch.device('meta')"])
def test_a_mask_may_lie_on_another_device_than_what_it_chooses(device: str) -> None:
    text = f"y = torch.zeros(x.shape, device={device}); y[x > 0] = 1.0; return x + y.dim()"
    model = Layers(text)

    assert torch.equal(optimized(model, ROWS)(ROWS), model(ROWS))


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        NOTES.append(1)
        return weight * 2


def parametrized() -> nn.Module:
    linear = nn.Linear(4, 4)
    parametrize.register_parametrization(linear, "weight", Scaled())
    return linear


def dead(child: Any) -> nn.Module:
    """Calls a function, or a child, whose value nobody reads."""
    called = child if isinstance(child, nn.Module) else nn.Identity()
    function = (lambda m, x: m.child(x)) if child is called else child
    return Layers(lambda m, x: (function(m, x), x.exp())[1], child=called)


@pytest.mark.parametrize("make", [lambda: lambda m, x: noted(x), parametrized])
def test_python_code_of_unknown_effect_runs_though_nobody_reads_its_value(make: Any) -> None:
    fast = optimized(dead(make()), ROWS)
    NOTES.clear()

    fast(ROWS)

    assert NOTES == [1]


def test_a_hook_inside_a_layer_of_torch_meets_data_and_is_not_dead() -> None:
    seen: list[str] = []
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    layer.linear1.register_forward_hook(lambda *hooked: seen.append(hooked[2].device.type))

    fast = optimized(dead(layer), ROWS)
    assert "meta" not in seen

    seen.clear()
    fast(ROWS)
    assert seen == ["cpu"]


def test_a_child_that_keeps_a_list_is_called_though_nobody_reads_its_value() -> None:
    model = dead(Log())
    fast = optimized(model, ROWS)

    fast(ROWS)
    fast(ROWS)

    assert fast.model.child.calls == [1, 1]
    assert model.child.calls == []


@pytest.mark.parametrize(("package", "trusted"), [("torch.nn", True), ("torch_like.nn", False)])
def test_code_is_trusted_by_the_name_of_its_package(package: str, trusted: bool) -> None:
    double = FunctionType((lambda x: x * 2).__code__, {"__name__": package})
    double.__module__ = package
    graph = optimizer.capture(nn.ReLU(), torch.ones(2)).graph
    _, relu, _ = graph.nodes
    relu.target, relu.args = double, relu.args[:1]

    assert is_pure(relu) is trusted


@pytest.mark.parametrize("written", ["", "m.weight.mul_(2); "])
def test_without_example_inputs_a_weight_is_a_layers_if_only_layers_read_it(written: str) -> None:
    model = Layers(f"{written}return F.linear(x, m.weight)", weight=torch.ones(4, 4))
    captured = optimizer.capture(model)

    assert any(node.op == "call_module" for node in captured.graph.nodes) is not bool(written)


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
    model = Layers("y = x.exp(); torch.add(x, x, out=y); return y")
    nodes = optimizer.capture(model, ROWS).graph.nodes
    exp, add = (node for node in nodes if node.op.startswith("call"))

    assert fact(add).writes == fact(add).storages == fact(exp).storages


def test_a_rank_depends_on_sizes_if_that_of_one_operand_does() -> None:
    captured = optimizer.capture(OfTwo("x.squeeze(0) + z"), (ROWS, ROWS))
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


@pytest.mark.parametrize("flatten", [nn.Flatten(0), Flattening(False), Flattening(True)])
def test_what_is_copied_in_the_example_may_be_a_view_in_another_call(flatten: Any) -> None:
    model = Forward(
        "before, flat = torch.relu(x), m.inner(x); flat.add_(1.0);"
        "return before.reshape(-1) * torch.relu(x).reshape(-1)",
        inner=flatten,
    ).eval()
    copied = torch.linspace(-1, 1, 24).reshape(4, 6).t()
    viewed = torch.linspace(-1, 1, 48)[::2].view(6, 4)

    fast = optimized(model, copied)

    one, other = (torch.empty_strided((6, 4), (8, 2)).copy_(viewed) for _ in range(2))
    assert torch.equal(fast(one), model(other))
    assert torch.equal(one, other)


def test_rows_that_are_copied_by_number_may_be_one_that_is_viewed_in_another_call() -> None:
    x, model = torch.linspace(-1, 1, 6).view(3, 2), ForwardOfTwo("torch.relu(x), torch.relu(x)[z]")

    fast = optimized(model.eval(), x, torch.tensor([2, 0]))

    assert_equivalent(model, fast, (x, torch.tensor(1)))


DRAWS = {
    "module": "m.{}(x)",
    "function": "F.dropout(x, 0.5, True)",
    "alpha": "F.alpha_dropout(x, 0.5, True)",
    "attention": "F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)",
}


@pytest.mark.parametrize("draw", DRAWS)
def test_what_draws_nothing_of_an_empty_example_may_draw_later(draw: str) -> None:
    text = f"{DRAWS[draw]} - {DRAWS[draw]}".format("first", "second")
    model = Forward(text).eval()
    model.first, model.second = nn.Dropout(), nn.Dropout()  # which train
    fast = optimized(model, torch.ones(0, 2, 8, 8))

    torch.manual_seed(0)
    assert fast.report.counts().get("eliminate_common_subexpressions", 0) == 0
    assert fast(torch.ones(1, 2, 8, 8)).any()


def shares(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Whether a function of a tensor returns memory of it; None if it is of no such function."""
    try:
        result = function(x)
        return result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    except Exception:
        return None


@pytest.mark.filterwarnings("ignore")
def test_what_returns_its_input_for_some_tensors_and_a_copy_of_others_is_listed() -> None:
    dtypes = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool
    dtypes += torch.half, torch.bfloat16, torch.float, torch.double  # type: ignore[assignment]
    complex_ones = [torch.ones(2, 3, dtype=each) for each in (torch.cfloat, torch.cdouble)]
    tensors = [torch.ones(2, 3).to(each) for each in dtypes] + [torch.ones(2, 3).t()]
    tensors += complex_ones + [each.conj() for each in complex_ones]
    names = (name for name in vars(torch._C.TensorBase) if name.strip("_") == name)
    found = {name: {shares(getattr(Tensor, name), x) for x in tensors} for name in names}

    mixed = {name for name, told in found.items() if {True, False} <= told}
    assert len(mixed) > 15
    assert mixed <= MAY_COPY


@pytest.mark.parametrize("text", ["x.byte()", "x.conj_physical()", "torch.as_tensor(x).byte()"])
def test_a_copy_of_what_may_be_the_input_stays(text: str) -> None:
    model = Layers(f"y = ({text}).clone(); x.add_(1); return y * 2")
    complex_one = torch.ones(3, dtype=torch.cfloat) if "conj" in text else torch.ones(3)
    fast = optimizer.optimize(model, complex_one, level=0)

    for later in (torch.ones(3), torch.ones(3, dtype=torch.uint8)):
        assert torch.equal(fast(later.clone()), model(later.clone()))
