"""BatchNorm and constants fold into the layer before or behind them, or say why not."""

from __future__ import annotations

import operator
from copy import deepcopy
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
    callees,
    layers_of,
    optimized_by,
    rows,
    spelled,
    tried,
)

FOLD, FORWARD = "fold_affine", "fold_affine_forward"
EPS = 0.125  # a power of two: then a correct fold of dyadic values rounds nothing
UNKNOWN = "the graph was captured without example inputs"
IMAGE, WIDE, GRAY = (2, 3, 6, 6), (2, 4, 6, 6), (2, 1, 6, 6)
conv, valid = partial(nn.Conv2d, 3, 4, 3), partial(nn.Conv2d, 4, 6)


def tried_on(name: str, model: nn.Module, shape: tuple[int, ...], outcome: Any, *later: Any) -> Any:
    """`tried` on weights and inputs that hide nothing, and on inputs of other shapes later."""
    model = randomize(deepcopy(model).double().eval())
    calls = (inputs_like([each], "random", place) for place, each in enumerate((shape, *later)))
    return tried(name, model, next(calls), outcome, *calls)


def stays(name: str, model: nn.Module, x: Tensor, reason: str) -> None:
    fast = optimized_by(name, model, x)

    assert {each.reason for each in fast.report.refused} == ({reason} if reason else set())
    assert fast.report.fired == ()
    assert_equivalent(model, fast, (x,), exact=True)


