"""Linear layers on packed weights: the same values, NaN too, in as few calls."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import optimizer
from optimizer.core.inputs import Call
from optimizer.lowering import packed as _packed
from optimizer.lowering.candidates import AS_IT_IS, CANDIDATES, in_channels_last
from optimizer.lowering.choose import BRIEF, SHORT, Times
from optimizer.lowering.module import LoweredModule
from optimizer.lowering.packed import packable_in, with_packed_weights
from optimizer.lowering.trace import straight_line
from tests.conftest import address

pytestmark = pytest.mark.usefixtures("last_candidate_wins")
PRODUCT = torch.ops.mkldnn._linear_pointwise.default
ATEN = torch.ops.aten
CONVOLVED = torch.ops.mkldnn._convolution_pointwise.default
FUSED = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "sigmoid of a tensor": lambda x: x.sigmoid(),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x, inplace=True),
    "tanh": torch.tanh,
}


class Then(nn.Module):
    """A Linear, and a function of what it gives."""

    def __init__(self, function: Any = torch.clone, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(6, 5, bias=bias)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


class Sums(nn.Module):
    """What is in no region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(-1)


class Block(nn.Module):
    """What ConvNeXt is made of, without its norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.depthwise = nn.Conv2d(6, 6, 7, padding=3, groups=6)
        self.wide, self.narrow = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        return x + self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 6)), generator=torch.Generator().manual_seed(3))


def packed(model: nn.Module, x: torch.Tensor) -> tuple[fx.GraphModule, list[Any]]:
    """The program for a call, and the functions that it calls."""
    with torch.no_grad():
        line = straight_line(model, list(model.parameters()), Call((x,), {}))
        program = with_packed_weights(line.module, line.inputs)
    return program, [node.target for node in program.graph.nodes if node.op.startswith("call")]


def lowered(model: nn.Module, x: torch.Tensor) -> LoweredModule:
    fast = optimizer.optimize(model.eval(), (x,), level=2, engines=())
    assert isinstance(fast, LoweredModule)
    return fast


def chosen(fast: LoweredModule) -> list[str]:
    return [choice.chosen for choice in fast.report.choices]


@pytest.mark.parametrize("function", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("bias", [True, False])
def test_an_activation_is_part_of_the_product(function: Any, bias: bool) -> None:
    model, x = Then(function, bias), 3 * values()
    x[0, 0], x[1, 0] = torch.nan, torch.inf
    program, called = packed(model, x)

    assert called == [PRODUCT]
    with torch.no_grad():
        torch.testing.assert_close(*program(x), model(x), equal_nan=True)


@pytest.mark.parametrize("function", [F.relu, F.relu6, F.hardsigmoid])
def test_what_would_lose_nan_stays_a_call(function: Any) -> None:
    x = values()
    x[0, 0] = torch.nan
    program, called = packed(Then(function), x)

    assert called[0] is PRODUCT
    assert len(called) == 2
    assert program(x)[0][0].isnan().all()


def test_a_call_with_nan_needs_no_other_code() -> None:
    model, x = Then(F.relu), values()
    fast = lowered(model, x)
    x[0, 0] = torch.nan

    with torch.no_grad():
        assert fast.plan_for((x,), {}) is not None
        assert fast(x)[0].isnan().all()


def test_an_activation_of_what_others_read_stays_a_call() -> None:
    _, called = packed(Then(lambda y: F.gelu(y) + y), values())

    assert called[:2] == [PRODUCT, ATEN.gelu.default]
    assert len(called) == 3


def test_an_activation_called_by_keyword_is_part_of_the_product() -> None:
    _, called = packed(Then(lambda y: F.gelu(input=y)), values())

    assert called == [PRODUCT]


def test_a_weight_of_two_layers_is_packed_once() -> None:
    linear = nn.Linear(6, 6)
    program, called = packed(nn.Sequential(linear, nn.Tanh(), linear), values())

    assert called == [PRODUCT, PRODUCT]
    assert sum(buffer.is_mkldnn for buffer in program.buffers()) == 1


def test_weights_that_were_packed_are_not_held_dense() -> None:
    program, _ = packed(Then(), values())

    assert [buffer.is_mkldnn for buffer in program.buffers()].count(False) == 1  # the bias


@pytest.mark.parametrize(
    "model",
    [lambda x: F.linear(x, x), lambda x: F.linear(x, ONES)],
    ids=["computed", "of one output"],
)
def test_other_weights_stay_as_they_are(model: Any) -> None:
    region = straight_line(model, [ONES], Call((values(),), {})).module

    assert not packable_in(region)


ONES = torch.ones(6)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (0, 6), (2, 3, 4, 6)])
def test_inputs_of_any_rank(shape: tuple[int, ...]) -> None:
    model, x = Then(F.gelu), values(*shape)
    fast = lowered(model, x)

    assert chosen(fast) == ["packed weights"]
    torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize(
    "x",
    [values(6, 3).t(), values(4, 3, 6).transpose(0, 1), values(1, 6).expand(3, 6)],
    ids=["transposed", "batch second", "expanded"],
)
def test_inputs_of_any_layout(x: torch.Tensor) -> None:
    model = Then(lambda y: y)
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

    assert called == [CONVOLVED, ATEN.relu.default]
    with torch.no_grad():
        torch.testing.assert_close(*program(x), model(x), equal_nan=True)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(6, 6, 3, padding="same"), (2, 6, 9, 9)), (nn.Conv1d(6, 6, 3), (2, 6, 9))],
    ids=["same", "1d"],
)
def test_other_convolutions_stay_as_they_are(layer: nn.Module, shape: tuple[int, ...]) -> None:
    _, called = packed(layer, values(*shape))

    assert CONVOLVED not in called


def test_a_weight_that_reads_images_of_two_sizes_is_packed_for_each() -> None:
    layer = nn.Conv2d(6, 6, 3)
    program, called = packed(nn.Sequential(layer, layer), values(1, 6, 9, 9))

    assert called == [CONVOLVED, CONVOLVED]
    assert sum(buffer.is_mkldnn for buffer in program.buffers()) == 2


def test_where_some_are_grouped_it_is_tried_to_leave_them() -> None:
    model, x = Block().eval(), values(2, 6, 9, 9)
    fast = lowered(model, x)

    assert chosen(fast) == ["packed Linear, channels_last"]
    torch.testing.assert_close(fast(x), model(x))
    assert fast(x).stride() == model(x).stride()


def test_only_images_and_their_weights_are_laid_out_anew() -> None:
    class Inner(Block):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return self.depthwise(self.wide(y)[..., :6].permute(0, 3, 1, 2))

    model, y = Inner(), values(2, 9, 9, 6)
    with torch.no_grad():
        line = straight_line(model, list(model.parameters()), Call((y,), {}))
        made = in_channels_last(line.module, line.inputs)
        kept = dict(line.module.named_buffers())
        shared = [b.dim() for name, b in made.named_buffers() if b is kept[name]]

    assert sorted(shared) == [1, 1, 2]
    assert not [node for node in made.graph.nodes if node.target == "contiguous"]


def test_float64_is_rejected_with_the_reason() -> None:
    (choice,) = lowered(Then().double(), values().double()).report.choices

    assert choice.chosen == AS_IT_IS
    assert "itensor" in choice.rejected["packed weights"]


def test_bfloat16_is_taken() -> None:
    model, x = Then(F.gelu).bfloat16(), values().bfloat16()
    fast = lowered(model, x)

    assert chosen(fast) == ["packed weights"]
    torch.testing.assert_close(fast(x), model(x))


def test_a_build_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packed, "_OPERATORS", ("no_such_operator",))

    assert chosen(lowered(Then(), values())) == [AS_IT_IS]


@pytest.mark.parametrize(
    ("model", "x"), [(Then(F.gelu), values()), (Block(), values(2, 6, 9, 9))], ids=["all", "most"]
)
def test_untimed_products_stay_as_they_are(model: nn.Module, x: torch.Tensor) -> None:
    fast = optimizer.optimize(model.eval(), (x,), tune_seconds=0, engines=())

    assert "no region" in str(fast.report.remarks)


def test_copies_and_pickles_pack_their_own() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.GELU()), values()
    fast = lowered(model, x)

    with torch.no_grad():
        for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            assert other.plan_for((x,), {}) is not None
            assert torch.equal(other(x), fast(x))


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

        wrapped = nn.Module()
        wrapped.forward = run
        return wrapped

    monkeypatch.setitem(CANDIDATES, "packed weights", counted)
    model = nn.Sequential(nn.Linear(6, 6), Sums(), nn.Linear(6, 6))
    lowered(model, values())

    # Held to two answers, of which the first is what follows reads; then the plan's first call.
    assert runs == [3, 2]


class Between(nn.Module):
    """A function before and one after a Linear."""

    def __init__(self, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.before, self.linear, self.after = before, nn.Linear(6, 6), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.before(x) if self.before else x)
        return self.after(y) if self.after else y


@pytest.mark.parametrize(
    ("model", "region", "call", "again"),
    [
        (Between(), (0.1, 0.08), 0.1, False),
        (Between(after=Sums()), (0.1, 0.08), 0.1, False),
        (Between(), (0.1, 0.08), 0.3, True),
        (Between(), (1e-3, 0.5e-3), 1e-3, True),
        (nn.Sequential(Between(), Sums(), Between()), (0.1, 0.08), 0.3, False),
        (nn.Sequential(Between(), Sums(), Between()), (0.1, 0.08), 0.5, True),
        (Between(), (0.1, 0.2), 0.0, True),
    ],
    ids=[
        "a fifth",
        "with a call after",
        "a fifteenth",
        "half a millisecond",
        "twice a fifteenth",
        "twice a twenty-fifth",
        "nothing",
    ],
)
def test_what_its_regions_clearly_save_is_not_raced_again(
    monkeypatch: pytest.MonkeyPatch,
    model: nn.Module,
    region: tuple[float, float],
    call: float,
    again: bool,
) -> None:
    raced = racing(monkeypatch, region, call)
    lowered(model, values())

    assert (["plan", "portable"] in raced) == again


def racing(
    monkeypatch: pytest.MonkeyPatch, region: tuple[float, float], call: float
) -> list[list[str]]:
    """What is raced, where a region takes so many seconds and a call by the plan so many."""
    raced: list[list[str]] = []
    call_of = Times.call

    def race(self: Any, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
        raced.append(list(runs))
        seconds = (0.1, 1.0) if "plan" in runs else region
        return dict(zip(runs, seconds, strict=True))

    def taking(self: Any, name: str, *rest: Any) -> Any:
        result = call_of(self, name, *rest)
        self.spent = call if name == "plan" else self.spent
        return result

    monkeypatch.setattr(Times, "race", race)
    monkeypatch.setattr(Times, "call", taking)
    return raced


def test_in_a_precision_of_its_own_it_is_raced_against_the_portable_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raced: list[list[str]] = []

    def race(self: Any, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
        raced.append(list(runs))
        return {name: 0.1 if name in ("plan", "bf16") else 1.0 / len(name) for name in runs}

    monkeypatch.setattr(Times, "race", race)
    optimizer.optimize(Then().eval(), (values(),), level=3, precision="bf16")

    assert raced[-1] == ["plan", "portable"]


def test_dense_weights_take_no_memory_of_their_own() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), values(3, 64)
    fast: Any = lowered(model, x)

    assert fast.plan_for((x,), {}) is not None
    assert address(fast.get_parameter("0.weight")) == address(model[0].weight)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="other systems do not tell")
def test_dense_weights_may_stay_in_the_file_that_they_are_loaded_from(tmp_path: Path) -> None:
    """Only what is packed takes memory then: the dense ones can be read again."""
    model, x, path = nn.Sequential(nn.Linear(64, 64), nn.GELU()), values(3, 64), tmp_path / "fast"
    fast = lowered(model, x)
    torch.save(fast, path)
    loaded = torch.load(path, mmap=True, weights_only=False)

    with torch.no_grad():
        assert loaded.plan_for((x,), {}) is not None
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


def test_one_region_of_several_may_be_raced_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    enough: list[float] = []

    def race(self: Times, runs: Any, *rest: Any, **more: Any) -> dict[str, float]:
        enough.append(self.enough)
        return {name: 1.0 / place for place, name in enumerate(reversed(list(runs)), 1)}

    monkeypatch.setattr(Times, "race", race)
    optimizer.optimize(Between(after=Sums()).eval(), (values(),), engines=())

    assert enough == [BRIEF, SHORT]
