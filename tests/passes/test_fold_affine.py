"""BatchNorm and constants fold into the layer before or behind them, or say why not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import assert_equivalent, inputs_like, randomize
from tests.conftest import address
from tests.single_pass import (
    Forward,
    assert_as_near_to_the_truth,
    layers_of,
    optimized_by,
    rows,
    spelled,
    tried,
)

FOLD, FORWARD = "fold_affine", "fold_affine_forward"
EPS = 0.125  # a power of two: then a correct fold of dyadic values rounds nothing
IMAGE, WIDE, GRAY = (2, 3, 6, 6), (2, 4, 6, 6), (2, 1, 6, 6)
conv, valid, up = partial(nn.Conv2d, 3, 4, 3), partial(nn.Conv2d, 4, 6), nn.ConvTranspose2d


def tried_on(
    name: str, model: str, shape: Any, outcome: Any, *later: Any, regime: str = "random"
) -> Any:
    """`tried` on weights and inputs that hide nothing, and on inputs of other shapes later."""
    built_one = randomize(built(model).double(), regime)
    shapes = (shape, *later) if shape else later
    calls = [inputs_like([each], regime, place) for place, each in enumerate(shapes)]
    return tried(name, built_one, calls.pop(0) if shape else (), outcome, *calls)


def built(text: str) -> nn.Module:
    """A model, or layers in a row, from its text."""
    found = eval(text)
    found = nn.Sequential(*found) if isinstance(found, tuple) else found
    return found if "training(" in text else found.eval()


def norm(dimensions: int, features: int = 4, **settings: Any) -> nn.Module:
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
    return kind(features, **({"eps": EPS} | settings))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def over(text: str, layer: nn.Module, *shape: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model of what a layer gives, `y`, and of a constant `c`."""
    constant = torch.rand(shape).add(0.5).to(dtype)
    return Forward(f"y, c = m.layer(x), m.c; return {text}", layer=layer, c=constant)


def before(text: str, layer: nn.Module, *shape: int) -> nn.Module:
    """A model of a layer behind what is computed with a constant `c`."""
    return Forward(f"c = m.c; return m.layer({text})", layer=layer, c=torch.rand(shape) + 0.5)


def both(text: str) -> nn.Module:
    """A model of a layer, two norms, and their tensors, which lie where a function may read."""
    held = {"mean": torch.tensor([1.0, -2, 3, 0]), "var": torch.tensor([1.0, 4, 0.25, 16]) - EPS}
    held |= {"gain": parameter(4), "shift": parameter(4), "w": parameter(4, 3, 3, 3)}
    layers = {"conv": conv(), "bn": norm(2), "second": norm(2, eps=0.5)}
    return Forward(text, b=parameter(4), **layers, **held)


def calls(text: str, dimensions: int, **weights: Any) -> nn.Module:
    """A model of a text with a norm `bn`, and weights `w` and `b` of a layer."""
    held = weights or {"w": parameter(4, 3, *[3] * dimensions), "b": parameter(4)}
    return Forward(text, bn=norm(dimensions or 1), **held)


def training(place: int, *layers: nn.Module) -> nn.Module:
    model = nn.Sequential(*layers).eval()
    model[place].train()
    return model


class Conv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


