"""Constants per channel, transposed layers and views: what folding an affine map rests on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.core.node import module_of
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.conftest import address
from tests.single_pass import Forward, callees, optimized_by

IMAGE = (2, 3, 6, 6)
optimized = partial(optimized_by, "fold_affine")


class Over(nn.Module):
    """`function(layer(x), constant)`, where the constant is a parameter or buffer of the model."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        layer: nn.Module,
        *shape: int,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.layer, self.function = layer.double(), function
        self.register_buffer("constant", torch.rand(shape).add(0.5).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), self.constant)


def conv(**settings: Any) -> nn.Module:
    return nn.Conv2d(3, 4, 3, **settings)


def folded_layers(fast: Any) -> list[Any]:
    return [module_of(node) for node in fast.graph.nodes if node.op == "call_module"]


def assert_folds_to(model: nn.Module, shape: tuple[int, ...], kinds: list[Any]) -> Any:
    randomize(model.double().eval())
    inputs = inputs_like([shape], "random", 0)

    fast = optimized(model, *inputs)

    assert callees(fast) == kinds
    assert_equivalent(model, fast, inputs)
    return fast


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x * c": lambda x, c: x * c,
    "c * x": lambda x, c: c * x,
    "x.mul(c)": lambda x, c: x.mul(c),
    "torch.mul": lambda x, c: torch.mul(input=x, other=c),
    "x + c": lambda x, c: x + c,
    "c + x": lambda x, c: c + x,
    "torch.add": torch.add,
    "x - c": lambda x, c: x - c,
    "c - x": lambda x, c: c - x,
    "torch.sub": lambda x, c: torch.sub(x, other=c),
    "x / c": lambda x, c: x / c,
    "x.div(c)": lambda x, c: x.div(c),
    "a frozen BatchNorm": lambda x, c: x * c + c,
    "numbers": lambda x, c: (2 - x * 3 + 0.25) / 4,
}


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1), (1, 1, 1), (1,), ()])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_constant_for_each_channel_folds(spelling: str, shape: tuple[int, ...]) -> None:
    assert_folds_to(Over(SPELLINGS[spelling], conv(), *shape), IMAGE, [nn.Conv2d])


@pytest.mark.parametrize("rows", [(2,), (5, 2), (2, 3, 5, 2), ()])
def test_a_constant_along_the_last_dimension_folds_into_a_linear_of_any_rank(
    rows: tuple[int, ...],
) -> None:
    assert_folds_to(Over(SPELLINGS["x - c"], nn.Linear(3, 4), 4), (*rows, 3), [nn.Linear])


@pytest.mark.parametrize("bias", [True, False])
def test_a_constant_folds_where_there_is_no_batch(bias: bool) -> None:
    model = Over(SPELLINGS["a frozen BatchNorm"], conv(bias=bias), 4, 1, 1)

    assert_folds_to(model, (3, 6, 6), [nn.Conv2d])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("groups", "width"), [(1, 6), (2, 6), (4, 4), (4, 8)])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_transposed_convolution_absorbs_over_its_second_dimension(
    dimensions: int, groups: int, width: int, bias: bool
) -> None:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dimensions - 1]
    layer = kind(4, width, 3, stride=2, padding=1, output_padding=1, groups=groups, bias=bias)
    model = nn.Sequential(layer, norm(width))

    assert_folds_to(model, (2, 4, *[4] * dimensions), [kind])


def test_a_transposed_convolution_called_as_a_function_folds() -> None:
    model = Forward(
        lambda m, x: m.bn(F.conv_transpose2d(x, m.w, stride=2, groups=2, dilation=2)),
        w=nn.Parameter(torch.empty(4, 3, 3, 3)),
        bn=nn.BatchNorm2d(6),
    )

    assert_folds_to(model, (2, 4, 5, 5), [nn.ConvTranspose2d])


def test_an_output_size_that_is_asked_for_is_kept() -> None:
    up = nn.ConvTranspose2d(3, 4, 3, stride=2)
    model = Forward(lambda m, x: m.bn(m.up(x, output_size=(12, 12))), up=up, bn=nn.BatchNorm2d(4))
    randomize(model.double().eval())
    inputs = inputs_like([(2, 3, 5, 5)], "random", 0)

    assert_equivalent(model, optimized(model, *inputs), inputs)


@pytest.mark.parametrize(
    "read",
    [lambda y: y.ndim, lambda y: y.shape[0], lambda y: y.size(1), lambda y: y.dim()],
    ids=["ndim", "shape", "size", "dim"],
)
def test_a_second_reader_of_the_shape_does_not_matter(read: Callable[[Tensor], Any]) -> None:
    """As timm's BatchNormAct2d checks the rank of what it is given."""
    model = Forward(
        lambda m, x: (m.bn(y := m.layer(x)), read(y)), layer=conv(), bn=nn.BatchNorm2d(4)
    )
    randomize(model.double().eval())
    inputs = inputs_like([IMAGE], "random", 0)

    fast = optimized(model, *inputs)

    assert fast.report.counts() == {"fold_affine": 1}
    assert_equivalent(model, fast, inputs)


def test_a_sum_keeps_the_weight_and_a_product_adds_no_bias() -> None:
    summed = Over(SPELLINGS["x + c"], conv(bias=False), 4, 1, 1).eval()
    scaled = Over(SPELLINGS["x * c"], conv(bias=False), 4, 1, 1).eval()
    x = torch.randn(IMAGE).double()

    (with_bias,) = folded_layers(optimized(summed, x))
    (without,) = folded_layers(optimized(scaled, x))

    assert address(with_bias.weight) == address(summed.layer.weight)
    assert without.bias is None


