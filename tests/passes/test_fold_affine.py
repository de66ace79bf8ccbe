"""BatchNorm and constants fold into the layer before or behind them, or say why not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import optimizer
from optimizer.testing import inputs_like, randomize
from tests.single_pass import Forward, layers_of, optimized_by, rows, spelled, tried

FOLD, FORWARD = "fold_affine", "fold_affine_forward"
EPS = 0.125  # a power of two: then a correct fold of dyadic values rounds nothing
IMAGE, WIDE, GRAY = (2, 3, 6, 6), (2, 4, 6, 6), (2, 1, 6, 6)
conv, valid, up = partial(nn.Conv2d, 3, 4, 3), partial(nn.Conv2d, 4, 6), nn.ConvTranspose2d


def tried_on(name, model, shape, outcome, *later, regime="random"):
    """`tried` on weights and inputs that hide nothing, and on inputs of other shapes later."""
    shapes = (shape, *later) if shape else later
    calls = [inputs_like([each], regime, place) for place, each in enumerate(shapes)]
    given = calls.pop(0) if shape else ()
    return tried(name, randomize(built(model).double(), regime), given, outcome, *calls)


def built(text: str) -> nn.Module:
    """A model, or layers in a row, from its text."""
    found = eval(text)
    found = nn.Sequential(*found) if isinstance(found, tuple) else found
    return found if text.startswith("trained") else found.eval()


def norm(dimensions: int, features: int = 4, **settings: Any) -> nn.Module:
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
    return kind(features, **({"eps": EPS} | settings))


def over(text: str, layer: nn.Module, *shape: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model of what a layer gives, `y`, and of a constant `c`."""
    constant = torch.rand(shape).add(0.5).to(dtype)
    return Forward(f"y, c = m.layer(x), m.c; return {text}", layer=layer, c=constant)


def before(text: str, layer: nn.Module, *shape: int) -> nn.Module:
    """A model of a layer behind what is computed with a constant `c`."""
    return Forward(f"c = m.c; return m.layer({text})", layer=layer, c=torch.rand(shape) + 0.5)


def both(text: str, **other: Any) -> nn.Module:
    """A model of a layer and two norms."""
    return Forward(text, **{"bn": norm(2), "second": norm(2, eps=0.5), "conv": conv()} | other)


def trained(pair: nn.Sequential) -> nn.Module:
    """A pair whose second layer is in training mode."""
    pair[1].train()
    return pair


# The shape of the input, and what is called in the end. See also the motifs and tests/traps.py.
FOLDED = {
    ((5, 3), nn.Linear): """
    nn.Linear(3, 4, bias=False), norm(1); over("y - m.layer.bias", nn.Linear(3, 4))""",
    ((2, 3, 6), nn.Conv1d): "nn.Conv1d(3, 4, 3), norm(1)",
    ((2, 3, 4, 4, 4), nn.Conv3d): "nn.Conv3d(3, 4, 3), norm(3)",
    (IMAGE, nn.Conv2d): """
    conv(), norm(2), norm(2, affine=False); both("m.bn(input=m.conv(input=x))");
    over("c * y", conv(), 4, 1, 1); over("torch.sub(y, other=c)", conv(), 1, 1, 1);
    over("y.div(c)", conv(), 4, 1, 1); over("(2 - y * 3 + 0.25) / 4", conv());
    over("y * 0", conv())""",
    ((2, 4, 9, 9), nn.Conv2d): "nn.Conv2d(4, 4, 3, 2, 1, dilation=2, groups=2), norm(2)",
    (WIDE, nn.Conv2d, F.relu, nn.Conv2d): "(b := nn.Sequential(nn.Conv2d(4, 4, 1), norm(2)), "
    "nn.ReLU(), b)",
    ((2, 4, 5, 5), up): "up(4, 6, 3, 2, 1, 1, groups=2, bias=False), norm(2, 6)",
    ((2, 4, 4), nn.ConvTranspose1d): "nn.ConvTranspose1d(4, 8, 3, 2, 1, 1, 4), norm(1, 8)",
    ((2, 4, 4, 4, 4), nn.ConvTranspose3d): "nn.ConvTranspose3d(4, 6, 3, 2, 1, 1), norm(3, 6)",
    # as timm's LeViT does, on (N * L, C)
    ((2, 5, 3), nn.Linear, torch.flatten, "reshape_as"): """
    both("m.bn((y := m.fc(x)).flatten(-3, -2)).reshape_as(y)", bn=norm(1), fc=nn.Linear(3, 4))""",
    # a constant along the last dimension, of any rank, or without a batch
    ((2, 3, 5, 2, 3), nn.Linear): 'over("y - c", nn.Linear(3, 4), 4)',
    ((3, 6, 6), nn.Conv2d): 'over("y * c + c", conv(), 4, 1, 1)',
}