# The shape of the input, and what is called in the end.
FOLDED = {
    ((5, 3), nn.Linear): """
    nn.Linear(3, 4), norm(1); nn.Linear(3, 4, bias=False), norm(1);
    calls("m.bn(F.linear(x, m.w, m.b))", 0);
    calls("m.bn(F.linear(input=x, weight=m.w, bias=m.b))", 0)
    """,
    ((2, 3, 8), nn.Conv1d): "nn.Conv1d(3, 4, 3), norm(1)",
    # as long as wide
    ((2, 3, 6), nn.Conv1d): 'nn.Conv1d(3, 4, 3), norm(1); calls("m.bn(F.conv1d(x, m.w, m.b))", 1)',
    ((2, 3, 4, 4, 4), nn.Conv3d): """
    nn.Conv3d(3, 4, 2), norm(3); calls("m.bn(torch.conv3d(x, m.w, m.b))", 3)
    """,
    (IMAGE, nn.Conv2d): """
    conv(), norm(2); conv(bias=False), norm(2); conv(), norm(2, affine=False);
    conv(bias=False), norm(2, affine=False); conv(padding="same"), norm(2);
    conv(padding=1, padding_mode="reflect"), norm(2); conv(), norm(2), norm(2, eps=0.25);
    Conv(3, 4, 3), norm(2); both("m.bn(input=m.conv(input=x))");
    both("m.bn(F.conv2d(x, m.w, m.b))"); both("m.bn(F.conv2d(x, m.w))");
    both("m.bn(F.conv2d(input=x, weight=m.w, bias=m.b, padding=1, stride=(2, 1)))");
    both("m.bn(torch.conv2d(x, m.w, m.b, 2))");
    both("F.batch_norm(m.conv(x), m.mean, m.var, m.gain, m.shift, False, 0.1, 0.125)");
    both("F.batch_norm(m.conv(x), running_var=m.var, running_mean=m.mean, bias=m.b, eps=0.125)");
    both("F.batch_norm(m.conv(x), m.mean, m.var, weight=m.gain, training=m.training, eps=0.125)")
    """,
    ((2, 4, 9, 9), nn.Conv2d): "nn.Conv2d(4, 4, 3, 2, 1, dilation=2, groups=2), norm(2)",
    (WIDE, nn.Conv2d): "nn.Conv2d(4, 4, 3, groups=4), norm(2)",
    (WIDE, nn.Conv2d, F.relu, nn.Conv2d): "(b := nn.Sequential(nn.Conv2d(4, 4, 1), norm(2)), "
    "nn.ReLU(), b)",
    ((2, 4, 5, 5), up): """
    Forward("m.bn(F.conv_transpose2d(x, m.w, stride=2, groups=2, dilation=2))",
    bn=norm(2, 6), w=parameter(4, 3, 3, 3))
    """,
    # as timm's LeViT does, on (N * L, C)
    ((2, 5, 3), nn.Linear, torch.flatten, "reshape_as"): """
    calls("m.bn((y := m.w(x)).flatten(0, 1)).reshape_as(y)", 1, w=nn.Linear(3, 4));
    calls("m.bn((y := m.w(x)).flatten(0, -2)).reshape_as(y)", 1, w=nn.Linear(3, 4));
    calls("m.bn((y := m.w(x)).flatten(-3, -2)).reshape_as(y)", 1, w=nn.Linear(3, 4))
    """,
    # a constant along the last dimension, of any rank, or without a batch
    ((2, 3), nn.Linear): 'over("y - c", nn.Linear(3, 4), 4)',
    ((5, 2, 3), nn.Linear): 'over("y - c", nn.Linear(3, 4), 4)',
    ((2, 3, 5, 2, 3), nn.Linear): 'over("y - c", nn.Linear(3, 4), 4)',
    ((3,), nn.Linear): 'over("y - c", nn.Linear(3, 4), 4)',
    ((3, 6, 6), nn.Conv2d): 'over("y * c + c", conv(), 4, 1, 1)',
}


@pytest.mark.parametrize("regime", ["random", "dyadic", "ill"])
@spelled(FOLDED, cells="model case")
def test_folds_into_layers_in_every_spelling(model: str, case: Any, regime: str) -> None:
    shape, *left = case

    fast = tried_on(FOLD, model, shape, left, regime=regime)

    modules = [node.target for node in fast.graph.nodes if node.op == "call_module"]
    assert len(set(modules)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_fold_is_computed_in_float64_and_rounded_once(dtype: torch.dtype) -> None:
    model = randomize(built("conv(), norm(2)"), "random").to(dtype)
    layer, bn = model.children()
    scale = bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt()
    weight = layer.weight.double() * scale[:, None, None, None]
    bias = scale * (layer.bias.double() - bn.running_mean.double()) + bn.bias.double()

    (folded,) = layers_of(optimized_by(FOLD, model, torch.randn(2, 3, 6, 6, dtype=dtype)))

    assert torch.allclose(folded.weight.double(), weight, rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.allclose(folded.bias.double(), bias, rtol=torch.finfo(dtype).eps, atol=1e-12)
    assert folded.weight.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_fold_in_low_precision_is_as_near_to_the_truth_as_the_model(dtype: torch.dtype) -> None:
    model = randomize(nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()))
    other = randomize(nn.Sequential(nn.BatchNorm2d(16), nn.Conv2d(16, 32, 3)))

    assert_as_near_to_the_truth(FOLD, model.eval(), (4, 8, 12, 12), dtype)
    if dtype != torch.float64:
        assert_as_near_to_the_truth(FORWARD, other.eval(), (4, 16, 12, 12), dtype)


CONSTANTS = """
    y * c; c * y; y.mul(c); torch.mul(input=y, other=c); y + c; c + y; torch.add(y, c); y - c;
    c - y; torch.sub(y, other=c); y / c; y.div(c); y * c + c; (2 - y * 3 + 0.25) / 4
"""


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1), (1, 1, 1), (1,), ()])
@spelled({(nn.Conv2d,): CONSTANTS})
def test_a_constant_for_each_channel_folds(forward: str, outcome: Any, shape: Any) -> None:
    tried_on(FOLD, f"over({forward!r}, conv(), *{shape})", IMAGE, outcome)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("groups", "width"), [(1, 6), (2, 6), (4, 4), (4, 8)])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_transposed_convolution_absorbs_over_its_second_dimension(
    dimensions: int, groups: int, width: int, bias: bool
) -> None:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1]
    settings = f"stride=2, padding=1, output_padding=1, groups={groups}, bias={bias}"
    layers = f"nn.{kind.__name__}(4, {width}, 3, {settings}), norm({dimensions}, {width}, eps=1e-5)"

    tried_on(FOLD, layers, (2, 4, *[4] * dimensions), [kind])


