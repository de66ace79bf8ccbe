"""Linear layers on packed weights: the same values, NaN too, in as few calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optimizer
from optimizer.core.inputs import Call
from optimizer.lowering import packed as _packed
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES, in_channels_last
from optimizer.lowering.choose import BRIEF, SHORT, Times
from optimizer.lowering.packed import packable_in, with_packed_weights
from optimizer.lowering.partition import ForModerate
from optimizer.lowering.trace import StraightLine, straight_line
from tests import level_2
from tests.conftest import address
from tests.level_2 import Running, chosen, image, lowered, offer, plan_of, racing
from tests.single_pass import Forward, function_of, rows

PRODUCT = torch.ops.mkldnn._linear_pointwise.default
CONVOLVED = torch.ops.mkldnn._convolution_pointwise.default
ATEN = torch.ops.aten
ONES = torch.ones(6)
FUSED = [
    "F.gelu(y)", "F.gelu(input=y)", "F.gelu(y, approximate='tanh')", "F.hardswish(y)",
    "torch.sigmoid(y)", "y.sigmoid()", "F.silu(y)", "F.silu(y, inplace=True)", "torch.tanh(y)",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _the_last_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch)
    racing(monkeypatch, level_2.last_wins)


def then(function: Any = torch.clone, bias: bool = True) -> nn.Module:
    """A Linear, and a function of what it gives."""
    torch.manual_seed(2)
    return level_2.Then(function, nn.Linear(6, 5, bias=bias)).eval()


def cumulated(x: torch.Tensor) -> torch.Tensor:
    """What is in no region."""
    return x.cumsum(-1)


# What ConvNeXt is made of, without its norm.
BLOCK = (
    "y = m.wide(m.depthwise(x).permute(0, 2, 3, 1)); return x + m.narrow(F.gelu(y)).movedim(3, 1)"
)


def block(forward: str = BLOCK) -> nn.Module:
    torch.manual_seed(2)
    layers = {"wide": nn.Linear(6, 24), "narrow": nn.Linear(24, 6)}
    return Forward(forward, depthwise=nn.Conv2d(6, 6, 7, padding=3, groups=6), **layers).eval()


def values(*shape: int) -> torch.Tensor:
    return image(*(shape or (3, 6)))


def line_of(model: Any, x: torch.Tensor, *held: torch.Tensor) -> StraightLine:
    with torch.no_grad():
        return straight_line(model, held or list(model.parameters()), Call((x,), {}))


def packed(model: nn.Module, x: torch.Tensor) -> tuple[nn.Module, list[Any]]:
    """The program for a call, and the functions that it calls where inputs are moderate."""
    line = line_of(model, x)
    program = with_packed_weights(line.module, line.inputs)
    code: Any = program.program if isinstance(program, ForModerate) else program
    return program, [node.target for node in code.graph.nodes if node.op.startswith("call")]


@pytest.mark.parametrize("text", FUSED)
@pytest.mark.parametrize("bias", [True, False])
def test_an_activation_is_part_of_the_product(text: str, bias: bool) -> None:
    model, x = then(function_of("y", text), bias), 3 * values()
    x[0, 0], x[1, 0] = torch.nan, torch.inf
    program, called = packed(model, x)

    assert called == [PRODUCT]
    with torch.no_grad():
        torch.testing.assert_close(*program(x), model(x), equal_nan=True)


RELUS = [F.relu, F.relu6, F.hardsigmoid, lambda y: F.hardtanh(y, -0.5, 0.25)]


@pytest.mark.parametrize("function", RELUS)
def test_what_would_lose_nan_is_part_of_the_product_where_none_arises(function: Any) -> None:
    model, x = then(function), values()
    fast, (program, called) = lowered(model, x), packed(model, x)

    assert called == [PRODUCT]
    with torch.no_grad():
        torch.testing.assert_close(*program(x), model(x))
        x[0, 0] = torch.nan
        for result in (*program(x), fast(x)):
            torch.testing.assert_close(result, model(x), equal_nan=True)
    assert plan_of(fast, x) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_stays_a_call_where_nan_may_arise(dtype: torch.dtype) -> None:
    model, x = then(F.relu).to(dtype), values().to(dtype)
    if dtype == torch.float32:
        next(model.parameters()).data[0, 0] = torch.inf
    program, called = packed(model, x)

    assert called == [PRODUCT, ATEN.relu.default]
    with torch.no_grad():
        torch.testing.assert_close(*program(x * 0), model(x * 0), equal_nan=True)


_LAYERS = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6, bias=False)}
_IMAGES = {"a": nn.Conv2d(6, 6, 3, padding=1), "b": nn.Conv2d(6, 6, 3, padding=1, groups=6)}
SUMS = {  # text: the calls beside the products, of Linear layers and of convolutions
    "m.a(x) + x": (0, 0),
    "x + m.a(x)": (0, 0),
    "(x + m.a(x)).relu()": (1, 0),
    "(m.a(x) + m.b(x)).relu()": (1, 0),
    "F.gelu(x + m.a(x))": (1, 1),
    "m.a(x).tanh() + x": (1, 1),
    "torch.add(x, m.a(x), alpha=2)": (1, 1),
    "torch.add(m.a(x), x, alpha=2)": (1, 1),
    "(y := m.a(x)) + y": (1, 1),
    "(y := m.a(x)) + x + y.sum()": (3, 3),
    "m.a(x) + x.mean((0, 1), keepdim=True)": (2, 2),
    "m.a(x) + 1": (1, 1),
    "m.a(x) + m.b(x).relu() + x": (1, 1),
}


@pytest.mark.parametrize("layers", [_LAYERS, _IMAGES], ids=["Linear", "convolution"])
@pytest.mark.parametrize("text", SUMS)
def test_a_sum_is_part_of_the_product(text: str, layers: dict[str, nn.Module]) -> None:
    model = Forward(f"return {text}", **layers)
    x = values() if layers is _LAYERS else values(2, 6, 8, 8).transpose(2, 3)
    before = x.clone()
    program, called = packed(model, x)

    beside = [each for each in called if each.namespace != "mkldnn"]
    assert len(beside) == SUMS[text][layers is _IMAGES]
    with torch.no_grad():
        torch.testing.assert_close(*program(x), model(x))
        assert torch.equal(x, before)
        x[0, 0] = torch.nan
        torch.testing.assert_close(*program(x), model(x), equal_nan=True)


def test_an_activation_of_what_others_read_stays_a_call() -> None:
    _, called = packed(then(lambda y: F.gelu(y) + y), values())

    assert called[:2] == [PRODUCT, ATEN.gelu.default]
    assert len(called) == 3


_LINEAR, _CONVOLUTION = nn.Linear(6, 6), nn.Conv2d(6, 6, 3)


@rows(
    "model x called weights dense",
    {
        "a layer": (then(), values(), 1, 1, 1),  # the bias is dense, the weight no more
        "twice": (nn.Sequential(_LINEAR, nn.Tanh(), _LINEAR), values(), 2, 1, 1),
        "images of two sizes": (
            nn.Sequential(_CONVOLUTION, _CONVOLUTION), values(1, 6, 9, 9), 2, 2, 1,
        ),
        "the same": (nn.Conv2d(6, 6, 3, padding="same"), values(2, 6, 9, 9), 0, 0, 2),
        "1d": (nn.Conv1d(6, 6, 3), values(2, 6, 9), 0, 0, 2),
    },
)  # fmt: skip
def test_a_weight_is_packed_once_for_each_geometry(
    model: nn.Module, x: torch.Tensor, called: int, weights: int, dense: int
) -> None:
    program, functions = packed(model, x)

    assert sum(each in (PRODUCT, CONVOLVED) for each in functions) == called
    kinds = [buffer.is_mkldnn for buffer in program.buffers()]
    assert [kinds.count(True), kinds.count(False)] == [weights, dense]


@pytest.mark.parametrize("function", [lambda x: F.linear(x, x), lambda x: F.linear(x, ONES)])
def test_weights_that_are_computed_or_of_one_output_stay(function: Any) -> None:
    assert not packable_in(line_of(function, values(), ONES).module)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (0, 6), (2, 3, 4, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_of_any_rank(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model, x = then(F.gelu).to(dtype), values(*shape).to(dtype)
    fast = lowered(model, x)

    assert chosen(fast) == ["packed weights"]
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize(
    "x",
    [values(6, 3).t(), values(4, 3, 6).transpose(0, 1), values(1, 6).expand(3, 6)],
    ids=["transposed", "batch second", "expanded"],
)
def test_inputs_of_any_layout(x: torch.Tensor) -> None:
    model = then()
    program, _ = packed(model, x.contiguous())

    with torch.no_grad():
        torch.testing.assert_close(*program(x), model(x))


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_is_packed_with_its_activation(
    dimensions: int, groups: int, bias: bool
) -> None:
    kind = {2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    options: dict[str, Any] = {"stride": 2, "padding": 1, "dilation": 2, "groups": groups}
    model = nn.Sequential(kind(6, 12, 3, bias=bias, **options), nn.Hardswish(), nn.ReLU())
    x = values(2, 6, *[9] * dimensions)
    x[0, 0, 0, 0], x[1, :, 4] = torch.nan, torch.inf
    program, called = packed(model, x)

    assert called == [CONVOLVED, ATEN.relu.default]  # one activation is part of it
    with torch.no_grad():
        torch.testing.assert_close(*program(x), model(x), equal_nan=True)


def test_where_some_are_grouped_it_is_tried_to_leave_them() -> None:
    model, x = block(), values(2, 6, 9, 9)
    fast = lowered(model, x)

    assert chosen(fast) == ["packed Linear, channels_last"]
    torch.testing.assert_close(fast(x), model(x))
    assert fast(x).stride() == model(x).stride()


def test_only_images_and_their_weights_are_laid_out_anew() -> None:
    model = block("m.depthwise(m.wide(x)[..., :6].permute(0, 3, 1, 2))")
    line = line_of(model, values(2, 9, 9, 6))
    made = in_channels_last(line.module, line.inputs)
    kept = dict(line.module.named_buffers())

    assert sorted(b.dim() for name, b in made.named_buffers() if b is kept[name]) == [1, 1, 2]
    assert not [node for node in made.graph.nodes if node.target == "contiguous"]


def test_float64_is_rejected_with_the_reason() -> None:
    (choice,) = lowered(then().double(), values().double()).report.choices

    assert choice.chosen == AS_IT_IS
    assert "itensor" in choice.rejected["packed weights"]


def test_a_build_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packed, "_OPERATORS", ("no_such_operator",))

    assert chosen(lowered(then(), values())) == [AS_IT_IS]


@pytest.mark.parametrize(
    ("model", "x"), [(then(F.gelu), values()), (block(), values(2, 6, 9, 9))], ids=["all", "most"]
)
def test_untimed_products_stay_as_they_are(model: nn.Module, x: torch.Tensor) -> None:
    fast = lowered(model, x, tune_seconds=0)

    assert plan_of(fast, x) is None
    assert fast.report.remarks == ("such a call is not lowered: no region of it can be",)


def test_dense_weights_take_no_memory_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU())
    fast: Any = lowered(model, values())

    assert plan_of(fast, values()) is not None
    assert address(fast.get_parameter("0.weight")) == address(model[0].weight)


def test_a_candidate_of_the_same_kind_is_prepared_but_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[int] = []
    make = CANDIDATES["packed weights"]

    def counted(region: Any, inputs: Any) -> Any:
        program, place = make(region, inputs), len(runs)
        runs.append(0)

        def run(*tensors: torch.Tensor) -> Any:
            runs[place] += 1
            return program(*tensors)

        return Running(run)

    monkeypatch.setitem(CANDIDATES, "packed weights", counted)
    lowered(nn.Sequential(nn.Linear(6, 6), Running(cumulated), nn.Linear(6, 6)), values())

    # Held to two answers, of which the first is what follows reads; then the plan's first call.
    assert runs == [3, 2]


_ALONE, _BEFORE = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), Running(cumulated))
_TWO = nn.Sequential(nn.Linear(6, 6), Running(cumulated), nn.Linear(6, 6))


@rows(
    "model region call again",
    {
        "a fifth": (_ALONE, (0.1, 0.08), 0.1, False),
        "with a call after": (_BEFORE, (0.1, 0.08), 0.1, False),
        "a fifteenth": (_ALONE, (0.1, 0.08), 0.3, True),
        "half a millisecond": (_ALONE, (1e-3, 0.5e-3), 1e-3, True),
        "twice a fifteenth": (_TWO, (0.1, 0.08), 0.3, False),
        "twice a twenty-fifth": (_TWO, (0.1, 0.08), 0.5, True),
        "nothing": (_ALONE, (0.1, 0.2), 0.0, True),
    },
)
def test_what_its_regions_clearly_save_is_not_raced_again(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    region: tuple[float, float],
    call: float,
    again: bool,
) -> None:
    """Where a region takes so many seconds, and a call by the plan so many."""
    call_of = Times.call

    def taking(self: Any, name: str, *rest: Any) -> Any:
        result = call_of(self, name, *rest)
        self.spent = call if name == "plan" else self.spent
        return result

    monkeypatch.setattr(Times, "call", taking)
    raced = racing(
        monkeypatch,
        lambda names: dict(zip(names, (0.1, 1.0) if "plan" in names else region, strict=True)),
    )
    lowered(model, values())

    assert (["plan", "portable"] in raced) == again


def test_one_region_of_several_may_be_raced_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    enough: list[float] = []

    def race(self: Times, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
        enough.append(self.least)
        return {name: 1.0 / place for place, name in enumerate(reversed(list(runs)), 1)}

    monkeypatch.setattr(Times, "race", race)
    lowered(_BEFORE, values())

    assert enough == [BRIEF, SHORT]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="other systems do not tell")
def test_dense_weights_may_stay_in_the_file_that_they_are_loaded_from(tmp_path: Path) -> None:
    """Only what is packed takes memory then: the dense ones can be read again."""
    model, x, path = nn.Sequential(nn.Linear(64, 64), nn.GELU()), values(3, 64), tmp_path / "fast"
    fast = lowered(model, x)
    torch.save(fast, path)
    loaded = torch.load(path, mmap=True, weights_only=False)

    with torch.no_grad():
        assert plan_of(loaded, x) is not None
        assert torch.equal(loaded(x), fast(x))
    assert all(is_mapped(weight, path) for weight in loaded.parameters())
    assert not any(is_mapped(weight, path) for weight in fast.parameters())
    again = optimizer.optimize(loaded, (x,), level=1)  # another snapshot
    assert not any(is_mapped(weight, path) for weight in again.parameters())


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    """Whether a tensor lies in what the process maps from a file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return any(int(a, 16) <= tensor.data_ptr() < int(b, 16) for a, b in spans)