@pytest.mark.parametrize("regime", ["dyadic", "ill"])
@spelled(FOLDED, cells="model case")
def test_folds_into_layers_in_every_spelling(model: str, case: Any, regime: str) -> None:
    shape, *left = case

    fast = tried_on(FOLD, model, shape, left, regime=regime)
    assert len({node.target for node in fast.graph.nodes if node.op == "call_module"}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [FOLD, FORWARD])
def test_a_fold_in_low_precision_is_as_near_to_the_truth_as_the_model(name, dtype):
    """It is computed in float64 and rounded once."""
    layers = [nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)]
    (x,) = inputs_like([(4, 16, 12, 12)], "random", 0, dtype)
    ordered = layers if name == FORWARD else layers[::-1]
    model = randomize(nn.Sequential(*ordered)).eval().to(dtype)

    fast = optimized_by(name, model, x)

    with torch.no_grad():
        eager, folded = model(x).double(), fast(x).double()
        truth = model.double()(x.double())
    assert [each.weight.dtype for each in layers_of(fast)] == [dtype]
    assert (folded - truth).abs().max() <= 4 * (eager - truth).abs().max()


UNKNOWN = "the graph was captured without example inputs"
READ_ELSEWHERE = "the layer's output is read elsewhere"
OTHER_DTYPE, WRITTEN = "dtype or device differ", "the forward writes their tensors"
NOT_ONE = "the constant is not one number a channel"
MIXES, SHAPE = "flattening mixes the layer's outputs", "the constant changes the shape"
LINEAR, LAST = "nn.Linear(3, 4)", "x.contiguous(memory_format=torch.channels_last)"
# The shape of the input, the outcome, and shapes of later calls.
BEHIND: dict[Any, str] = {
    # without example inputs a rank that the layers imply suffices
    (None, 1, IMAGE): "conv(), norm(2)",
    (None, UNKNOWN, (5, 3)): "nn.Linear(3, 4), norm(1)",
    (None, "the number of features differs"): "conv(), norm(2, 1)",
    # channels that came last
    ((2, 3, 3), 1, (2, 1, 3)): 'Forward("x.mT"), nn.Conv1d(3, 4, 2, padding=1), norm(1)',
    # a second reader, as timm's BatchNormAct2d checks the rank of what it is given
    (IMAGE, 1): 'both("(m.bn(y := m.conv(x)), y.ndim, y.shape[0], y.size(1))")',
    (IMAGE, 2): """
    both("m.bn(m.conv(x)) - m.second(m.conv(x))");
    over("(1.0 - y) * (m.layer(-x) - 1.0)", conv())""",
    ((2, 4, 5, 5), 0): 'both("m.bn(m.up(x, output_size=[12, 12]))", up=up(4, 4, 3, 2))',
    # what is not affine in one value
    (IMAGE, 0): """
    over("y / y.sum()", conv(), 4, 1, 1); over("c / y", conv(), 4, 1, 1);
    over("torch.add(y, c, alpha=2)", conv(), 4, 1, 1); over("y + y.shape[0]", conv(), 4, 1, 1)""",
    ((5, 3), READ_ELSEWHERE): f'over("(y * c, y.mH)", {LINEAR}, 4)',
    ((2, 5, 3), READ_ELSEWHERE): f'over("(z := y.flatten(0, 1)) * c + z", {LINEAR}, 4)',
    (IMAGE, READ_ELSEWHERE): """
    both("m.bn(y := m.conv(x)) + y.view_as(m.conv(x))");
    both("m.bn(y := m.conv(x)) + m.dim(y)", dim=nn.Tanh())""",
    (IMAGE, NOT_ONE): 'over("y * c", nn.Conv2d(3, 1, 3), 4, 1, 1)',  # one channel made four
    ((2, 3), "the constant has more dimensions than what it is combined with"): f"""
    over("y * c", {LINEAR}, 1, 1, 4)""",
    (IMAGE, OTHER_DTYPE): 'over("y * c", conv(), 4, 1, 1, dtype=torch.complex128)',
    ((5, 3), OTHER_DTYPE): """
    Forward("x.to(torch.cfloat)"), nn.Linear(3, 4, dtype=torch.cfloat), Forward("x * 2.0")""",
    ((3, 6), "BatchNorm normalizes another axis than the layer's"): "nn.Conv1d(3, 4, 3), norm(1)",
    (IMAGE, "BatchNorm tracks no running statistics and uses the batch's"): """
    conv(), norm(2, track_running_stats=False)""",
    (IMAGE, "BatchNorm is in training mode and uses batch statistics"): """
    trained(nn.Sequential(conv(), norm(2)).eval())""",
    (IMAGE, WRITTEN): """
    both("(m.conv.weight.mul_(2), m.bn(m.conv(x)))[1]");
    both("(m.bn.running_var.mul_(2), m.bn(m.conv(x)))[1]");
    over("(c.add_(1), y * c)[1]", conv(), 4, 1, 1)""",
    (IMAGE, "the folded weights overflow or underflow"): 'over("y / 0", conv(), 1)',
    (IMAGE, "the folded bias overflows"): 'over("y + math.inf", conv(), 1)',
    ((2, 5, 3), MIXES): f'over("y.flatten(1) * 2", {LINEAR}, 1)',
    (IMAGE, MIXES): 'over("y.flatten(0, 1) * 2", conv(), 1)',
    ((2, 1, 3), "its rank depends on sizes"): """
    Forward("x.squeeze()"), nn.Linear(3, 4), norm(1)""",
    (WIDE, "its output may be laid out otherwise"): f"""
    Forward("{LAST}"), nn.AdaptiveAvgPool2d(1), valid(1), norm(2, 6), nn.AdaptiveAvgPool2d(2)""",
}
BEFORE: dict[Any, str] = {
    (WIDE, (nn.Conv2d,)): """
    norm(2), nn.Conv2d(4, 8, 3, groups=4); norm(2), valid(2, stride=2, dilation=2);
    norm(2), valid(1, padding="same"); norm(2), valid(3, padding=1, padding_mode="reflect")""",
    ((5, 300), (nn.Linear,)): "norm(1, 300), nn.Linear(300, 300)",  # more than a block
    # Constants repeat a single channel, and what repeats a channel is no example of other calls.
    (WIDE, 1, GRAY): """
    before("x.relu() * c", valid(3), 4, 1, 1);
    Forward("(m.layer((y := x - 0.5) * m.c), y)", layer=valid(3), c=torch.rand(4, 1, 1));
    before("x * c", up(4, 6, 3, stride=2, groups=2), 1, 4, 1, 1)""",
    (WIDE, 2, GRAY): 'before("(x - 0.485) / c", valid(3), 4, 1, 1)',
    ((2, 4, 6), 1, (2, 1, 6)): 'nn.Linear(6, 8), before("x * c", nn.Conv1d(4, 5, 3), 4, 1)',
    (WIDE[1:], 1, GRAY[1:]): 'before("x * c", valid(3), 4, 1, 1)',
    (GRAY, 1, WIDE): 'before("x * c * c", valid(3), 4, 1, 1)',
    # a BatchNorm of no elements takes any channels
    ((0, 2, 3), 2, (0, 1, 3)): """
    Forward("m.c(m.bn(x) * m.s)", bn=norm(1, 2), c=nn.Conv1d(2, 2, 1), s=torch.rand(2, 1))""",
    # what is repeated counts in the statistics of a BatchNorm that trains
    ((2, 3, 3), 1, (2, 3, 1)): """
    trained(nn.Sequential(nn.ReLU(), norm(1, 3), before("x + c", nn.Linear(3, 3), 3)).eval())""",
    # a layer fixes its channels, so that nothing expands them
    ((3, 4), (nn.Linear, nn.Linear)): """
    Forward("m.layer(m.layer(x) * m.c)", layer=nn.Linear(4, 4), c=torch.rand(4) + 0.5)""",
    (WIDE, "the layer pads with zeros, which are not shifted"): """
    norm(2), up(4, 6, 3); norm(2), valid(3, padding="same")""",
    (WIDE, 0): 'before("(y := x * c) + y.mean()", valid(3), 4, 1, 1)',
    (WIDE, READ_ELSEWHERE): 'Forward("(m.layer(y := x * 0.5), y)", layer=valid(3))',
    (GRAY, SHAPE): 'before("x * c", valid(3), 4, 1, 1)',
    ((6, 6), SHAPE): 'before("x * c", valid(3), 4, 1, 1)',
    (WIDE, WRITTEN): 'Forward("(m.layer.weight.mul_(2), m.layer(x * 2))[1]", layer=valid(3))',
    (WIDE, OTHER_DTYPE): 'before("x.int() / c", valid(3), 1)',
    (WIDE, "the shift is so large that it would cancel after the layer only"): """
    before("x - 100.0", valid(3), 1)""",
    (WIDE, "the folded weights overflow or underflow"): """
    Forward("m.layer(x * m.c)", layer=valid(3), c=1e-320 * torch.ones(4, 1, 1).double())""",
    (WIDE, "what the layer would keep for gradients is written later"): """
    Forward("m.layer((y := x + 1.0) * 0.5) + y.mul_(2.0).sum()", layer=valid(3))""",
    (WIDE, "the affine lays its output out otherwise"): f"""
    Forward("torch.stack((y := m.pair({LAST}[:, :1].relu()), y), 1)",
    pair=nn.Sequential(norm(2, 1), nn.Conv2d(1, 1, 1)))""",
}
BOTH_SIDES = {(FOLD, *case): text for case, text in BEHIND.items()}
BOTH_SIDES |= {(FORWARD, *case): text for case, text in BEFORE.items()}