def test_a_sum_keeps_the_weight_and_a_product_adds_no_bias() -> None:
    summed, scaled = (over(f"y {sign} c", conv(bias=False), 4, 1, 1).double() for sign in "+*")
    x = torch.randn(IMAGE).double()

    (with_bias,) = layers_of(optimized_by(FOLD, summed.eval(), x))
    (without,) = layers_of(optimized_by(FOLD, scaled.eval(), x))

    assert address(with_bias.weight) == address(summed.layer.weight)
    assert without.bias is None


@rows(
    "name text same",
    {
        "behind": (FOLD, "m.over(x) + m.over(x.flip(-1)) + m.over.layer(x) * 2.0", [0, 0, 1]),
        "before": (FORWARD, "m.pair(m.pair(x).relu())", [0, 0]),
    },
)
def test_a_pair_that_is_called_twice_shares_one_folded_layer(
    name: str, text: str, same: list[int]
) -> None:
    pair = nn.Sequential(norm(2), nn.Conv2d(4, 4, 1))
    layer = over("y * c", nn.Conv2d(4, 4, 3), 4, 1, 1)
    model = Forward(text, over=layer, pair=pair).double().eval()

    layers = layers_of(optimized_by(name, model, torch.randn(WIDE).double()))

    assert [int(each is not layers[0]) for each in layers] == same