def test_a_pair_that_is_called_twice_shares_one_folded_layer() -> None:
    model = Forward(
        lambda m, x: m.over(x) + m.over(x.flip(-1)) + m.over.layer(x) * 2.0,
        over=Over(SPELLINGS["x * c"], conv(), 4, 1, 1),
    )

    fast = optimized(model.eval(), torch.randn(IMAGE).double())

    first, second, third = folded_layers(fast)
    assert first is second is not third


READ_ELSEWHERE = "the layer's output is read elsewhere"
NOT_A_CHANNEL = "the constant is not one number a channel"
OTHER_DTYPE = "dtype or device differ"
HIGHER_RANK = "the constant has more dimensions than what it is combined with"
OVERFLOW = "the folded weights overflow or underflow"
times = SPELLINGS["x * c"]
REFUSALS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "a number for each position": (lambda: Over(times, conv(), 4, 4, 4), IMAGE, NOT_A_CHANNEL),
    "a number for each column": (lambda: Over(times, conv(), 4), IMAGE, NOT_A_CHANNEL),
    "a number for each image": (lambda: Over(times, conv(), 2, 1, 1, 1), IMAGE, NOT_A_CHANNEL),
    "one channel made four": (
        lambda: Over(times, nn.Conv2d(3, 1, 3), 4, 1, 1), IMAGE, NOT_A_CHANNEL,
    ),
    "a constant of higher rank": (lambda: Over(times, conv(), 1, 1, 1, 1, 1), IMAGE, HIGHER_RANK),
    "a batch of one that only the constant has": (
        lambda: Over(times, conv(), 1, 4, 1, 1), (3, 6, 6), HIGHER_RANK,
    ),
    "a constant that promotes": (
        lambda: Over(times, conv().float(), 4, 1, 1, dtype=torch.complex128), IMAGE, OTHER_DTYPE,
    ),
    "a constant of integers": (
        lambda: Over(times, conv(), 4, 1, 1, dtype=torch.int64), IMAGE, OTHER_DTYPE,
    ),
    "a constant that is written": (
        lambda: Over(lambda y, c: (c.add_(1), y * c)[1], conv(), 4, 1, 1), IMAGE,
        "the forward writes their tensors",
    ),
    "division by zero": (lambda: Over(lambda y, c: y / 0, conv(), 1), IMAGE, OVERFLOW),
    "an infinite sum": (
        lambda: Over(lambda y, c: y + float("inf"), conv(), 1), IMAGE, "the folded bias overflows",
    ),
    "a second reader before a flatten": (
        lambda: Over(lambda y, c: y.flatten(0, 1) * c + y.sum(), nn.Linear(3, 4), 4), (2, 5, 3),
        READ_ELSEWHERE,
    ),
    "a second reader after a flatten": (
        lambda: Over(lambda y, c: (z := y.flatten(0, 1)) * c + z, nn.Linear(3, 4), 4), (2, 5, 3),
        READ_ELSEWHERE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses(case: str) -> None:
    build, shape, reason = REFUSALS[case]
    model = build().eval()
    x = torch.randn(shape, dtype=torch.float64)

    fast = optimizer.optimize(model, x, only=["fold_affine"], check=None, level=1)

    assert {refusal.reason for refusal in fast.report.refused} == {reason}
    assert fast.report.fired == ()


@pytest.mark.parametrize("case", ["x / y", "1 / x", "x + y", "torch.add(alpha=)", "int"])
def test_what_is_not_affine_in_one_value_is_passed_over(case: str) -> None:
    functions: dict[str, Callable[..., Tensor]] = {
        "x / y": lambda y, c: y / y.sum(),
        "1 / x": lambda y, c: c / y,
        "x + y": lambda y, c: y + y.mean(),
        "torch.add(alpha=)": lambda y, c: torch.add(y, c, alpha=2),
        "int": lambda y, c: y + y.shape[0],
    }
    model = Over(functions[case], conv(), 4, 1, 1).eval()

    fast = optimized(model, torch.randn(IMAGE).double())

    assert fast.report.fired == fast.report.refused == ()


def test_weights_that_would_lose_their_digits_in_float16_are_left_alone() -> None:
    model = Over(lambda y, c: y * 1e-6, conv(bias=False), 1).half().eval()
    x = 100 * torch.randn(IMAGE).half()

    fast = optimized(model, x)

    assert [each.reason for each in fast.report.refused] == [OVERFLOW]


def test_channels_that_are_switched_off_do_not_stop_a_fold() -> None:
    model = nn.Sequential(conv(), nn.BatchNorm2d(4)).eval().half()
    nn.init.zeros_(model[1].weight)

    fast = optimized(model, torch.randn(IMAGE).half())

    assert fast.report.counts() == {"fold_affine": 1}
    optimizer.check(model, fast, torch.randn(IMAGE).half())


def test_an_empty_layer_is_folded() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        layer = nn.Linear(0, 4)
    model = nn.Sequential(layer, nn.BatchNorm1d(4)).double().eval()
    x = torch.randn(5, 0).double()

    fast = optimized(model, x)

    assert fast.report.counts() == {"fold_affine": 1}
    assert_equivalent(model, fast, (x,))


def test_a_folded_parameter_can_be_written() -> None:
    model = Forward(lambda m, x: m.linear(x) - 1.0, linear=nn.Linear(3, 4, bias=False))
    model, x = model.double().eval(), torch.ones(2, 3, dtype=torch.float64)
    fast = optimizer.optimize(model, x, only=["fold_affine"], level=1)
    fast.load_state_dict(fast.state_dict())

    assert fast.report.counts() == {"fold_affine": 1}
    assert all(parameter.is_contiguous() for parameter in fast.parameters())