@spelled(BOTH_SIDES, cells="model case")
def test_what_is_beside_a_layer(model: str, case: Any) -> None:
    tried_on(case[0], model, *case[1:])


def test_a_folded_parameter_can_be_written_and_is_frozen_as_it_was() -> None:
    layer = nn.Linear(3, 4, bias=False).requires_grad_(False)
    fast = optimized_by(FOLD, over("y - 1.0", layer).double().eval(), torch.ones(2, 3).double())
    fast.load_state_dict(fast.state_dict())

    assert all(each.is_contiguous() and not each.requires_grad for each in fast.parameters())


RELIED_ON = {
    # A layer of no rows leaves its dtype, and the product with a constant does not.
    FOLD: (FOLD, 'over("y * c", up(4, 4, 3), 4, 1, 1)', torch.empty(0, 4, 3, 3)),
    FORWARD: (FORWARD, 'before("x / 255.0", valid(3), 1)', torch.ones(WIDE).byte()),
}


@rows("name model later", RELIED_ON)
def test_a_dtype_that_was_relied_on_is_required_of_later_calls(name, model, later):
    fast = tried_on(name, model, WIDE, 1)
    with pytest.raises(optimizer.InputError, match=r"float64 and got torch\.(uint8|float32)"):
        fast(later)


def test_a_constant_that_widens_what_autocast_narrows_stays() -> None:
    model = built('over("y * c", nn.Linear(4, 4), 4, dtype=torch.float32)')
    reason = "autocast gives the layer another dtype than the constant"

    with torch.autocast("cpu", torch.bfloat16):
        tried(FOLD, model, (torch.ones(2, 4),), reason)