UNKNOWN = "the graph was captured without example inputs"
IN_TRAINING = "BatchNorm is in training mode and uses batch statistics"
OTHER_AXIS = "BatchNorm normalizes another axis than the layer's"
READ_ELSEWHERE = "the layer's output is read elsewhere"
WRITTEN = "the forward writes their tensors"
OTHER_DTYPE = "dtype or device differ"
OVERFLOW = "the folded weights overflow or underflow"
HIGHER_RANK = "the constant has more dimensions than what it is combined with"
NOT_ONE = "the constant is not one number a channel"
MIXES = "flattening mixes the layer's outputs"
SHAPE = "the constant changes the shape"
# The shape of the input, the outcome, and shapes of later calls. See also tests/traps.py.
BEHIND: dict[Any, str] = {
    # without example inputs a rank that the layers imply suffices
    (None, 1, IMAGE): "conv(), norm(2)",
    (None, UNKNOWN, (5, 3)): "nn.Linear(3, 4), norm(1)",
    # channels that came last
    ((2, 1, 3), 1, (2, 1, 3)): """
    calls("m.bn(m.w(x.mT))", 1, w=nn.Conv1d(3, 4, 2, padding=1));
    calls("m.bn(m.w(x.mT))", 1, w=nn.ConvTranspose1d(3, 4, 2))
    """,
    ((2, 3, 3), 1, (2, 1, 3)): """
    calls("m.bn(m.w(x.mT))", 1, w=nn.Conv1d(3, 4, 2, padding=1));
    calls("m.bn(m.w(x.mT))", 1, w=nn.ConvTranspose1d(3, 4, 2))
    """,
    # a second reader, as timm's BatchNormAct2d checks the rank of what it is given
    (IMAGE, 1): """
    both("(m.bn(y := m.conv(x)), y.ndim)"); both("(m.bn(y := m.conv(x)), y.shape[0])");
    both("(m.bn(y := m.conv(x)), y.size(1))"); both("(m.bn(y := m.conv(x)), y.dim())")
    """,
    (IMAGE, 2): 'both("m.bn(m.conv(x)) - m.second(m.conv(x))")',
    ((2, 4, 5, 5), 0): """
    Forward("m.bn(m.up(x, output_size=[12, 12]))", up=up(4, 4, 3, 2), bn=norm(2))
    """,
    # what is not affine in one value
    (IMAGE, 0): """
    over("y / y.sum()", conv(), 4, 1, 1); over("c / y", conv(), 4, 1, 1);
    over("y + y.mean()", conv(), 4, 1, 1); over("torch.add(y, c, alpha=2)", conv(), 4, 1, 1);
    over("y + y.shape[0]", conv(), 4, 1, 1)
    """,
    (IMAGE, READ_ELSEWHERE): 'both("(y := m.conv(x), m.bn(y))")',
    ((2, 5, 3), READ_ELSEWHERE): """
    over("y.flatten(0, 1) * c + y.sum()", nn.Linear(3, 4), 4);
    over("(z := y.flatten(0, 1)) * c + z", nn.Linear(3, 4), 4)
    """,
    ((2, 3), NOT_ONE): 'over("y * c", nn.Linear(3, 4), 2, 4)',
    # a number for each column or image, and one channel made four
    (IMAGE, NOT_ONE): """
    over("y * c", conv(), 4); over("y * c", conv(), 2, 1, 1, 1);
    over("y * c", nn.Conv2d(3, 1, 3), 4, 1, 1)
    """,
    ((2, 3), HIGHER_RANK): 'over("y * c", nn.Linear(3, 4), 1, 1, 4)',
    (IMAGE, HIGHER_RANK): 'over("y * c", conv(), 1, 1, 1, 1, 1)',
    ((3, 6, 6), HIGHER_RANK): 'over("y * c", conv(), 1, 4, 1, 1)',
    ((2, 4, 5, 3), OTHER_AXIS): "nn.Linear(3, 4), norm(2)",
    ((3, 6), OTHER_AXIS): "nn.Conv1d(3, 4, 3), norm(1)",
    (IMAGE, OTHER_DTYPE): """
    over("y * c", conv(), 4, 1, 1, dtype=torch.complex128);
    over("y * c", conv(), 4, 1, 1, dtype=torch.int64)
    """,
    (IMAGE, WRITTEN): """
    both("(m.conv.weight.mul_(2), m.bn(m.conv(x)))[1]");
    over("(c.add_(1), y * c)[1]", conv(), 4, 1, 1)
    """,
    (IMAGE, "BatchNorm tracks no running statistics and uses the batch's"): """
    conv(), norm(2, track_running_stats=False)
    """,
    (IMAGE, OVERFLOW): 'over("y / 0", conv(), 1)',
    (IMAGE, "the folded bias overflows"): 'over("y + math.inf", conv(), 1)',
    ((2, 5, 3), MIXES): 'over("y.flatten(1) * 2", nn.Linear(3, 4), 1)',
    (IMAGE, MIXES): 'over("y.flatten(0, 1) * 2", conv(), 1)',
    ((2, 1, 3), "its rank depends on sizes, through a squeeze"): """
    Forward("x.squeeze()"), nn.Linear(3, 4), norm(1)
    """,
}
NORMALIZED = "(x - 0.485) / c"
# Constants repeat a single channel, and what repeats a channel is no example of other calls.
OF_ONE = 'before("x * c", valid(3), 4, 1, 1); before("x.relu() * c", valid(3), 4, 1, 1)'
OF_TWO = 'before(NORMALIZED, valid(3), 4, 1, 1); before("(x * c) / c", valid(3), 4, 1, 1)'
BEFORE: dict[Any, str] = {
    (WIDE, (nn.Conv2d,)): """
    norm(2), valid(3); norm(2), valid(1, bias=False); norm(2), valid(3, groups=2);
    norm(2), nn.Conv2d(4, 8, 3, groups=4); norm(2), valid(2, stride=2, dilation=2);
    norm(2), valid(3, padding="valid"); norm(2), valid(1, padding="same");
    norm(2), valid(3, padding=1, padding_mode="reflect");
    norm(2), valid(3, padding=2, padding_mode="circular")
    """,
    ((2, 4, 3, 3, 3), (nn.Conv3d,)): "norm(3), nn.Conv3d(4, 6, 2)",
    ((2, 4, 5), (nn.Conv1d,)): "norm(1), nn.Conv1d(4, 6, 2)",
    ((5, 4), (nn.Linear,)): "norm(1), nn.Linear(4, 6)",
    ((2, 3, 4), 1): 'before("x + c", nn.Linear(4, 6), 4)',
    (None, UNKNOWN): "norm(2), valid(3)",
    (WIDE, 1, GRAY): f"""
    {OF_ONE}; Forward("(m.layer((y := x - 0.5) * m.c), y)", layer=valid(3), c=torch.rand(4, 1, 1));
    nn.Linear(6, 6), before("x * c", valid(3), 4, 1, 1); before("x + c", valid(3), 4, 1, 1);
    before("x * c", valid(3, padding=1), 4, 1, 1);
    before("(y := x * c, y.ndim)[0]", valid(3), 4, 1, 1);
    before("x * c", up(4, 6, 3, stride=2, groups=2), 1, 4, 1, 1)
    """,
    (WIDE, 2, GRAY): OF_TWO,
    (WIDE[1:], 1, GRAY[1:]): OF_ONE,
    (WIDE[1:], 2, GRAY[1:]): OF_TWO,
    (GRAY, 1, WIDE): 'before("x * c * c", valid(3), 4, 1, 1)',
    # a layer fixes its channels, so that nothing expands them
    ((3, 4), (nn.Linear, nn.Linear)): """
    Forward("m.layer(m.layer(x) * m.c)", layer=nn.Linear(4, 4), c=torch.rand(4) + 0.5)
    """,
    (WIDE, "the layer pads with zeros, which are not shifted"): """
    norm(2), valid(2, padding="same"); norm(2), up(4, 6, 3)
    """,
    (WIDE, IN_TRAINING): "training(0, norm(2), valid(3))",
    ((2, 4, 4, 4), OTHER_AXIS): "norm(2), nn.Linear(4, 4)",
    (WIDE, 0): 'before("(y := x * c) + y.mean()", valid(3), 4, 1, 1)',
    (WIDE, READ_ELSEWHERE): 'Forward("(m.layer(y := x * 0.5), y)", layer=valid(3))',
    (GRAY, SHAPE): 'before("x * c", valid(3), 4, 1, 1)',
    ((6, 6), SHAPE): 'before("x * c", valid(3), 4, 1, 1)',
    (WIDE, WRITTEN): 'Forward("(m.layer.weight.mul_(2), m.layer(x * 2))[1]", layer=valid(3))',
}