def norm(dimensions: int, features: int = 4, **settings: Any) -> nn.Module:
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
    return kind(features, **({"eps": EPS} | settings))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def over(text: str, layer: nn.Module, *shape: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model of what a layer gives, `y`, and of a constant `c`."""
    constant = torch.rand(shape).add(0.5).to(dtype)
    return Forward(f"y, c = m.layer(x), m.c; return {text}", layer=layer.double(), c=constant)


def before(text: str, layer: nn.Module, *shape: int) -> nn.Module:
    """A model of a layer behind what is computed with a constant `c`."""
    return Forward(f"c = m.c; return m.layer({text})", layer=layer, c=torch.rand(shape) + 0.5)


def both(text: str) -> nn.Module:
    """A model of two layers and another norm."""
    return Forward(text, conv=conv(), bn=norm(2), second=norm(2, eps=0.5))


def built(text: str) -> nn.Module:
    """A model, or layers in a row, from its text."""
    found = eval(text)
    found = nn.Sequential(*found) if isinstance(found, tuple) else found
    return found if "training(" in text else found.eval()


class Conv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


FOLDED = {
    (5, 3): "nn.Linear(3, 4), norm(1); nn.Linear(3, 4, bias=False), norm(1)",
    (2, 3, 8): "nn.Conv1d(3, 4, 3), norm(1)",
    (2, 3, 6): "nn.Conv1d(3, 4, 3), norm(1)",  # as long as wide
    (2, 3, 4, 4, 4): "nn.Conv3d(3, 4, 2), norm(3)",
    IMAGE: """
    conv(), norm(2); conv(bias=False), norm(2); conv(), norm(2, affine=False);
    conv(bias=False), norm(2, affine=False); conv(padding="same"), norm(2);
    conv(padding=1, padding_mode="reflect"), norm(2); conv(), norm(2), norm(2, eps=0.25);
    conv(), norm(2, momentum=None); Conv(3, 4, 3), norm(2);
    Forward("m.layers['norm'](m.layers['first'](x))",
    layers=nn.ModuleDict({"first": conv(), "norm": norm(2)}))
    """,
    (2, 4, 9, 9): "nn.Conv2d(4, 4, 3, 2, padding=1, dilation=2, groups=2), norm(2)",
    WIDE: "nn.Conv2d(4, 4, 3, groups=4), norm(2)",
}
SPELLINGS = """
    m.bn(input=m.conv(input=x)); m.bn(F.conv2d(x, m.w, m.b)); m.bn(F.conv2d(x, m.w));
    m.bn(F.conv2d(input=x, weight=m.w, bias=m.b, padding=1, stride=(2, 1)));
    m.bn(torch.conv2d(x, m.w, m.b, 2)); m.bn(F.conv2d(x, m.conv.weight, m.conv.bias));
    F.batch_norm(m.conv(x), m.mean, m.var, m.gain, m.shift, False, 0.1, 0.125);
    F.batch_norm(m.conv(x), running_mean=m.mean, running_var=m.var, bias=m.shift, weight=m.gain,
    eps=0.125);
    F.batch_norm(m.conv(x), m.mean, m.var, training=m.training, eps=0.125);
    F.batch_norm(F.conv2d(x, m.w, m.b), m.mean, m.var, m.gain, m.shift, eps=0.125)
"""


@pytest.mark.parametrize("regime", ["random", "dyadic", "ill"])
@spelled(FOLDED, cells="layers shape")
def test_folds_into_each_kind_of_layer(layers: str, shape: Any, regime: Any) -> None:
    model = randomize(built(layers).double(), regime)
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layer = next(type(each) for each in model.modules() if isinstance(each, kinds))

    tried(FOLD, model, inputs_like([shape], regime, 0), [nn.Conv2d if layer is Conv else layer])


@pytest.mark.parametrize("regime", ["random", "dyadic"])
@spelled({IMAGE: SPELLINGS}, cells="text shape")
def test_folds_in_every_spelling_of_a_convolution(text: str, shape: Any, regime: Any) -> None:
    # The variance + eps is a power of four, as in dyadic data.
    held = {"mean": torch.tensor([1.0, -2, 3, 0]), "var": torch.tensor([1.0, 4, 0.25, 16]) - EPS}
    held |= {"gain": parameter(4), "shift": parameter(4), "w": parameter(4, 3, 3, 3)}
    model = Forward(text, b=parameter(4), conv=conv(), bn=norm(2), **held)
    model = randomize(model.double().eval(), regime)

    tried(FOLD, model, inputs_like([shape], regime, 0), [nn.Conv2d])


def calls(text: str, dimensions: int, **weights: Any) -> nn.Module:
    """A model of a text with a norm `bn`, and weights `w` and `b` of a layer."""
    held = weights or {"w": parameter(4, 3, *[3] * dimensions), "b": parameter(4)}
    return Forward(text, bn=norm(dimensions or 1), **held)


BEHIND = (nn.Linear, torch.flatten, "reshape_as")  # as timm's LeViT does, on (N * L, C)
BLOCK = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), norm(2))
UP = nn.ConvTranspose2d(3, 4, 3, stride=2)
MORE = {
    ((5, 3), (nn.Linear,)): """
    calls("m.bn(F.linear(x, m.w, m.b))", 0);
    calls("m.bn(F.linear(input=x, weight=m.w, bias=m.b))", 0)
    """,
    ((2, 3, 6), (nn.Conv1d,)): 'calls("m.bn(F.conv1d(x, m.w, m.b))", 1)',
    ((2, 3, 4, 4, 4), (nn.Conv3d,)): 'calls("m.bn(torch.conv3d(x, m.w, m.b))", 3)',
    ((2, 5, 3), BEHIND): """
    calls("m.bn((y := m.w(x)).flatten(0, 1)).reshape_as(y)", 1, w=nn.Linear(3, 4));
    calls("m.bn((y := m.w(x)).flatten(0, -2)).reshape_as(y)", 1, w=nn.Linear(3, 4));
    calls("m.bn((y := m.w(x)).flatten(-3, -2)).reshape_as(y)", 1, w=nn.Linear(3, 4))
    """,
    # Channels that came last
    ((2, 1, 3), 1, (2, 1, 3)): """
    calls("m.bn(m.w(x.mT))", 1, w=nn.Conv1d(3, 4, 2, padding=1));
    calls("m.bn(m.w(x.mT))", 1, w=nn.ConvTranspose1d(3, 4, 2))
    """,
    ((2, 3, 3), 1, (2, 1, 3)): """
    calls("m.bn(m.w(x.mT))", 1, w=nn.Conv1d(3, 4, 2, padding=1));
    calls("m.bn(m.w(x.mT))", 1, w=nn.ConvTranspose1d(3, 4, 2))
    """,
    # A second reader, as timm's BatchNormAct2d checks the rank of what it is given
    (IMAGE, 1): """
    both("(m.bn(y := m.conv(x)), y.ndim)"); both("(m.bn(y := m.conv(x)), y.shape[0])");
    both("(m.bn(y := m.conv(x)), y.size(1))"); both("(m.bn(y := m.conv(x)), y.dim())")
    """,
    (IMAGE, 2): 'both("m.bn(m.conv(x)) - m.second(m.conv(x))")',
    (WIDE, (nn.Conv2d, F.relu, nn.Conv2d)): "BLOCK, nn.ReLU(), BLOCK",
    ((2, 4, 5, 5), (nn.ConvTranspose2d,)): """
    Forward("m.bn(F.conv_transpose2d(x, m.w, stride=2, groups=2, dilation=2))",
    bn=nn.BatchNorm2d(6), w=parameter(4, 3, 3, 3))
    """,
    # A constant along the last dimension, of any rank
    ((2, 3), (nn.Linear,)): 'over("y - c", nn.Linear(3, 4), 4)',
    ((5, 2, 3), (nn.Linear,)): 'over("y - c", nn.Linear(3, 4), 4)',
    ((2, 3, 5, 2, 3), (nn.Linear,)): 'over("y - c", nn.Linear(3, 4), 4)',
    ((3,), (nn.Linear,)): 'over("y - c", nn.Linear(3, 4), 4)',
    # No batch
    ((3, 6, 6), (nn.Conv2d,)): """
    over("y * c + c", conv(bias=True), 4, 1, 1); over("y * c + c", conv(bias=False), 4, 1, 1)
    """,
    # What is not affine in one value
    (IMAGE, 0): """
    over("y / y.sum()", conv(), 4, 1, 1); over("c / y", conv(), 4, 1, 1);
    over("y + y.mean()", conv(), 4, 1, 1); over("torch.add(y, c, alpha=2)", conv(), 4, 1, 1);
    over("y + y.shape[0]", conv(), 4, 1, 1)
    """,
}


@spelled(MORE, cells="model case")
def test_folds(model: str, case: Any) -> None:
    shape, outcome, *later = case

    fast = tried_on(FOLD, built(model), shape, outcome, *later)

    targets = [node.target for node in fast.graph.nodes if node.op == "call_module"]
    assert len(set(targets)) == (1 if "BLOCK" in model else len(targets))


def test_without_example_inputs_a_rank_that_the_layers_imply_suffices() -> None:
    fitting, other = built("conv(), norm(2)").double(), built("nn.Linear(3, 4), norm(1)").double()

    tried(FOLD, randomize(fitting), (), [nn.Conv2d], inputs_like([IMAGE], "random", 0))
    tried(FOLD, randomize(other), (), UNKNOWN, inputs_like([(5, 3)], "random", 0))
    tried(FORWARD, built("norm(2), valid(3)"), (), UNKNOWN)


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
    tried_on(FOLD, over(forward, conv(), *shape), IMAGE, outcome)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("groups", "width"), [(1, 6), (2, 6), (4, 4), (4, 8)])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_transposed_convolution_absorbs_over_its_second_dimension(
    dimensions: int, groups: int, width: int, bias: bool
) -> None:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1]
    layer = kind(4, width, 3, stride=2, padding=1, output_padding=1, groups=groups, bias=bias)
    model = nn.Sequential(layer, norm(dimensions, width, eps=1e-5))

    tried_on(FOLD, model, (2, 4, *[4] * dimensions), [kind])


def test_an_output_size_that_is_asked_for_is_kept() -> None:
    model = Forward("m.bn(m.up(x, output_size=(12, 12)))", up=UP, bn=norm(2))
    randomize(model.double().eval())
    inputs = inputs_like([(2, 3, 5, 5)], "random", 0)

    assert_equivalent(model, optimized_by(FOLD, model, *inputs), inputs)


def test_a_sum_keeps_the_weight_and_a_product_adds_no_bias() -> None:
    summed, scaled = (over(f"y {sign} c", conv(bias=False), 4, 1, 1).eval() for sign in "+*")
    x = torch.randn(IMAGE).double()

    (with_bias,) = layers_of(optimized_by(FOLD, summed, x))
    (without,) = layers_of(optimized_by(FOLD, scaled, x))

    assert address(with_bias.weight) == address(summed.layer.weight)
    assert without.bias is None


def test_a_pair_that_is_called_twice_shares_one_folded_layer() -> None:
    text = "m.over(x) + m.over(x.flip(-1)) + m.over.layer(x) * 2.0"
    model = Forward(text, over=over("y * c", conv(), 4, 1, 1)).eval()

    first, second, third = layers_of(optimized_by(FOLD, model, torch.randn(IMAGE).double()))

    assert first is second is not third


def training(place: int, *layers: nn.Module) -> nn.Module:
    model = nn.Sequential(*layers).eval()
    model[place].train()
    return model


def tiny_variance() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), norm(1, eps=1e-7))
    nn.init.zeros_(model[1].running_var)
    nn.init.constant_(model[1].weight, 300.0)
    nn.init.uniform_(model[0].weight, 1.0, 2.0)
    return model.half().eval()


IN_TRAINING = "BatchNorm is in training mode and uses batch statistics"
OTHER_AXIS = "BatchNorm normalizes another axis than the layer's"
READ_ELSEWHERE = "the layer's output is read elsewhere"
WRITTEN = "the forward writes their tensors"
OTHER_DTYPE = "dtype or device differ"
OVERFLOW = "the folded weights overflow or underflow"
HIGHER_RANK = "the constant has more dimensions than what it is combined with"
MIXES = "flattening mixes the layer's outputs"
STAYS = {
    (IMAGE, IN_TRAINING): "training(1, conv(), norm(2))",
    (IMAGE, "BatchNorm tracks no running statistics and uses the batch's"): """
    conv(), norm(2, track_running_stats=False)
    """,
    (IMAGE, READ_ELSEWHERE): 'both("(y := m.conv(x), m.bn(y))")',
    ((2, 5, 3), READ_ELSEWHERE): """
    over("y.flatten(0, 1) * c + y.sum()", nn.Linear(3, 4), 4);
    over("(z := y.flatten(0, 1)) * c + z", nn.Linear(3, 4), 4)
    """,
    ((2, 3), "the constant is not one number a channel"): 'over("y * c", nn.Linear(3, 4), 2, 4)',
    # A number for each position, column or image, and one channel made four
    (IMAGE, "the constant is not one number a channel"): """
    over("y * c", conv(), 4, 4, 4); over("y * c", conv(), 4); over("y * c", conv(), 2, 1, 1, 1);
    over("y * c", nn.Conv2d(3, 1, 3), 4, 1, 1)
    """,
    ((2, 3), HIGHER_RANK): 'over("y * c", nn.Linear(3, 4), 1, 1, 4)',
    (IMAGE, HIGHER_RANK): 'over("y * c", conv(), 1, 1, 1, 1, 1)',
    ((3, 6, 6), HIGHER_RANK): 'over("y * c", conv(), 1, 4, 1, 1)',
    ((2, 4, 3), OTHER_AXIS): "nn.Linear(3, 4), norm(1)",
    ((2, 5, 3), OTHER_AXIS): "nn.Linear(3, 4), norm(1, 5)",
    ((2, 4, 5, 3), OTHER_AXIS): "nn.Linear(3, 4), norm(2)",
    ((3, 6), OTHER_AXIS): "nn.Conv1d(3, 4, 3), norm(1)",
    (IMAGE, OTHER_DTYPE): """
    conv().bfloat16(), norm(2); over("y * c", conv(), 4, 1, 1, dtype=torch.complex128);
    over("y * c", conv(), 4, 1, 1, dtype=torch.int64)
    """,
    (IMAGE, WRITTEN): """
    both("(m.conv.weight.mul_(2), m.bn(m.conv(x)))[1]");
    both("(m.bn.running_mean.add_(1), m.bn(m.conv(x)))[1]");
    over("(c.add_(1), y * c)[1]", conv(), 4, 1, 1)
    """,
    ((2, 3), OVERFLOW): "tiny_variance()",
    (IMAGE, OVERFLOW): 'over("y / 0", conv(), 1); over("y * 1e-6", conv(bias=False), 1).half()',
    (IMAGE, "the folded bias overflows"): 'over("y + math.inf", conv(), 1)',
    ((2, 5, 3), MIXES): 'over("y.flatten(1) * 2", nn.Linear(3, 4), 1)',
    (IMAGE, MIXES): 'over("y.flatten(0, 1) * 2", conv(), 1)',
    ((2, 1, 3), "its rank depends on sizes, through a squeeze"): """
    Forward("x.squeeze()"), nn.Linear(3, 4), norm(1)
    """,
}


@spelled(STAYS, cells="model case")
def test_a_layer_stays(model: str, case: Any) -> None:
    (shape, reason), layers = case, built(model).requires_grad_(False)
    dtype = next(layers.parameters()).dtype

    stays(FOLD, layers, torch.randn(shape, dtype=dtype) * (1e-3 if "tiny" in model else 1), reason)


def test_channels_that_are_switched_off_do_not_stop_a_fold() -> None:
    model, x = built("conv(), nn.BatchNorm2d(4)").half(), torch.randn(IMAGE).half()
    nn.init.zeros_(model.get_parameter("1.weight"))

    fast = optimized_by(FOLD, model, x)

    assert fast.report.counts() == {FOLD: 1}
    optimizer.check(model, fast, x)


def test_an_empty_layer_is_folded() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        model = built("nn.Linear(0, 4), norm(1)").double()

    tried(FOLD, model, (torch.randn(5, 0).double(),), 1)


def test_a_folded_parameter_can_be_written_and_is_frozen_as_it_was() -> None:
    layer = nn.Linear(3, 4, bias=False).requires_grad_(False)
    fast = optimized_by(FOLD, over("y - 1.0", layer).eval(), torch.ones(2, 3).double())
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
    fast = tried_on(name, built(model), shape, 1)

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


NORMALIZED = "(x - 0.485) / c"
FOLDS = {
    WIDE: """
    norm(2), valid(3); norm(2), valid(1, bias=False); norm(2), valid(3, groups=2);
    norm(2), nn.Conv2d(4, 8, 3, groups=4); norm(2), valid(2, stride=2, dilation=2);
    norm(2), valid(3, padding="valid"); norm(2), valid(1, padding="same");
    norm(2), valid(3, padding=1, padding_mode="reflect");
    norm(2), valid(3, padding=2, padding_mode="circular");
    before("x * c", valid(3, padding=1), 4, 1, 1);
    before("x * c", nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), 1, 4, 1, 1);
    before("x + c", valid(3), 4, 1, 1); before(NORMALIZED, valid(3), 1, 4, 1, 1);
    before("(y := x * c, y.ndim)[0]", valid(3), 4, 1, 1)
    """,
    (2, 4, 3, 3, 3): "norm(3), nn.Conv3d(4, 6, 2)",
    (2, 4, 5): "norm(1), nn.Conv1d(4, 6, 2)",
    (5, 4): "norm(1), nn.Linear(4, 6)",
    (2, 3, 4): 'before("x + c", nn.Linear(4, 6), 4)',
    WIDE[1:]: 'before("x + c", valid(3), 4, 1, 1)',
}


@spelled(FOLDS, cells="layers shape")
def test_folds_forward(layers: str, shape: tuple[int, ...]) -> None:
    model, inputs = randomize(built(layers).double()), inputs_like([shape], "random", 0)

    fast = optimized_by(FORWARD, model, *inputs)

    assert set(fast.report.counts()) == {FORWARD}
    assert not {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d} & set(callees(fast))
    assert {operator.mul, operator.add, operator.sub}.isdisjoint(callees(fast))
    assert_equivalent(model, fast, inputs)


# Constants repeat a single channel, and what repeats a channel is no example of other calls.
OF_ONE = 'before("x * c", valid(3), 4, 1, 1); before("x.relu() * c", valid(3), 4, 1, 1)'
SINGLE = {
    (WIDE, 1, GRAY): f"""
    {OF_ONE}; Forward("(m.layer((y := x - 0.5) * m.c), y)", layer=valid(3), c=torch.rand(4, 1, 1));
    nn.Linear(6, 6), before("x * c", valid(3), 4, 1, 1)
    """,
    (WIDE, 2, GRAY): """
    before(NORMALIZED, valid(3), 4, 1, 1); before("(x * c) / c", valid(3), 4, 1, 1)
    """,
    (WIDE[1:], 1, GRAY[1:]): OF_ONE,
    (WIDE[1:], 2, GRAY[1:]): """
    before(NORMALIZED, valid(3), 4, 1, 1); before("(x * c) / c", valid(3), 4, 1, 1)
    """,
    (GRAY, 1, WIDE): 'before("x * c * c", valid(3), 4, 1, 1)',
}


@spelled(SINGLE, cells="model case")
def test_a_single_channel(model: str, case: Any) -> None:
    tried_on(FORWARD, built(model), *case)


def test_a_layer_fixes_its_channels() -> None:
    model = Forward("m.layer(m.layer(x) * m.c)", layer=nn.Linear(4, 4), c=torch.rand(4) + 0.5)

    fast = tried_on(FORWARD, model, (3, 4), 1)

    assert [node.op for node in fast.graph.nodes if node.op == "call_method"] == []


def test_a_pair_that_is_called_twice_is_folded_once() -> None:
    block = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))

    fast = tried_on(FORWARD, nn.Sequential(block, nn.ReLU(), block), WIDE, 2)

    calls = [node.target for node in fast.graph.nodes if node.op == "call_module"]
    assert calls[0] == calls[-1]


AFFINES_THAT_STAY = {
    (WIDE, "the layer pads with zeros, which are not shifted"): """
    norm(2), valid(3, padding=1); norm(2), valid(2, padding="same");
    norm(2), nn.ConvTranspose2d(4, 6, 3)
    """,
    (WIDE, IN_TRAINING): "training(0, norm(2), valid(3))",
    ((2, 4, 4, 4), OTHER_AXIS): "norm(2), nn.Linear(4, 4)",
    (WIDE, ""): 'before("(y := x * c) + y.mean()", valid(3), 4, 1, 1)',
    (WIDE, READ_ELSEWHERE): 'Forward("(m.layer(y := x * 0.5), y)", layer=valid(3))',
    ((2, 1, 6, 6), "the constant changes the shape"): 'before("x * c", valid(3), 4, 1, 1)',
    ((6, 6), "the constant changes the shape"): 'before("x * c", valid(3), 4, 1, 1)',
    (WIDE, WRITTEN): 'Forward("(m.layer.weight.mul_(2), m.layer(x * 2))[1]", layer=valid(3))',
}


@spelled(AFFINES_THAT_STAY, cells="model case")
def test_an_affine_stays(model: str, case: Any) -> None:
    stays(FORWARD, randomize(built(model)).requires_grad_(False), torch.randn(case[0]), case[1])


def test_an_image_of_bytes_and_a_mean_far_beyond_the_deviation_stay() -> None:
    image, model = torch.randint(0, 256, WIDE, dtype=torch.uint8), built("norm(2), valid(3)")
    nn.init.constant_(model.get_buffer("0.running_mean"), 100.0)
    shifted = "the shift is so large that it would cancel after the layer only"

    stays(FORWARD, before("x / 255.0", valid(3), 1).eval(), image, OTHER_DTYPE)
    stays(FORWARD, model, torch.randn(WIDE), shifted)


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