@spelled(BEHIND, cells="model case")
def test_what_is_behind_a_layer(model: str, case: Any) -> None:
    tried_on(FOLD, model, *case)


@spelled(BEFORE, cells="model case")
def test_what_is_before_a_layer(model: str, case: Any) -> None:
    tried_on(FORWARD, model, *case)


def test_channels_that_are_switched_off_do_not_stop_a_fold() -> None:
    model, x = built("conv(), nn.BatchNorm2d(4)").half(), torch.randn(IMAGE).half()
    nn.init.zeros_(model.get_parameter("1.weight"))

    fast = optimized_by(FOLD, model, x)

    assert fast.report.counts() == {FOLD: 1}
    optimizer.check(model, fast, x)


def test_a_folded_parameter_can_be_written_and_is_frozen_as_it_was() -> None:
    layer = nn.Linear(3, 4, bias=False).requires_grad_(False)
    fast = optimized_by(FOLD, over("y - 1.0", layer).double().eval(), torch.ones(2, 3).double())
    fast.load_state_dict(fast.state_dict())

    assert fast.report.counts() == {FOLD: 1}
    assert all(each.is_contiguous() and not each.requires_grad for each in fast.parameters())


def test_layers_that_do_not_fit_one_another_stay() -> None:
    fast = optimized_by(FOLD, built("conv(), norm(2, 1)"))

    assert [each.reason for each in fast.report.refused] == ["the number of features differs"]
    with pytest.raises(RuntimeError, match="running_mean"):
        fast(torch.randn(IMAGE))


WIDENS = """Forward("m.fc(m.layer(x) * m.scale)", fc=nn.Linear(5, 2),
    layer=nn.ConvTranspose2d(4, 4, 3), scale=parameter(4, 1, 1))"""
ERRORS = {
    "behind a flatten": (
        FOLD, 'calls("m.bn((y := m.w(x)).flatten(0, 1)).reshape_as(y)", 1, w=nn.Linear(3, 4))',
        (2, 5, 3), torch.randn(2, 5, 3, 3).double(), "3 dimensions and got 4",
    ),
    "another rank": (
        FOLD, "nn.Linear(3, 4), norm(1)", (5, 3), torch.randn(2, 4, 3).double(),
        "2 dimensions and got 3",
    ),
    # A layer of no rows leaves its dtype, and the product with a constant does not.
    "a constant that widens what is empty": (
        FOLD, WIDENS, (2, 4, 3, 3), torch.empty(0, 4, 3, 3), "float64 and got",
    ),
    "bytes": (
        FORWARD, 'before("x / 255.0", valid(3), 1)', WIDE,
        torch.randint(0, 256, WIDE, dtype=torch.uint8), r"torch\.float64 and got torch\.uint8",
    ),
}  # fmt: skip


@rows("name model shape later error", ERRORS)
def test_what_was_relied_on_is_required_of_later_calls(
    name: str, model: str, shape: Any, later: Tensor, error: str
) -> None:
    fast = tried_on(name, model, shape, 1)

    with pytest.raises(optimizer.InputError, match=error):
        fast(later)


def test_a_constant_that_widens_what_autocast_narrows_stays() -> None:
    model = calls("m.w(x) * m.b", 1, w=nn.Linear(4, 4), b=nn.Parameter(torch.rand(4))).eval()
    x = torch.ones(2, 4)

    with torch.autocast("cpu", torch.bfloat16):
        fast: Any = optimizer.optimize(model, x, check=None, level=1)

        assert fast(x).dtype == model(x).dtype == torch.float32
    reason = "autocast gives the layer another dtype than the constant"
    assert reason in [refusal.reason for refusal in fast.report.refused]


@pytest.mark.parametrize("dimensions", [2, 3])
def test_single_elements_lie_in_memory_as_before(dimensions: int) -> None:
    layout = (torch.channels_last, torch.channels_last_3d)[dimensions - 2]
    pool = f"nn.AdaptiveAvgPool{dimensions}d"
    layers = f"{pool}(1), nn.Conv{dimensions}d(4, 4, 1), norm({dimensions}), {pool}(2)"
    model = built(layers).double()
    x = torch.randn(2, 4, *[3] * dimensions).double().contiguous(memory_format=layout)

    fast = tried(FOLD, model, (x,), "its output may be laid out otherwise")

    assert fast(x).stride() == model(x).stride()
    assert not optimized_by(FOLD, model, x.contiguous()).report.refused


def test_an_image_of_bytes_and_a_mean_far_beyond_the_deviation_stay() -> None:
    image, model = torch.randint(0, 256, WIDE, dtype=torch.uint8), built("norm(2), valid(3)")
    nn.init.constant_(model.get_buffer("0.running_mean"), 100.0)
    shifted = "the shift is so large that it would cancel after the layer only"

    tried(FORWARD, before("x / 255.0", valid(3), 1).eval(), (image,), OTHER_DTYPE)
    tried(FORWARD, model, (torch.randn(WIDE),), shifted)


def test_a_batchnorm_may_lay_its_output_out_anew() -> None:
    model = Forward(
        "torch.stack((y := m.pair(torch.relu(x[:, :1])), y), 1)",
        pair=nn.Sequential(norm(2, 1), nn.Conv2d(1, 1, 1)),
    ).eval()
    x = torch.rand(2, 4, 4, 4).contiguous(memory_format=torch.channels_last)

    fast = tried(FORWARD, model, (x,), "the affine lays its output out otherwise")

    assert fast(x).stride() == model(x).stride()


def test_a_batchnorm_of_no_elements_takes_any_channels() -> None:
    layer, scale = nn.Conv1d(2, 2, 1), torch.rand(2, 1)
    model = Forward("m.c(m.bn(x) * m.s)", bn=nn.BatchNorm1d(2), c=layer, s=scale).eval()
    fast = optimized_by(FORWARD, model, torch.empty(0, 2, 3))

    assert fast.report.counts()[FORWARD] >= 1
    assert_equivalent(model, fast, (torch.empty(0, 1, 3),))


def test_what_the_layer_would_keep_for_gradients_must_not_be_written_later() -> None:
    forward = "m.layer((y := x + 1.0) * 0.5) + y.mul_(2.0).sum()"
    model, x = Forward(forward, layer=nn.Linear(3, 3)).eval(), torch.randn(2, 3, requires_grad=True)

    reason = "what the layer would keep for gradients is written later"
    tried(FORWARD, model, (x.detach(),), reason)(x).sum().backward()

    assert x.grad is not None
